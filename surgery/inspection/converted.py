"""What `surgery inspect` says of a checkpoint that caches latents already: of the project's own class, or MLA."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from surgery.checkpoint.config_file import check_sizes
from surgery.checkpoint.disk import read_json
from surgery.checkpoint.file_kinds import REPORT
from surgery.checkpoint.reader import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.human import per_token
from surgery.engines.number_formats import ruinous_formats
from surgery.families import FAMILIES, LATENT_FAMILIES, head_shape
from surgery.forecast import attention_structures as structures
from surgery.forecast.speed import batches, speed_against
from surgery.inspection.architecture import model_facts
from surgery.kernels.gpus import GPU
from surgery.kernels.planner import Attention, Grouped, Latent, LowRank
from surgery.running.loading import load_config
from surgery.running.source import attention_dtype

MODEL_TYPES = ("surgery", *LATENT_FAMILIES)


def converted_facts(reader: CheckpointReader, gpu: GPU, contexts: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of an :class:`surgery.inspection.inspect.Inspection`.

    Raises:
        SurgeryError: the config is impossible.
    """
    said = reader.config
    config = load_config(reader.path)
    dtype = attention_dtype(reader)
    layers = _structures(config, said, dtype.itemsize)
    family = FAMILIES.get(getattr(config, "base_model_type", None))
    windows = structures.windows_of(family, config)
    source = original(reader.path, config, windows, dtype.itemsize)
    cache_bytes = structures.cache_bytes_of(said, dtype, layers)
    held = {context: cache_bytes(1, context) for context in contexts}
    longest = max(contexts)
    weights = sum(reader.info(name).nbytes for name in reader.names())
    rows = batches(source or layers, weights, gpu)
    return {
        "name": reader.name,
        "architecture": _architecture(reader, config, layers, dtype),
        "windows": windows,
        "kv": {
            "bytes_per_token": round(held[longest] / longest),
            "bytes_per_token_and_layer": round(held[longest] / longest / len(layers)),
            "bytes_at": held,
        },
        "targets": [],
        "speed": speed_against(source, layers, rows, gpu),
    }


def original(folder: Path, config: Any, windows: structures.Windows, number_bytes: float) -> list[Attention] | None:
    """The attention that a checkpoint had before its first conversion; None where nothing tells.

    The report beside the weights says it, and of the own class its config; of what was MLA at first none does.
    """
    try:
        report = read_json(folder / REPORT)
    except SurgeryError:
        report = None
    while isinstance(report, dict) and report.get("previous"):
        report = report["previous"]
    try:
        said = report["source"]
        if said.get("model_type") in LATENT_FAMILIES:
            return None
        heads, kv_heads, head_dim = (int(said[name]) for name in ("heads", "kv_heads", "head_dim"))
        if not (0 < kv_heads <= heads and heads % kv_heads == 0 and head_dim > 0):
            raise ValueError("heads of no model")
        check_sizes({"num_attention_heads": heads, "head_dim": head_dim}, REPORT)
    except (AttributeError, TypeError, KeyError, ValueError, OverflowError, SurgeryError):
        if not hasattr(config, "base_model_type"):
            return None
        heads, kv_heads, head_dim = head_shape(config)
    size = {"key_bytes": number_bytes, "value_bytes": number_bytes}
    return [Grouped(heads, kv_heads, head_dim, head_dim, window, **size) for window in windows]


def _structures(config: Any, said: dict[str, Any], number_bytes: float) -> list[Attention]:
    own = said["model_type"] == "surgery"
    try:
        if own:
            return structures.of_own_class(config, number_bytes)
        return structures.of_stock_mla({**config.to_dict(), **said}, number_bytes)
    except KeyError as error:
        raise SurgeryError(f"config.json of {said['model_type']} does not say {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise SurgeryError(f"config.json of {said['model_type']} is damaged ({error})") from None


def _architecture(reader: CheckpointReader, config: Any, layers: list[Attention], dtype: Any) -> dict[str, Any]:
    base = getattr(config, "base_model_type", None)
    return {
        **model_facts(reader, config, dtype),
        "model_type": config.model_type + (f" over {base}" if base else ""),
        "attention": [f"{count} layers: {kind}" for kind, count in Counter(map(_kind, layers)).items()],
        "biases": [],
        "ruined_by": ruinous_formats(reader),
        "qk_norm": any(name.endswith("q_norm.weight") for name in reader.names()),
    }


def _kind(layer: Attention) -> str:
    """A layer's structure in words."""
    token = per_token(layer.token_bytes(131_072))
    if isinstance(layer, Latent):
        kept = f", the last {layer.window:,} tokens" if layer.window else ""
        return f"latent of {layer.rank} and {layer.rope_dim} rotary dimensions{kept}, a step reads {token} a token"
    if isinstance(layer, LowRank):
        ranks = " + ".join(str(block.rank) for block in layer.blocks)
        return f"keys rebuilt from latents of {ranks}, a step reads {token} a token"
    streaming = f", {layer.streaming_heads} of them streaming" if layer.streaming_heads else ""
    return f"{layer.kv_heads} keys and values of {layer.key_dim}{streaming}, a step reads {token} a token"
