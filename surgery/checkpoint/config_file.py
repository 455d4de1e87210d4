"""Reading of config.json; sizes are validated before anything allocates memory for them."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from pathlib import Path
from typing import Any

from surgery.checkpoint.disk import read_json
from surgery.common.errors import SurgeryError
from surgery.common.size_names import SIZE_NAMES

# An order of magnitude above the largest models. transformers allocates a list entry per layer and a frequency per
# element of a head, whatever the weights hold.
LIMITS = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**40,
    "sliding_window": 2**40,
}
"""Upper limits of config entries."""

RUN_CHOICES = (
    *("attn_implementation", "_attn_implementation", "_attn_implementation_internal"),
    *("experts_implementation", "_experts_implementation", "_experts_implementation_internal"),
    *("fusion_config", "kernel_config", "distributed_config"),
)
"""Config keys that select the code that runs a model, hub kernels included; dropped on reading."""

REDIRECTIONS = {
    "transformers_weights": "makes transformers load other weights than surgery reads",
    "configuration_files": "makes some versions of transformers load another config",
    "per_layer_config": "gives layers different shapes, which is not supported",
}
"""Config keys with which transformers would read other files or build other layers than this package."""


def read_config(path: Path) -> dict[str, Any]:
    """Read and validate a config.json.

    Raises SurgeryError: the file cannot be read, is not a JSON object, has impossible sizes or invalid rotary settings,
    or refers to other files.
    """
    config = read_json(path)
    for name, effect in REDIRECTIONS.items():
        if config.get(name) is not None:
            raise SurgeryError.at(path, f"{name} {effect}; remove it, or use a checkpoint without this key")
    check_sizes(config, str(path))
    if not isinstance(config.get("model_type"), str | None):
        raise SurgeryError.at(path, "model_type is not a string; repair it or download it again")
    return config


def check_sizes(config: dict[str, Any], where: str) -> None:
    """Raise SurgeryError if a config or a nested config has an impossible size or invalid rotary settings."""
    for name, value in config.items():
        if name == "sliding_window" and config.get("use_sliding_window") is False:
            continue  # unused; Qwen2-MoE stores a 0 then
        limit = LIMITS.get(SIZE_NAMES.get(name, name))
        if limit is not None:
            # Some entries are lists with a value per layer.
            for each in value if isinstance(value, list) else [] if value is None else [value]:
                if type(each) is not int or not 1 <= each <= limit:
                    raise SurgeryError(f"{where}: {name} must be a whole number from 1 to {limit:,}, not {each!r}")
        elif name in ("rope_parameters", "rope_scaling") and not isinstance(value, dict | None):
            raise SurgeryError(f"{where}: {name} must be a JSON object, not {value!r}")
        elif isinstance(value, dict):
            check_sizes(value, f"{where}, {name}")


def without_keys(config: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Remove keys from a config and its nested configs."""
    return {
        name: without_keys(value, names) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in names
    }


def with_legacy_rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Add transformers 4's rotary keys to a config.json for loaders that ignore ``rope_parameters`` (mlx-lm)."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return config
    apart = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope.get("rope_type", "default") != "default":
        apart["rope_scaling"] = {name: value for name, value in rope.items() if name not in apart}
    return {**config, **apart}


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments for a transformers config class; a deep copy, since the class modifies dictionaries."""
    return {name: _floats(deepcopy(value)) for name, value in config.items() if name not in ("model_type", "auto_map")}


def _floats(value: Any) -> Any:
    """Decode transformers' spelling of infinity, {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_floats(each) for each in value]
    return float(value["__float__"]) if isinstance(value, dict) and value.keys() == {"__float__"} else value
