"""Refusals of the written models: (aspect, name in `WRITTEN`) → a pattern of the one line that is raised.

A pair that stands nowhere here has to be right.
"""

from written_models import WRITTEN

STREAMING = ["hybrid", "streaming_latent", "streaming_blocks", "quantized_hybrid", "mixed"]
OWN_MASKS = [*STREAMING, "window", "quantized_window"]
QUANTIZED = [name for name in WRITTEN if name.startswith("quantized")]
COMPACT = {*OWN_MASKS, *QUANTIZED}
"""Models whose cache layers are no plain tensors of all tokens."""

RUNNING: dict[tuple[str, str], str] = {
    **{("assisted", name): "cache that can be cropped" for name in COMPACT},
    **{("prompt_lookup", name): "cache that can be cropped" for name in COMPACT},
    **{("static", name): "cannot continue" for name in COMPACT},
    **{("attentions", name): "have no weights over all tokens" for name in STREAMING},
    **{("flash", name): "needs its own mask" for name in OWN_MASKS},
}
"""Aspects of tests/matrix/test_running.py."""
