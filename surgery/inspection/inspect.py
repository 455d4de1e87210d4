"""``surgery inspect``: a checkpoint's attention, KV bytes and possible conversions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from surgery.engines.verdict import loads
from surgery.families import head_shape
from surgery.inspection.architecture import model_facts
from surgery.inspection.converted import MODEL_TYPES, converted_facts
from surgery.inspection.targets import forecast_targets, option_ranks, smallest_targets
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.plain_decoder import plain_config
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.kept_layers import converted_layers
from surgery.structures.mla.settings import ConvertSettings

CONTEXTS = (8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Inspection:
    """Facts of a checkpoint, as JSON values.

    Attributes:
        name: name of the folder.
        architecture: facts of the attention and of the whole model.
        windows: sliding window in tokens of every layer with keys and values; None for full attention.
        kv: KV bytes per token, and of one sequence by its length, in the checkpoint's dtype.
        targets: possible conversions: model class and reasons, KV bytes, and the engines that load the result.
        advice: recommended targets, :func:`surgery.inspection.inspect.advice`; empty if none applies.
    """

    name: str
    architecture: dict
    windows: list[int | None]
    kv: dict
    targets: list[dict]
    advice: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        return asdict(self)


def inspect_checkpoint(source: str | Path) -> Inspection:
    """Inspect a checkpoint; unsupported attention is reported as the reason why a target does not apply.

    Raises SurgeryError: the checkpoint cannot be read, or its model family is not supported.
    """
    reader = open_model(source)
    if reader.config.get("model_type") in MODEL_TYPES:
        return Inspection(**converted_facts(reader, CONTEXTS))
    opened = Source.of(reader, ConvertSettings(), config=plain_config(reader.config))
    windows = [opened.windows[layer] for layer in converted_layers(opened.stateful, opened.layers)]
    targets = forecast_targets(opened)
    return Inspection(
        name=opened.reader.name,
        architecture=_architecture(opened),
        windows=windows,
        kv=kv_bytes(opened, len(windows)),
        targets=targets,
        advice=advice(targets, smallest_targets(opened)),
    )


def kv_bytes(opened: Source, layers: int) -> dict:
    """Compute KV bytes in the checkpoint's dtype: per token, per token and caching layer, and by sequence length."""
    bytes_at = kv_bytes_of(opened.reader.config, _attention_dtype(opened))
    whole = bytes_at(1)  # sliding windows hold the first token, too
    at = dict(zip(CONTEXTS, map(bytes_at, CONTEXTS), strict=True))
    return {"bytes_per_token": whole, "bytes_per_token_and_layer": whole // layers, "bytes_at": at}


def _architecture(opened: Source) -> dict:
    config, reader = opened.config, opened.reader
    heads, kv_heads, head_dim = head_shape(config)
    names = {name.rpartition("self_attn.")[2] for name in opened.family.attention_names(reader, opened.first_layer)}
    return {
        **model_facts(reader, config, _attention_dtype(opened)),
        "model_type": reader.config["model_type"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "biases": [name[0] for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias") if name in names],
        "qk_norm": opened.qk_norm,
        "dequantised_from": reader.dequantised_from,
        "stored_as": reader.stored_as,
    }


def _attention_dtype(opened: Source):
    return opened.reader.info(opened.family.attention_names(opened.reader, opened.first_layer)[0]).dtype


def advice(targets: Sequence[dict[str, Any]], smallest: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Choose the recommended rows of :func:`surgery.inspection.targets.forecast_targets`, before any calibration.

    KV bytes and engine support are computed for this checkpoint. The ranking by quality is that of SmolLM2-135M
    (docs/results.md); ``surgery plan`` measures the checkpoint itself.

    Args:
        smallest: additional rows with smaller budgets (:func:`surgery.inspection.targets.smallest_targets`).

    Returns:
        "quality" and "smallest": a row each; "engines": a row for each engine that loads one, by test or by its own
        check. Empty if no target applies. Rows with a caution are left out, except from ``smallest``.
    """
    applicable = [row for row in targets if row["applies"] and not row["caution"]]
    if not applicable:
        return {}
    ranks = option_ranks()
    all_sizes = [*applicable, *(row for row in smallest if row["applies"])]
    # In the order of the targets, caches that engines read directly precede those that are rebuilt at every step.
    names = [row["to"] for row in applicable]
    engines = {}
    for name in applicable[0]["engines"]:
        loadable = [row for row in reversed(applicable) if loads(row["engines"][name])]
        if loadable and name != "transformers":
            engines[name] = min(loadable, key=lambda row: (names.index(row["to"]), name not in row["command"]))
    return {
        "quality": min(applicable, key=lambda row: ranks.get(row["command"], len(ranks))),
        # At the longest context, where first tokens matter little; of equal sizes the later target, which loses less.
        "smallest": min(reversed(all_sizes), key=lambda row: round(list(row["kv_ratio_at"].values())[-1], 2)),
        "engines": engines,
    }
