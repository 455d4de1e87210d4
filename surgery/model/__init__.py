"""Custom model classes: any supported decoder, its attention replaced by a converted one.

The decoder stands alone or inside a vision-language model. These classes hold conversions that no stock class of
transformers can. Their files ship with the checkpoint, which so loads without this package; they import only torch,
transformers and each other.

For each kind of attention, `<kind>_entry.py` defines its fields in config.json and properties such as the cache size of
a token, and `<kind>_attention.py` computes it. Its cache is `plain_cache`, `token_cache`, `quantized_cache`,
`residual_window_cache` or `hybrid_cache`. Entries load without torch; the model classes load on first use.
"""

from typing import Any

# `parts.entry_of` looks them up among the loaded modules.
from . import grouped_entry, hybrid_entry, latent_entry, low_rank_entry, streaming_latent_entry  # noqa: F401

__all__ = [
    "DECODERS",
    "PICTURES_AUTO_MAP",
    "LatentAttention",
    "SurgeryConfig",
    "SurgeryForCausalLM",
    "SurgeryForConditionalGeneration",
    "SurgeryPicturesConfig",
    "auto_map",
    "register",
    "remote_code_files",
]

_WITHOUT_CLASSES = ("PICTURES_AUTO_MAP", "auto_map", "remote_code_files")
"""Names that load without the model classes."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _WITHOUT_CLASSES:
        from . import remote_code

        return getattr(remote_code, name)
    from . import auto_classes

    return getattr(auto_classes, name)
