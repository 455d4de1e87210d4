"""The code that travels next to the weights: what a configuration needs, no more, and the same after every save."""

import json
from pathlib import Path

import pytest
import torch
from own_models import FAMILIES, tiny_source, tokens
from processes import Fork
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_imports
from written_models import CUSTOM, IMAGES, WRITTEN, from_kind, inputs

import surgery.model
from surgery.model import SurgeryForCausalLM, SurgeryForConditionalGeneration, remote_code_files
from surgery.model.parts import DECODERS, KINDS, QUANTIZED, STREAMING_KINDS, part
from surgery.model.remote_code import ENTRIES

FOLDER = Path(surgery.model.__file__).parent
MOST_LINES = 2000
"""Most lines in the code of an MLA checkpoint, which its readers have to trust."""
NOT_CARRIED = {"__init__", "auto_config", "auto_classes", "remote_code"}
MODELS_OF = {
    "latent": ("latent", "latent_key_norm"),
    "grouped": ("grouped",),
    "low_rank": ("low_rank", "streaming_blocks", "window"),
    "hybrid": ("hybrid",),
    "quantized": ("quantized_plain", "quantized_latent"),
    "mixed": ("mixed", "streaming_latent", "quantized_hybrid"),
    "quantized_latent": ("rows_latent", "rows_latent_key_norm", "rows_latent_predicted"),
    "quantized_low_rank": ("rows_shared", "rows_heads"),
    "pictures": (IMAGES,),
}
ENTRY_OF = {name: f"modeling_surgery_{entry}" for entry, names in MODELS_OF.items() for name in names}
QUICK = tuple(names[0] for names in MODELS_OF.values())
"""One model of each entry module."""


def saved(model: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Save a model and return the `auto_map` of its config.json."""
    model.save_pretrained(folder)
    return json.loads((folder / "config.json").read_text())["auto_map"]


def code(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.py")}


def entry_of(auto_map: dict[str, str]) -> str:
    return next(name.partition(".")[0] for key, name in auto_map.items() if key != "AutoConfig")


@pytest.mark.parametrize("name", ENTRY_OF)
def test_a_checkpoint_carries_what_its_entry_module_imports(name, tmp_path):
    model = WRITTEN[name]()
    auto_map = saved(model, tmp_path)
    assert code(tmp_path) == {path.name: path.read_text() for path in remote_code_files(auto_map)}
    assert entry_of(auto_map) == ENTRY_OF[name]
    assert isinstance(model, SurgeryForConditionalGeneration if name == IMAGES else SurgeryForCausalLM)


def test_every_entry_module_has_a_model():
    """But the one with all parts, which the vision-language model's imports."""
    assert {ENTRY_OF[name] for name in QUICK} == {*ENTRIES[:-1], "modeling_surgery_pictures"}


def test_lines_of_an_mla_checkpoint(tmp_path):
    saved(WRITTEN["latent"](), tmp_path)
    assert sum(len(text.splitlines()) for text in code(tmp_path).values()) <= MOST_LINES


def test_the_last_entry_module_has_all_parts():
    entries = [getattr(part(module), name) for module, name in (*KINDS.values(), *STREAMING_KINDS.values())]
    parts = {entry.attention[0] for entry in entries}
    parts |= {*DECODERS.values(), *QUANTIZED}
    assert parts <= set(get_relative_imports(FOLDER / f"{ENTRIES[-1]}.py"))
    carried = {path.stem for path in remote_code_files(surgery.model.PICTURES_AUTO_MAP)}
    assert carried == {path.stem for path in FOLDER.glob("*.py")} - NOT_CARRIED - set(ENTRIES[:-1])


def test_code_that_is_not_there_is_named_and_a_subclass_stays_itself():
    class Subclass(SurgeryForCausalLM):
        pass

    config = WRITTEN["latent"]().config
    assert type(Subclass(config)) is Subclass
    assert type(SurgeryForCausalLM(config)).__module__ == "surgery.model.modeling_surgery_latent"
    with pytest.raises(ValueError, match=r"sparse_attention\.py, which config\.json requires"):
        part("sparse_attention")


CHILD = """
import sys
sys.modules["surgery"] = None  # the package is installed here; its users may not have it
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    auto_class = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    inputs = load_file(folder + "/inputs.safetensors")
    with torch.no_grad():
        logits = model(**inputs).logits
    tokens = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    model.save_pretrained(folder + "/again")
    save_file({"logits": logits, "tokens": tokens}, folder + "/outputs.safetensors")
"""


def check_elsewhere(models: dict[str, PreTrainedModel], prompts: dict[str, dict], folder: Path) -> None:
    """Run models in a process without this package: the same logits, and the same code after another save."""
    auto_maps = {}
    for name, model in models.items():
        auto_maps[name] = saved(model, folder / name)
        save_file(prompts[name], folder / name / "inputs.safetensors")
    child = Fork(*(folder / name for name in models), code=CHILD, path=(), cwd=folder)
    assert child.wait() == 0, child.stderr[-3000:]
    for name, model in models.items():
        outputs = load_file(folder / name / "outputs.safetensors")
        assert torch.equal(outputs["logits"], model(**prompts[name]).logits), name
        assert torch.equal(outputs["tokens"], model.generate(**prompts[name], max_new_tokens=2, do_sample=False)), name
        assert code(folder / name / "again") == code(folder / name), name
        assert json.loads((folder / name / "again/config.json").read_text())["auto_map"] == auto_maps[name]


@torch.no_grad()
@pytest.mark.parametrize("names", [QUICK, pytest.param(CUSTOM, marks=pytest.mark.slow)], ids=["entries", "all"])
def test_loads_without_the_package(names, tmp_path):
    check_elsewhere({name: WRITTEN[name]() for name in names}, {name: inputs(name) for name in names}, tmp_path)


@torch.no_grad()
@pytest.mark.slow
def test_every_family_loads_without_the_package(tmp_path):
    models = {family: from_kind("latent", family) for family in FAMILIES}
    check_elsewhere(models, {family: {"input_ids": tokens()} for family in models}, tmp_path)


def test_a_family_with_a_decoder_of_its_own_has_its_code(tmp_path):
    source = tiny_source("llama")
    config = surgery.model.SurgeryConfig.from_base(source.config, [None] * source.config.num_hidden_layers)
    plain = surgery.model.auto_map(config.to_dict())
    renamed = surgery.model.auto_map({**config.to_dict(), "base_model_type": "gpt_neox"})
    assert "family_decoders.py" not in {path.name for path in remote_code_files(plain)}
    assert "family_decoders.py" in {path.name for path in remote_code_files(renamed)}
