"""Refusals of the written models: (aspect, name in `WRITTEN`) → a pattern of the one line that is raised.

A pair that stands nowhere here has to be right.
"""

from written_models import WRITTEN

CROSS_LAYER = [name for name in WRITTEN if name.startswith("cross_layer")]
STREAMING = ["hybrid", "streaming_latent", "streaming_blocks", "quantized_hybrid", "mixed"]
OWN_MASKS = [*STREAMING, "window", "quantized_window"]
QUANTIZED = [name for name in WRITTEN if name.startswith("quantized")]
COMPACT = {*OWN_MASKS, *CROSS_LAYER, *QUANTIZED}
"""Models whose cache layers are no plain tensors of all tokens."""

LOADING: dict[tuple[str, str], str] = {
    ("gradient_checkpointing", name): "without gradient checkpointing" for name in CROSS_LAYER
}
"""Aspects of tests/matrix/test_loading.py."""

RUNNING: dict[tuple[str, str], str] = {
    **{("packed", name): "packed documents are not supported with shared caches" for name in CROSS_LAYER},
    **{("assisted", name): "cache that can be cropped" for name in COMPACT},
    **{("prompt_lookup", name): "cache that can be cropped" for name in COMPACT},
    **{("static", name): "cannot continue" for name in COMPACT},
    **{("attentions", name): "have no weights over all tokens" for name in STREAMING},
    **{("attentions", name): "output_attentions and output_router_logits need unshared caches" for name in CROSS_LAYER},
    **{("flash", name): "needs its own mask" for name in (*OWN_MASKS, *CROSS_LAYER)},
}
"""Aspects of tests/matrix/test_running.py."""
