"""Loading of configs and tokenizers, with transformers' errors as one line."""

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
"""Text model types without a causal language model class in transformers."""

DRAWN = ("kaiming_uniform_", "normal_", "uniform_")
"""Functions of `torch.nn.init` that initialize linear layers and embeddings."""

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
    StrictDataclassError,  # a config with invalid or contradictory values
)


def is_of_loading(error: Exception) -> bool:
    """Return whether an error may come from loading by transformers or by tokenizers, which raises plain exceptions."""
    return isinstance(error, LOADING) or type(error) is Exception


def causal_class(config: Any) -> type[PreTrainedModel]:
    """Return the language model class for a config; Mistral Small 4's is listed only as vision-language.

    Raises KeyError: there is no such class.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    mapping = AutoModelForCausalLM._model_mapping
    return (mapping if type(config) in mapping else AutoModelForImageTextToText._model_mapping)[type(config)]


@contextmanager
def loading(what: str, remedy: str = "") -> Iterator[None]:
    """Convert transformers' errors in a block that loads ``what`` to a one-line SurgeryError.

    Raises SurgeryError: loading failed; ``remedy`` is appended to the message.
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
    """Skip the random initialization of meta tensors, which PyTorch does in Python at a millisecond each.

    Unlike in transformers' `no_init_weights`, weights are tied, and tensors with memory are initialized.
    """
    originals = {name: getattr(nn.init, name) for name in DRAWN}
    for name, original in originals.items():
        setattr(nn.init, name, partial(_draw_unless_meta, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def _draw_unless_meta(original: Callable[..., Tensor], tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    return tensor if tensor.is_meta else original(tensor, *args, **options)


def model_type_of(path: Path) -> str | None:
    """Return the ``model_type`` in a folder's config.json."""
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(path, local_files_only=True)
    return config.get("model_type")


def attention_of(path: Path) -> dict[str, str]:
    """Return the from_pretrained arguments that a folder's family needs for its attention; mostly none."""
    family = FAMILIES.get(model_type_of(path))
    return {"attn_implementation": "eager"} if family is not None and family.eager else {}


def with_standard_names(config):
    """Convert a config to the custom model class if the family has other tensor names or no text-only class."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    from surgery import model as own_model

    if "qwen3_vl_moe_text" in (config.model_type, getattr(config, "base_model_type", None)):
        # Published expert weights are transposed; transformers registers the conversion only for the whole model.
        turned = get_checkpoint_conversion_mapping("qwen3_vl_moe")
        register_checkpoint_conversion_mapping("qwen3_vl_moe_text", turned, overwrite=True)
    if config.model_type not in (*own_model.DECODERS, *PARTS):
        return config
    own_model.register()
    return own_model.SurgeryConfig.from_base(config, [None] * config.num_hidden_layers)


def load_config(path: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the transformers config of a folder; runs remote code only if trusted.

    Raises SurgeryError: transformers cannot load it.
    """
    from transformers import AutoConfig

    from surgery import model as own_model

    own_model.register()
    with loading(f"{path}/config.json"):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)


def load_tokenizer(
    path: Path, *, called: str | None = None, trust_remote_code: bool = False, remedy: str = ""
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, ``called`` so in errors; runs remote code only if trusted.

    Raises SurgeryError: transformers cannot load a tokenizer; ``remedy`` is appended to the message.
    """
    from transformers import AutoTokenizer

    with loading(f"tokenizer of {called or path}", remedy):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
        tokenizer("a")  # some damaged tokenizers load but fail in use
        return tokenizer
