"""Estimates of memory, disk and operations of a conversion, from shapes alone.

Symbols are those of :mod:`surgery.families.anatomy`, with n = G (d + e) the KV width of a layer, T the length of a
sequence, N calibration and M held-out sequences, B the batch size, V the vocabulary, P the parameters of the largest
decoder layer, s and c the bytes per element in the checkpoint and in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from surgery.calibration.settings import ConversionSettings
from surgery.calibration.statistics import sums_bytes
from surgery.families.base import LAYER_PREFIX, head_shape
from surgery.model.attention_functions import own_softmax
from surgery.running.experts import share_of_experts
from surgery.running.layer_stream import TOKEN_SLICE, VOCABULARY_SLICE
from surgery.running.source import OwnSource, Source

# Speed of a layer relative to one large matrix product; norms, softmax and small products are slower.
EFFICIENCY = 0.5
# Number of [n, n] float64 matrices that are alive at once while a layer is converted: both moments, both in the key
# basis, their roots, eigenvectors and workspace.
ALGEBRA_MATRICES = 8


def seconds_of(flops: int | None, flops_per_second: float | None) -> float | None:
    """Estimate the time of a model's operations from the speed of one large matrix product; None if either is None."""
    return None if flops is None or not flops_per_second else flops / (flops_per_second * EFFICIENCY)


@dataclass(frozen=True)
class Demand:
    """Quantities of a structure that determine the cost of the conversion.

    Attributes:
        cached: elements that the result caches per token and layer.
        statistics, gradients, lags: whether it gathers moments of calibration text, of the loss gradients, over lags.
        results, steps, exact: number of stages that run on all held-out text, on a few sequences, and on a few tokens.
        splits, split_sequences: most splits of the budget that are tried, and held-out sequences for each.
        rescales: whether the residual stream is rescaled, and with it the embeddings.
    """

    cached: int
    statistics: bool = False
    gradients: bool = False
    lags: bool = False
    results: int = 1
    steps: int = 0
    exact: int = 0
    splits: int = 1
    split_sequences: int = 0
    rescales: bool = False


