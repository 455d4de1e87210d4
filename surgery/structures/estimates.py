"""Estimates of memory, disk and time of a conversion, from shapes alone: one formula for every target.

Memory, with the symbols of :mod:`surgery.families.anatomy`, n = G (d + e) the KV width of a layer, B sequences of T
tokens in a batch, N calibration sequences, P the parameters of the largest decoder layer, s and c the bytes per element
in the checkpoint and in the compute dtype:

=============== ====================================================================================================
process         Python, torch and transformers: 800 MiB
one layer       P (s + c): its tensors as stored, and the module that runs
activations     (2 D + 2 n) N T c at a layer boundary and in the layer
one batch       the largest of: autograd of B T tokens, (16 D + 6 H d + 6 I) c each; one slice of the vocabulary;
                attention weights, 5 B H T² c without fused attention; for MLA the queries of the merged stage and
                those of its statistics, 3 B T H n c and 4 H T² c
algebra         in float64: the attention three times, 8 matrices [n, n], for MLA two merged forms [H d, n]; for the
                refit of W_o the attention twice, 4 matrices [H d, H d]
=============== ====================================================================================================

A batch and the algebra are never in memory together. An accelerator holds the layer and the batch, the host the rest.
docs/scale.md compares the sum with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.human import size
from surgery.families.base import LAYER_PREFIX, head_shape
from surgery.model.attention_functions import own_softmax
from surgery.running.experts import share_of_experts
from surgery.running.layer_stream import TOKEN_SLICE, VOCABULARY_SLICE
from surgery.running.source import OwnSource, Source

EFFICIENCY = 0.5
"""Speed of a layer relative to one large matrix product; norms, softmax and small products are slower."""
PROCESS_BYTES = 800 * 2**20
ERROR = 1.25
"""Ratio of the estimated memory to the measured one that is not exceeded in docs/scale.md."""


class NoMemory(SurgeryError):
    """The machine has far less memory than a conversion needs."""


def seconds_of(flops: int | None, flops_per_second: float | None) -> float | None:
    """Estimate the time of a model's operations from the speed of one large matrix product; None if either is None."""
    return None if flops is None or not flops_per_second else flops / (flops_per_second * EFFICIENCY)


@dataclass(frozen=True)
class Demand:
    """Work of a conversion beyond the tensors that it writes.

    Attributes:
        stages: number of forward passes over the held-out text, in addition to the source's and the verification's.
        calibrates: whether it gathers statistics of calibration text and of loss gradients.
        merges: whether layers also run in the merged form of MLA, with queries of the width of all keys and values.
    """

    stages: int = 1
    calibrates: bool = True
    merges: bool = False


