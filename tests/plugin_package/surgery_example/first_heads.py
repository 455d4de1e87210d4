"""``--to first-heads``: every group of query heads reads its first KV head; the others are dropped. A bad idea.

The command line loads this for its options, and torch with it; a package that minds has a second file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from surgery.architectures.own_family import attention_tensors, choose_carrier, planned_attention
from surgery.calibration.settings import ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.families.attention import CapturedAttention
from surgery.structures.base import Forecast, Outcome, Structure, TargetOption, unchanged_tensors
from surgery.structures.estimates import Demand
from surgery.structures.registry import Target


@dataclass(frozen=True)
class FirstHeadsSettings(ConversionSettings):
    """Settings of ``surgery convert --to first-heads``."""

    keep_heads: int = setting(1, "KV heads to keep, the first of as many groups.", least=1, section="Budget")

    def __post_init__(self):
        super().__post_init__()
        if self.kv_ratio is not None:  # inherited, and does not apply
            raise SurgeryError("kv_ratio: keep_heads determines the bytes; drop kv_ratio", setting="kv_ratio")


TARGET = Target(
    "first-heads",
    FirstHeadsSettings,
    "surgery_example.first_heads:FirstHeads",
    "attention that reads the first KV heads only",
    "drops KV heads",
)


@dataclass(frozen=True)
class LayerReport:
    """One layer of the report."""

    layer: int
    kept: tuple[int, ...]
    measured: dict[str, float]

    @staticmethod
    def columns():
        return ("kept heads",)

    def cells(self):
        return (" ".join(map(str, self.kept)),)


class FirstHeads(Structure):
    """Keeps ``keep_heads`` of a layer's KV heads."""

    options = (TargetOption(" --keep-heads 1", {"keep_heads": 1}, caution="a bad idea"),)

    def __init__(self, opened, settings, progress):
        super().__init__(opened, settings, progress)
        first = opened.anatomy(0)
        if first.kv_heads % settings.keep_heads:
            raise SurgeryError(f"--keep-heads {settings.keep_heads} does not divide {first.kv_heads}")
        self._kept = tuple(range(0, first.kv_heads, first.kv_heads // settings.keep_heads))
        self._carrier = choose_carrier(opened.reader.config, opened.layers, settings.keep_heads)
        self._width = settings.keep_heads * (first.head_dim + first.value_dim) * first.q.dtype.itemsize

    def forecast(self):
        return Forecast(
            config=self._carrier.config,
            tensors=self.plan(None),
            kv_bytes_per_token=self._width * self.opened.layers,
            model_type=self._carrier.model_type,
            reasons=[self._carrier.reason],
            demand=Demand(calibrates=False),
        )

    def plan(self, work):
        reader, first = self.opened.reader, self.opened.anatomy(0)
        tensors = unchanged_tensors(reader, self.opened.config)
        for layer in range(self.opened.layers):
            names = self.opened.family.attention_names(reader, layer)
            entries = len(self._kept)
            tensors |= planned_attention(reader, names, layer, first.heads, entries, first.head_dim)
        return tensors

    def convert_layers(self, work, writer):
        stream, runs, reports = self.opened.stream, work.stage_runs(("dropped",)), []
        for index in work.layers():
            source, entries = self.opened.anatomy(index), list(self._kept)
            biases = {name: getattr(source, name) for name in ("k_bias", "v_bias")}
            biases = {name: None if bias is None else bias[entries] for name, bias in biases.items()}
            smaller = replace(source, k=source.k[entries], v=source.v[entries], **biases)
            attention = CapturedAttention(smaller.to(stream.device, stream.dtype))
            with stream.layer(index) as layer:
                results = {"dropped": lambda attention=attention: attention}
                errors = runs.advance(layer, source, results, ("dropped",))
            for name, tensor in attention_tensors(smaller, index).items():
                writer.write(name, tensor)
            reports.append(LayerReport(index, self._kept, errors))
        return Outcome(
            config=self._carrier.config,
            target={
                "to": "first-heads",
                "method": "first",
                "model_type": self._carrier.model_type,
                "reasons": [self._carrier.reason],
            },
            layers=reports,
            scores=runs.scores(),
            simulated=runs.hidden["dropped"],
            custom_class=self._carrier.custom_class,
        )
