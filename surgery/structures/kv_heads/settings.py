"""Settings of a conversion to fewer KV heads. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.common.setting import setting
from surgery.engines.limits import Engine
from surgery.structures.settings import Allocation, StructureSettings, check_spectrum

Method = Literal["fisher", "kv-heads", "procrustes", "mean-pool", "key-norm"]


@dataclass(frozen=True)
class KVHeadsSettings(StructureSettings):
    """Settings of ``surgery convert --to gqa`` and ``--to mqa``, which keeps one head."""

    method: Method = setting(
        "fisher",
        "How the transform is found.",
        plugins="kv_heads_methods",
        more="fisher merges heads weighted by the loss; the others are for comparison.",
        section="Method",
    )
    kv_ratio: float | None = setting(None, unset="0.5", section="Budget")
    kv_heads: int | None = setting(
        None,
        "KV heads to keep in every layer, in place of a ratio.",
        more="1 is multi-query. The ratio has to be that of a number of heads that divides theirs.",
        unset="half of them",
        least=1,
    )
    allocate: Allocation = setting(
        "uniform",
        "KV heads of layers: as many in each, or by spectrum, with the number or the ratio as the average.",
        more="spectrum: numbers of heads whose predicted errors are least in all; method fisher with text only.",
        section="Method",
        advanced=True,
    )
    carrier: Literal["auto", "own", "decilm"] = setting(
        "auto",
        "What holds the result: auto is the source's class, or own (of this package) where layers differ; decilm holds "
        "those too, for vLLM and llama.cpp.",
        more="decilm is of Llama without biases only.",
        section="Output",
    )
    engine: Engine | None = setting(
        None,
        "Refuse what this engine, or all of them, does not carry; layers that differ become DeciLM's.",
        section="Output",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads is not None and self.kv_ratio is not None:
            raise SurgeryError("give kv_heads or kv_ratio, not both", setting="kv_heads")
        check_spectrum(self)
        if self.method == "key-norm" and self.carrier != "auto":
            raise SurgeryError(
                "method key-norm is written in the source's family: leave carrier auto", setting="method"
            )
        if self.engine is not None and self.carrier == "own":
            raise SurgeryError(
                f"engine {self.engine} does not load the custom model class. Leave carrier auto", setting="engine"
            )

    def ending(self, target: str) -> str:
        """Return the ending of the default output name: "mqa" for one head, whichever target is named."""
        return super().ending("mqa" if self.kv_heads == 1 else target)
