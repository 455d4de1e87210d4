"""Remote code files of a checkpoint of the custom model classes, with which it loads without this package.

`auto_map` in config.json names a class of an entry module: the smallest one that imports all parts that the config
needs. The files are the relative imports of that module, collected by transformers' own functions, so that
`save_pretrained` writes the same files.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.dynamic_module_utils import get_relative_import_files, get_relative_imports

from .parts import parts_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FOLDER = Path(__file__).parent

ENTRIES = (
    "modeling_surgery_grouped",
    "modeling_surgery_latent",
    "modeling_surgery_quantized_latent",
    "modeling_surgery_hybrid",
    "modeling_surgery_low_rank",
    "modeling_surgery_quantized_low_rank",
    "modeling_surgery_quantized",
    "modeling_surgery_mixed",
    "modeling_surgery",
)
"""Entry modules of causal models, in the order of the search; the last one imports all parts."""

PICTURES_AUTO_MAP = {
    "AutoConfig": "configuration_surgery_pictures.SurgeryPicturesConfig",
    "AutoModelForImageTextToText": "modeling_surgery_pictures.SurgeryForConditionalGeneration",
}
"""`auto_map` of a vision-language model."""


def auto_map(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the `auto_map` of a causal model's config.json."""
    return {
        "AutoConfig": "configuration_surgery.SurgeryConfig",
        "AutoModelForCausalLM": f"{_entry(config)}.SurgeryForCausalLM",
    }


def entry_class(config: "PreTrainedConfig") -> type["PreTrainedModel"]:
    """Return the causal model class that the `auto_map` of a config names."""
    if config.attention_layers is None:
        return import_module(f".{ENTRIES[-1]}", __package__).SurgeryForCausalLM
    return import_module(f".{_entry(vars(config))}", __package__).SurgeryForCausalLM


def remote_code_files(auto_map: Mapping[str, str]) -> list[Path]:
    """Return the files to copy next to the weights of a checkpoint whose config.json has this `auto_map`."""
    modules = [FOLDER / f"{name.partition('.')[0]}.py" for name in auto_map.values()]
    imported = {Path(path) for module in modules for path in get_relative_import_files(module)}
    return sorted({*modules, *imported})


def _entry(config: Mapping[str, Any]) -> str:
    parts = parts_of(config)
    return next((entry for entry in ENTRIES if parts <= set(get_relative_imports(FOLDER / f"{entry}.py"))), ENTRIES[-1])