@dataclass(frozen=True)
class Workload:
    """Shapes and demand that determine the cost of a conversion.

    Attributes:
        layer_parameters, active_parameters: parameters of the largest decoder layer, and those that one token uses.
        intermediate: intermediate size I of the feed-forward block; the sum over a token's experts.
    """

    layers: int
    layer_parameters: int
    active_parameters: int
    attention_parameters: int
    intermediate: int
    hidden: int
    heads: int
    head_dim: int
    kv_heads: int
    vocabulary: int
    length: int
    calibration: int
    held_out: int
    recall_prompts: int
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
        expert = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        attention = 2 * (heads + kv_heads) * head_dim * config.hidden_size
        largest, active = _layer_sizes(opened)
        calibration = tokens["calibration"] if demand.statistics else 0
        return cls(
            layers=opened.layers,
            layer_parameters=largest,
            active_parameters=active,
            attention_parameters=attention,
            intermediate=max(expert, (active - attention) // (3 * config.hidden_size)),
            hidden=config.hidden_size,
            heads=heads,
            head_dim=head_dim,
            kv_heads=kv_heads,
            vocabulary=config.vocab_size,
            length=tokens["length"],
            calibration=calibration,
            held_out=tokens["held_out"],
            recall_prompts=tokens["recall_prompts"],
            batch=settings.batch_size,
            stored=stored,
            compute=opened.stream.dtype.itemsize,
            on_host=opened.stream.device.type == "cpu",
            own_softmax=own_softmax(config),
            demand=demand,
        )

    @property
    def kv_width(self) -> int:
        return 2 * self.kv_heads * self.head_dim

    @property
    def stages(self) -> int:
        """Number of stages, including the source; each has its hidden states."""
        return 1 + self.demand.exact + self.demand.steps + self.demand.results

    @property
    def boundary_bytes(self) -> int:
        """Temporary disk bytes of the sweeps: N T D elements per layer."""
        return self.calibration * self.length * self.hidden * self.layers * self.compute

    @property
    def statistics_bytes(self) -> int:
        """Temporary disk bytes of the statistics: four moments n² (one without gradients), and lags."""
        if not self.demand.statistics:
            return 0
        moments = 4 if self.demand.gradients else 1
        lags = 3 * self.kv_heads * self.head_dim // 2 * self.heads if self.demand.lags else 0
        return self.layers * 8 * (moments * self.kv_width**2 + lags)

    def memory(self) -> dict:
        """Estimate the peak bytes of host and device memory, the larger of calibration and conversion, by part.

        ======================= =====================================================================================
        one layer               P (s + c): its tensors as stored, and the module that runs
        activations             calibration: 2 N T D c (gradients at a boundary, inputs of the attention), and
                                2 N T n c with gradients (keys and values of a layer, and their gradients)
        held-out text           conversion: M T D c per stage
        one batch               calibration: B T (16 D + 6 H d + 6 I) c for autograd; conversion: 3 B T H n c for the
                                queries of the merged stage; at least one slice of the vocabulary
        attention weights       4 H T² c of one sequence for lag statistics; 5 B H T² c for logits with a soft cap or
                                learned sinks, which fused attention does not support
        statistics              8 matrices [n, n] in float64; sums of two, twice, while they are gathered
        float64 forms           the attention in float64, three times, and two merged stages of H d n elements each
        rescaled tensor         the embeddings, if the residual stream is rescaled
        process                 Python, torch and transformers as loaded now
        ======================= =====================================================================================

        An accelerator holds the layer, its batch, its attention weights and the sums of its moments; everything else is
        on the host.
        """
        process = psutil.Process().memory_info().rss
        phases = [self._calibration_memory(), self._conversion_memory()]
        if self.demand.rescales:
            phases.append(({"rescaled tensor": self.vocabulary * self.hidden * self.stored}, {}))
        if self.on_host:
            phases = [({**host, **device}, {}) for host, device in phases]
        host = max((host for host, _ in phases), key=lambda parts: sum(parts.values()))
        device = max((device for _, device in phases), key=lambda parts: sum(parts.values()))
        return {
            "host_bytes": process + sum(host.values()),
            "host_parts": {**host, "process": process},
            "device_bytes": sum(device.values()),
            "device_parts": device,
        }

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
        held_out = (self.held_out + self.recall_prompts) * self.length
        demand, flops = self.demand, {}
        if tokens := self.calibration * self.length:
            flops["calibrate: forward"] = tokens * forward
            flops["calibrate: backward"] = tokens * forward * (3 if demand.gradients else 1)
        if demand.splits > 1 and self.held_out:
            split_tokens = demand.splits * min(self.held_out, demand.split_sequences) * self.length
            flops["try splits of the budget"] = split_tokens * forward
        flops["convert"] = (1 + demand.results) * held_out * forward
        flops["verify: reload and run"] = held_out * forward
        return flops

    def _algebra_bytes(self) -> int:
        return self.demand.statistics * 8 * ALGEBRA_MATRICES * self.kv_width**2

    def _sums_bytes(self) -> int:
        return sums_bytes(self.kv_width, gradients=self.demand.gradients)

    def _layer_bytes(self) -> int:
        return self.layer_parameters * (self.stored + self.compute)

    def _vocabulary_bytes(self) -> int:
        """Estimate the bytes of one slice of the vocabulary: its weights, logits, log-probabilities and their sums."""
        rows = min(self.vocabulary, VOCABULARY_SLICE)
        tokens = min(self.batch * self.length, TOKEN_SLICE)
        return rows * self.hidden * (self.stored + self.compute) + 4 * 3 * rows * tokens

    def _calibration_memory(self) -> tuple[dict[str, int], dict[str, int]]:
        tokens, batch = self.calibration * self.length, min(self.batch, self.calibration) * self.length
        if not tokens:
            return {"statistics": self._algebra_bytes()}, {}
        width = 16 * self.hidden + 6 * self.heads * self.head_dim + 6 * self.intermediate
        gradient_width = 2 * self.kv_width if self.demand.gradients else 0
        host = {
            "activations": (2 * self.hidden + gradient_width) * tokens * self.compute,
            "statistics": max(self._algebra_bytes(), self._sums_bytes()),
        }
        one_batch = max(batch * width * self.compute, self._vocabulary_bytes())
        device = {"one layer": self._layer_bytes(), "one batch": one_batch}
        if not self.on_host:
            device["moments"] = self._sums_bytes()
        weights = max(4 * self.demand.lags, 5 * self.own_softmax * min(self.batch, self.calibration))
        if weights:
            device["attention weights"] = weights * self.heads * self.length**2 * self.compute
        return host, device

    def _conversion_memory(self) -> tuple[dict[str, int], dict[str, int]]:
        sequences = self.held_out + self.recall_prompts
        merged = self.heads * self.head_dim * self.kv_width if self.demand.exact else 0
        boundary = self.length * self.hidden * self.compute
        host = {
            "held-out text": self.stages * sequences * boundary,
            "statistics": self._algebra_bytes(),
            "float64 forms": 8 * (3 * self.attention_parameters + 2 * merged),
        }
        batch = min(self.batch, sequences) * self.length
        width = self.kv_width if self.demand.steps else self.demand.cached
        queries = 3 * batch * self.heads * width * self.compute
        device = {
            "one layer": self._layer_bytes() + 2 * merged * self.compute,
            "one batch": max(queries, self._vocabulary_bytes()),
        }
        if self.own_softmax:
            rows = min(self.batch, sequences) * self.heads * self.length
            device["attention weights"] = 5 * rows * self.length * self.compute
        return host, device


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
