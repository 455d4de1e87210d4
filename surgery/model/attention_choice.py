"""Checks of `attn_implementation` against what a converted model supports.

transformers offers `eager`, `sdpa`, FlashAttention, flex attention, functions registered by users, and kernels from the
Hub. Only the first two take any mask and any head width, as conversions need; FlashAttention takes causal masks only.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from torch import nn

from .attention_functions import has_learned_sinks, is_flash, own_softmax
from .cache_layer import Call
from .configuration_surgery import SurgeryConfig
from .parts import entries_of

FLASH_WIDTH = 256
"""Largest head dimension that FlashAttention supports."""


def check_attention(config: SurgeryConfig, implementation: str | None, *, family_flash: bool) -> None:
    """Raise ValueError if a model cannot run with an `attn_implementation`; None leaves the choice to transformers.

    `family_flash`: whether the family's own decoder supports FlashAttention.
    """
    if implementation in (None, "eager") or not (problem := _problem(config, implementation, family_flash)):
        return
    possible = ["eager"] if own_softmax(config) else ["eager", "sdpa"]
    if not flash_problem(config, family_flash):
        possible.append("flash_attention_2")
    raise ValueError(f'attn_implementation="{implementation}": {problem}. This model supports {", ".join(possible)}.')


def check_weights(config: SurgeryConfig, decoder: nn.Module, call: Call) -> None:
    """Raise ValueError if a call requests attention weights that the model cannot return."""
    if not call.get("output_attentions", getattr(decoder.config, "output_attentions", False)):
        return
    if (implementation := decoder.config._attn_implementation) != "eager":
        raise ValueError(
            f"output_attentions: {implementation} attention returns no weights; call set_attn_implementation('eager')."
        )
    for index, entry in enumerate(entries_of(config)):
        if not entry.gives_weights:
            raise ValueError(
                f"output_attentions: streaming heads of layer {index} have no weights over all tokens; leave it out."
            )


def flash_problem(config: SurgeryConfig, family_flash: bool) -> str | None:
    """Return the reason why FlashAttention cannot run a model; None if it can."""
    if not family_flash or has_learned_sinks(config):
        return f"FlashAttention cannot run {config.base_model_type}"
    for index, entry in enumerate(entries_of(config)):
        if not entry.gives_weights or entry.has_window:
            return f"layer {index} needs its own mask, and FlashAttention supports causal masks only"
        if (width := entry.key_width(config)) > FLASH_WIDTH:
            return f"keys of layer {index} have {width} elements, and FlashAttention supports at most {FLASH_WIDTH}"
    return None


def _problem(config: SurgeryConfig, implementation: str, family_flash: bool) -> str | None:
    if implementation.startswith("paged|"):
        return "paged attention caches plain keys and values, which this model does not have"
    if implementation == "sdpa":
        return "PyTorch's SDPA supports neither logit softcaps nor learned sinks" if own_softmax(config) else None
    if implementation == "flex_attention":
        return "flex attention needs block masks and head sizes that are powers of 2"
    if is_flash(implementation):
        return flash_problem(config, family_flash)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return None if implementation in ALL_ATTENTION_FUNCTIONS else "not registered with transformers"