@dataclass(frozen=True)
class Workload:
    """Shapes and demand that determine the cost of a conversion.

    Attributes:
        layer_parameters, active_parameters: parameters of the largest decoder layer, and those that one token uses.
    """

    layers: int
    layer_parameters: int
    active_parameters: int
    hidden: int
    heads: int
    head_dim: int
    kv_width: int
    vocabulary: int
    length: int
    calibration: int
    sequences: int
    batch: int
    stored: int  # s
    compute: int  # c
    on_host: bool
    own_softmax: bool
    demand: Demand

    @classmethod
    def of(
        cls, opened: Source | OwnSource, settings: ConversionSettings, tokens: dict[str, int], demand: Demand
    ) -> Workload:
        """Build the workload of an opened checkpoint from the token counts of a dry run."""
        config, stored = opened.config, opened.weight_dtype.itemsize
        heads, kv_heads, head_dim = opened.family.shape(config) if isinstance(opened, Source) else head_shape(config)
        largest, active = _layer_sizes(opened)
        return cls(
            layers=opened.layers,
            layer_parameters=largest,
            active_parameters=active,
            hidden=config.hidden_size,
            heads=heads,
            head_dim=head_dim,
            kv_width=2 * kv_heads * head_dim,
            vocabulary=config.vocab_size,
            length=tokens["length"],
            calibration=tokens["calibration"] if demand.calibrates else 0,
            sequences=tokens["held_out"] + tokens["recall_prompts"],
            batch=settings.batch_size,
            stored=stored,
            compute=opened.stream.dtype.itemsize,
            on_host=opened.stream.device.type == "cpu",
            own_softmax=own_softmax(config),
            demand=demand,
        )

    @property
    def attention_parameters(self) -> int:
        return (2 * self.heads * self.head_dim + self.kv_width) * self.hidden

    @property
    def activation_bytes(self) -> int:
        """Bytes of the activations of one layer's calibration."""
        return 2 * (self.hidden + self.kv_width) * self.calibration * self.length * self.compute

    @property
    def temporary_bytes(self) -> int:
        """Temporary disk bytes: N T D elements and four moments n² per layer."""
        if not self.calibration:
            return 0
        boundaries = self.calibration * self.length * self.hidden * self.layers * self.compute
        return boundaries + self.layers * 8 * 4 * self.kv_width**2

    def memory(self) -> dict[str, int]:
        """Estimate the peak bytes of host and device memory by the module's formula."""
        layer, batch = self.layer_parameters * (self.stored + self.compute), self._batch_bytes()
        rest = PROCESS_BYTES + self.activation_bytes
        if self.on_host:
            return {"host_bytes": rest + layer + max(batch, self._algebra_bytes()), "device_bytes": 0}
        return {"host_bytes": rest + self._algebra_bytes(), "device_bytes": layer + batch}

    def check_memory(self) -> None:
        """Raise NoMemory if the machine has far less memory than the estimate."""
        needed, total = self.memory()["host_bytes"], psutil.virtual_memory().total
        if needed > ERROR * total:
            hint = "lower calibration_tokens, calibration_length or batch_size"
            raise NoMemory(f"needs about {size(needed)} of memory, this machine has {size(total)}; {hint}", hint=hint)

    def estimate(self, flops_per_second: float | None) -> dict:
        """Estimate the floating point operations, and their time in seconds; None without a measured speed."""
        total = sum(self.phase_flops().values())
        seconds = seconds_of(total, flops_per_second)
        return {"total_flops": total, "flops_per_second": flops_per_second, "estimated_seconds": seconds}

    def phase_flops(self) -> dict[str, int]:
        """Estimate the operations of each phase, in order, from its forward passes.

        Statistics and linear algebra are not counted. Progress bars correct the remaining time by the measured pace.
        """
        forward = self.layers * (2 * self.active_parameters + 2 * self.length * self.heads * self.head_dim)
        calibration, held_out = (count * self.length * forward for count in (self.calibration, self.sequences))
        sweeps = {"calibrate: forward": calibration, "calibrate: backward": 3 * calibration} if calibration else {}
        attention = self.layers * (2 * self.attention_parameters + 2 * self.length * self.heads * self.head_dim)
        refit = 2 * self.calibration * self.length * attention  # of the source and of the result
        convert = (1 + self.demand.stages) * held_out + refit
        return {**sweeps, "convert": convert, "verify: reload and run": held_out}

    def _batch_bytes(self) -> int:
        tokens = self.batch * self.length
        intermediate = max(0, self.active_parameters - self.attention_parameters) // (3 * self.hidden)
        autograd = tokens * (16 * self.hidden + 6 * self.heads * self.head_dim + 6 * intermediate) * self.compute
        rows = min(self.vocabulary, VOCABULARY_SLICE)
        logits = 4 * 3 * rows * min(tokens, TOKEN_SLICE)  # with log-probabilities and their sums
        square = self.heads * self.length**2 * self.compute
        weights = 5 * self.batch * square if self.own_softmax else 0
        queries = 3 * tokens * self.heads * self.kv_width * self.compute + 4 * square if self.demand.merges else 0
        autograd = autograd + weights if self.calibration else weights
        return max(autograd, rows * self.hidden * (self.stored + self.compute) + logits, queries)

    def _algebra_bytes(self) -> int:
        merged = 2 * self.heads * self.head_dim * self.kv_width if self.demand.merges else 0
        closed_form = 3 * self.attention_parameters + 8 * self.kv_width**2 + merged
        return 8 * max(closed_form, 2 * self.attention_parameters + 4 * (self.heads * self.head_dim) ** 2)


def _layer_sizes(opened: Source | OwnSource) -> tuple[int, int]:
    """Count the parameters of the largest decoder layer: all, and those that one token uses."""
    reader = opened.reader
    totals = [[0, 0] for _ in range(opened.layers)]
    prefix = LAYER_PREFIX.partition("{")[0]
    for name in reader.names():
        if not name.startswith(prefix):
            continue
        layer = int(name.removeprefix(prefix).partition(".")[0])
        if layer < len(totals):
            numel = reader.info(name).nbytes // reader.info(name).dtype.itemsize
            totals[layer][".experts." in name] += numel
    largest = max(totals, key=sum)
    return sum(largest), round(largest[0] + share_of_experts(opened.config) * largest[1])
