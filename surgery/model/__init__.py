"""The project's own model classes: any supported decoder with a converted attention in place of its own.

By itself, or inside of a vision-language model. Used where no stock class can carry a conversion. Their files
travel beside the weights, so that the checkpoint loads without this package; they import torch, transformers and each
other, nothing else.

Of a kind of attention, `<kind>_entry.py` says what config.json has, how much a token takes in the cache and what else
follows; `<kind>_attention.py` computes it; its cache is `plain_cache`, `quantized_cache`, `exact_window_cache`,
`hybrid_cache` or `group_cache`. The entries are here without torch; the classes load when one of them is first used.
"""

from typing import Any

# Where `parts.entry_of` looks for them.
from . import cross_layer_entry, grouped_entry, hybrid_entry, latent_entry, low_rank_entry, streaming_latent_entry  # noqa: F401

__all__ = [
    "DECODERS",
    "PICTURES_AUTO_MAP",
    "LatentAttention",
    "SurgeryConfig",
    "SurgeryForCausalLM",
    "SurgeryForPicturesAndText",
    "SurgeryPicturesConfig",
    "auto_map",
    "register",
    "remote_code_files",
]

_OF_FILES = ("PICTURES_AUTO_MAP", "auto_map", "remote_code_files")
"""Names that need none of the classes."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _OF_FILES:
        from . import remote_code

        return getattr(remote_code, name)
    from . import auto_classes

    return getattr(auto_classes, name)
