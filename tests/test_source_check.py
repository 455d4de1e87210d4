"""A source is what its config.json says: in every command it is carried as it computes, or refused before any work."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from command_line import run_main
from config_files import config_of, edit_config
from conversions import convert_checkpoint
from hostile import cases, taken_or_refused
from hypothesis import given
from hypothesis import strategies as st
from picture_models import make_model
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT, make_checkpoint, tokens
from transformers import AutoModelForCausalLM

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.model_folder import model_folder
from surgery.common.errors import SurgeryError
from surgery.evaluation.models import Checkpoint
from surgery.running.source_check import open_source
from surgery.structures.registry import TARGETS

WEIGHTS = {"calibration": "none", "device": "cpu"}
CONVERSIONS = {
    "mla": {"kv_ratio": 0.5, "rope_dim": 4},
    "gqa": {"kv_ratio": 0.5},
    "mqa": {},
    "hybrid": {"streaming": 1, "sinks": 2, "recent": 8, "context": 100},
}
COMMANDS = {
    "convert": ("convert", "--to", "lowrank", "--kv-ratio", 0.5),
    "plan": ("plan", "--kv-ratio", 0.5),
    "inspect": ("inspect",),
    "verify": ("verify",),
    "doctor": ("doctor",),
    "export": ("export", "--engine", "llama.cpp"),
    "slice": ("slice", "--kv-ratio", 0.5),
    "heads": ("heads",),
    "eval": ("eval", "--data", HELD_OUT),
    "heal": ("heal", "--data", HELD_OUT),
    "bench": ("bench", "decode"),
}
SIZES = ("vocab_size", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def convert(folder, out, target, **changes):
    """Convert by the weights alone, where the target can."""
    settings = TARGETS[target].settings({**WEIGHTS, **CONVERSIONS[target], **changes})
    return convert_checkpoint(folder, out, settings).path


def edit_weights(folder, change):
    """Write the tensors again as ``change`` gives them."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def weights(change):
    return lambda folder: edit_weights(folder, change)


def config(*dropped, **changes):
    return lambda folder: edit_config(folder, *dropped, **changes)


def renamed(rename):
    return weights(lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})


def resized(tensors):
    """A vocabulary of four more tokens (huggingface/transformers#16479)."""
    return tensors | {EMBEDDING: torch.cat([tensors[EMBEDDING], torch.zeros(4, tensors[EMBEDDING].shape[1])])}


def in_int8(tensors):
    return {name: tensor.to(torch.int8) if "_proj" in name else tensor for name, tensor in tensors.items()}


def in_fp8(tensors):
    return {name: tensor.to(torch.float8_e4m3fn) if "_proj" in name else tensor for name, tensor in tensors.items()}


def with_adapter(folder):
    """Write the files that PEFT leaves in the folder of a whole model (huggingface/peft#1381,
    huggingface/transformers#43781)."""
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, folder / "adapter_model.safetensors")


def only_adapter(folder):
    with_adapter(folder)
    (folder / "model.safetensors").unlink()


def shard_of_a_rank(folder):
    shutil.copy(folder / "model.safetensors", folder / "shard-00001-model-00001-of-00001.safetensors")


def other_weights(folder):
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    edit_config(folder, transformers_weights="other.safetensors")


def other_config(folder):
    shutil.copy(folder / "config.json", folder / "config.4.0.0.json")
    edit_config(folder, configuration_files=["config.4.0.0.json"])


