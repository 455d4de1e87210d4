"""Configs and tokenizers of checkpoints; what transformers raises where it cannot load something, as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.common.machine_faults import is_panic
from surgery.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

PARTS = ("qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Language models for which transformers has no class by themselves."""

DRAWN = ("kaiming_uniform_", "normal_", "uniform_")
"""Functions of `torch.nn.init` by which linear layers and embeddings begin."""

LOADING = (
    ValueError,
    OSError,
    LookupError,
    ArithmeticError,
    AssertionError,
    TypeError,
    ImportError,
    AttributeError,
    RuntimeError,
    StrictDataclassError,  # a config whose values are impossible, or contradict each other
)


def is_of_loading(error: Exception) -> bool:
    """Return whether an error is of transformers' kinds, or of tokenizers, whose Rust raises plain exceptions."""
    return isinstance(error, LOADING) or type(error) is Exception


def causal_class(config: Any) -> type[PreTrainedModel]:
    """The class of a config's language model; Mistral Small 4's is named among vision-language models alone.

    Raises:
        KeyError: there is none.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    mapping = AutoModelForCausalLM._model_mapping
    return (mapping if type(config) in mapping else AutoModelForImageTextToText._model_mapping)[type(config)]


@contextmanager
def loading(what: str, remedy: str = "") -> Iterator[None]:
    """Turns what transformers raises in the block, which loads ``what``, into one line.

    Raises:
        SurgeryError: it cannot be loaded; ``remedy`` says what to do then.
    """
    try:
        yield
    except BaseException as error:
        if not (is_panic(error) or (isinstance(error, Exception) and is_of_loading(error))):
            raise
        reason = " ".join(str(error).split())
        reason = reason[:300] + " …" * (len(reason) > 300)
        raise SurgeryError(f"{what}: transformers cannot load it ({reason}){remedy and f'; {remedy}'}") from error


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Draw no initial values of parameters without memory, which PyTorch does in Python, a millisecond for each.

    Unlike under transformers' `no_init_weights`, weights are tied, and those that have memory are drawn.
    """
    originals = {name: getattr(nn.init, name) for name in DRAWN}
    for name, original in originals.items():
        setattr(nn.init, name, partial(_draw, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def _draw(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    return tensor if tensor.is_meta else original(tensor, *args, **options)


def model_type_of(path: Path) -> str | None:
    """``model_type`` in a folder's config.json."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(path, local_files_only=True)
    return config.get("model_type")


def attention_of(path: Path) -> dict[str, str]:
    """Return the arguments with which transformers gives a folder's model its family's attention; mostly none."""
    family = FAMILIES.get(model_type_of(path))
    return {"attn_implementation": "eager"} if family is not None and family.eager else {}


def with_standard_names(config):
    """A transformers config, or that of the custom class where a family has other names, or no class by itself."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    from surgery import model as own_model

    if "qwen3_vl_moe_text" in (config.model_type, getattr(config, "base_model_type", None)):
        # Published experts are turned the other way, which transformers knows of the whole model alone.
        turned = get_checkpoint_conversion_mapping("qwen3_vl_moe")
        register_checkpoint_conversion_mapping("qwen3_vl_moe_text", turned, overwrite=True)
    if config.model_type not in (*own_model.DECODERS, *PARTS):
        return config
    own_model.register()
    return own_model.SurgeryConfig.from_base(config, [None] * config.num_hidden_layers)


def load_config(path: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The transformers config of a folder; runs no code that lies in it unless that is trusted.

    Raises:
        SurgeryError: transformers refuses it.
    """
    from transformers import AutoConfig

    from surgery import model as own_model

    own_model.register()
    with loading(f"{path}/config.json"):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def load_tokenizer(
    path: Path, *, called: str | None = None, trust_remote_code: bool = False, remedy: str = ""
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; runs no code that lies in it unless that is trusted.

    Args:
        called: what a refusal calls the folder; None: its path.

    Raises:
        SurgeryError: there is none that transformers can read; ``remedy`` says what to do then.
    """
    from transformers import AutoTokenizer

    with loading(f"tokenizer of {called or path}", remedy):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer("a")  # some damaged ones load, and fail when they are used
        return tokenizer