REFUSED = {
    "vocabulary resized": (weights(resized), r"embed_tokens.weight has shape \[4100, 32\].*requires \[4096, 32\]"),
    "prefix module": (
        renamed("module.{}".format),
        r"model.*is missing.*module\.model\..* is stored instead.*rename the tensors",
    ),
    "no prefix": (renamed(lambda name: name.removeprefix("model.")), "lack the prefix 'model.'"),
    "adapter": (with_adapter, "adapter_config.json.*merge"),
    "adapter alone": (only_adapter, "adapter_config.json.*merge"),
    "rank's shard": (shard_of_a_rank, "shard-00001.*consolidate"),
    "other weights": (other_weights, "transformers_weights.*remove it"),
    "other config": (other_config, "configuration_files.*remove it"),
    "layers of their own": (config(per_layer_config={"1": {"num_attention_heads": 2}}), "per_layer_config"),
    "fewer layers said": (config(num_hidden_layers=1), r"unexpected tensor model\.layers\.1\."),
    "more layers said": (config(num_hidden_layers=3), r"model\.layers\.2\.\S* is missing \(and 8 more\)"),
    "many layers said": (config(num_hidden_layers=10_000), "num_hidden_layers is 10,000"),
    "untied without a head": (config(tie_word_embeddings=False), "lm_head.weight is missing"),
    "wider heads said": (config(num_key_value_heads=4), r"k_proj.weight has shape \[16, 32\].*\[32, 32\]"),
    "unknown tensor": (weights(lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "q_proj.bias"),
    "integers": (weights(in_int8), "int8.*quantization"),
    "float8": (weights(in_fp8), "float8_e4m3fn.*quantization"),
    "another class": (config(architectures=["MistralForCausalLM"]), "MistralForCausalLM.*LlamaForCausalLM"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny Llama with tied embeddings."""
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama")


@pytest.fixture
def changed(source, tmp_path):
    """Makes a copy of it with one change."""

    def change(edit):
        folder = shutil.copytree(source, tmp_path / "model")
        edit(folder)
        return folder

    return change


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_one_line_with_a_remedy(case, changed):
    edit, words = REFUSED[case]
    folder = changed(edit)
    with pytest.raises(SurgeryError, match=words) as refusal:
        open_source(folder)
    assert str(folder) in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "case",
    [
        *("vocabulary resized", "adapter"),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("prefix module", "other weights", "fewer layers said")
        ),
    ],
)
def test_every_command_refuses_them_before_any_work(command, case, changed, tmp_path, monkeypatch, capsys):
    edit, words = REFUSED[case]
    folder = changed(edit)
    verb, *options = COMMANDS[command]
    arguments = [verb, options.pop(0), folder] if verb == "bench" else [verb, folder]
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    code, _, error = run_main(monkeypatch, capsys, *arguments, *options)
    assert code == 1 and error.count("\n") == 1
    with pytest.raises(SurgeryError, match=words):
        open_source(folder)
    assert sorted(tmp_path.rglob("*")) == before


def loaded(path):
    """A model as `surgery eval` loads it."""
    return Checkpoint.open(str(path)).load(torch.device("cpu"))


@torch.no_grad()
def logits_of(model):
    return model(tokens()).logits


def other_head(tensors):
    """A head of its own where the config ties it (huggingface/transformers#42612, hiyouga/LLaMA-Factory#10560)."""
    return tensors | {HEAD: tensors[EMBEDDING].flip(0)}


def same_head(tensors):
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def half_head(tensors):
    """Return the same head in another dtype."""
    half = {name: tensor.half() for name, tensor in tensors.items()}
    return half | {HEAD: half[EMBEDDING].float()}


@pytest.mark.parametrize(("edit", "tied"), [(other_head, False), (same_head, True), (half_head, True)])
def test_a_stored_head_is_tied_by_its_values(edit, tied, changed, tmp_path):
    folder = changed(weights(edit))
    want = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").float())
    assert torch.equal(logits_of(loaded(folder).float()), want)
    out = convert(folder, tmp_path / "out", "hybrid", recent=200, context=250)
    assert config_of(out)["tie_word_embeddings"] is tied
    tensors = load_file(out / "model.safetensors")
    assert (HEAD in tensors) is not tied
    if not tied:
        assert torch.equal(tensors[HEAD], load_file(folder / "model.safetensors")[HEAD])
    difference = logits_of(loaded(out).float()) - want
    assert difference.abs().max() < 0.05 * want.abs().max()


def test_a_head_of_its_own_is_kept_next_to_pictures(tmp_path):
    folder = make_model(tmp_path / "model", "gemma3")
    edit_weights(folder, lambda tensors: tensors | {HEAD: tensors["language_model.model.embed_tokens.weight"].flip(0)})
    config = open_source(folder).config
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False


KERNEL = "kernels-community/flash-attn"
CHOICES = {
    "kernel": {"attn_implementation": KERNEL},
    "private kernel": {"_attn_implementation": KERNEL},
    "internal kernel": {"_attn_implementation_internal": KERNEL},
    "flash attention": {"attn_implementation": "flash_attention_2"},
    "experts": {"experts_implementation": KERNEL, "_experts_implementation": "grouped_mm"},
    "fusions": {"fusion_config": {"patch_embeddings": True}},
}


@pytest.fixture
def no_kernels(monkeypatch):
    """Any kernel that transformers is about to load fails."""
    from transformers import modeling_utils

    def refuse(*arguments, **options):
        raise AssertionError(f"asked for {arguments}")

    monkeypatch.setattr(modeling_utils, "lazy_import_flash_attention", refuse)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_config_does_not_choose_the_code_that_runs_it(choice, changed, source, tmp_path, no_kernels):
    """Hub kernels, and FlashAttention where there is none (QwenLM/Qwen3-VL#1682, huggingface/transformers#31741)."""
    folder = changed(config(**CHOICES[choice]))
    assert torch.equal(logits_of(loaded(folder)), logits_of(loaded(source)))
    reader = open_source(folder)
    assert not CHOICES[choice].keys() & reader.config.keys()
    assert reader.fingerprint() != open_source(source).fingerprint()  # that of the files as they are
    if choice == "kernel":
        out = convert(folder, tmp_path / "out", "gqa")
        assert not CHOICES[choice].keys() & config_of(out).keys()


def test_nor_does_a_config_inside_it(tmp_path, no_kernels):
    folder = make_model(tmp_path / "model", "gemma3")
    inside = config_of(folder)["text_config"] | {"attn_implementation": KERNEL}
    edit_config(folder, text_config=inside)
    assert "attn_implementation" not in open_source(folder).config["text_config"]
    assert logits_of(loaded(folder)).isfinite().all()


@pytest.mark.parametrize("method", ["bitsandbytes", "compressed-tensors", "mxfp4"])
def test_a_quantization_that_no_tensor_has_is_dropped(method, changed, source, tmp_path):
    """bfloat16 weights with what training in 4 bits left in config.json (allenai/open-instruct#149)."""
    folder = changed(config(quantization_config={"quant_method": method, "load_in_4bit": True, "bits": 4}))
    assert torch.equal(logits_of(loaded(folder)), logits_of(loaded(source)))
    if method == "bitsandbytes":
        out = convert(folder, tmp_path / "out", "hybrid")
        assert "quantization_config" not in config_of(out)


def test_mistral_with_layer_types_is_read_as_transformers_reads_it(tmp_path):
    """transformers takes the class of Ministral, whose layers differ in their windows."""
    folder = make_checkpoint(tmp_path / "model", "ministral_window")
    edit_config(folder, model_type="mistral", architectures=["MistralForCausalLM"])
    reader = open_source(folder)
    assert (reader.config["model_type"], reader.config["architectures"]) == ("ministral", ["MinistralForCausalLM"])


FREQUENCIES = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(4) for layer in range(2)}


@pytest.mark.parametrize("target", ["mla", "gqa", "hybrid"])  # new tensors, other ones, the same ones
def test_buffers_of_old_checkpoints_are_in_no_result(target, changed, tmp_path):
    folder = changed(weights(lambda tensors: tensors | FREQUENCIES))
    out = convert(folder, tmp_path / "out", target)
    assert not [name for name in CheckpointReader.open(out).names() if "rotary_emb" in name]


@pytest.mark.parametrize("way_out", [{"rope_scaling": None}, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}])
def test_dynamic_rope_is_refused_with_a_way_out_that_works(way_out, changed, tmp_path):
    """huggingface/transformers#25104"""
    folder = changed(config("rope_parameters", rope_theta=1e4, rope_scaling={"type": "dynamic", "factor": 2.0}))
    with pytest.raises(SurgeryError, match=r"'dynamic'.*remove rope_scaling.*'default'"):
        convert(folder, tmp_path / "out", "mqa")
    edit_config(folder, **way_out)
    convert(folder, tmp_path / "out", "mqa")


@given(st.data())
@cases(12)
def test_what_is_opened_lacks_nothing_when_transformers_loads_it(source, data):
    """Any one change: refused in one line, or all that the class wants is there, in its shape."""
    with TemporaryDirectory() as parent:
        folder = shutil.copytree(source, Path(parent, "model"))
        if data.draw(st.booleans()):
            edit_config(folder, **{data.draw(st.sampled_from(SIZES)): data.draw(st.integers(1, 64))})
        else:
            edit_weights(folder, lambda tensors: altered(tensors, data))
        reader = taken_or_refused(lambda: open_source(folder))
        if reader is not None:
            _, info = AutoModelForCausalLM.from_pretrained(model_folder(reader), output_loading_info=True)
            assert not info["missing_keys"] and not info["mismatched_keys"]


def altered(tensors, data):
    """One tensor dropped, renamed, cut, added or in integers."""
    name = data.draw(st.sampled_from(sorted(tensors)))
    rest = {each: tensor for each, tensor in tensors.items() if each != name}
    ways = {
        "drop": {},
        "rename": {f"x.{name}": tensors[name]},
        "cut": {name: tensors[name][:-1]},
        "integers": {name: tensors[name].int()},
        "more": {name: tensors[name], name.replace(".weight", ".scale"): torch.ones(1)},
    }
    return rest | ways[data.draw(st.sampled_from(sorted(ways)))]
