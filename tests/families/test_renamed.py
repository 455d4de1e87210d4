"""GPT-NeoX, GPT-2 and InternLM3, which call things otherwise: as published, and the custom model class around the first
two."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from command_line import run_main
from config_files import edit_config
from conversions import convert_checkpoint
from decoding import after_padding
from safetensors.torch import load_file, save_file
from tiny_models import CONFIGS
from transformers import AutoModelForCausalLM

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.model import SurgeryConfig, SurgeryForCausalLM
from surgery.running.models import causal_model
from surgery.running.source import Source
from surgery.running.unfused import open_model, unfused
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.mla.settings import ConvertSettings

NAMES = "gpt_neox", "gpt2"
PUBLISHED = {
    "gpt_neox": (("lm_head.", "embed_out."), "gpt_neox.layers.{}.attention.", ("bias", "masked_bias")),
    "gpt2": (("transformer.", ""), "h.{}.attn.", ("bias", "masked_bias")),
}
"""Names of published checkpoints that differ from transformers', and buffers of their attention."""
ENTRIES = {
    "stock": [None, None],
    "grouped": [{"kind": "grouped", "kv_heads": 2}, None],
}


def own_model(name, entries):
    """A random model of the custom model class around the family's decoder."""
    base = CONFIGS[name]()
    for dropout in [field for field in vars(base) if field.endswith("pdrop")]:
        setattr(base, dropout, 0.0)
    torch.manual_seed(0)
    config = SurgeryConfig.from_base(base, entries, num_key_value_heads=base.num_attention_heads)
    return SurgeryForCausalLM(config).eval()


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_published_names_are_read(checkpoints, tmp_path, name):
    folder = shutil.copytree(checkpoints(name), tmp_path / "model")
    (old, new), prefix, buffers = PUBLISHED[name]
    tensors = {key.replace(old, new): value for key, value in load_file(folder / "model.safetensors").items()}
    buffer_tensors = {prefix.format(layer) + buffer: torch.ones(1, 1, 8, 8) for layer in range(2) for buffer in buffers}
    save_file(tensors | buffer_tensors, folder / "model.safetensors", {"format": "pt"})
    reader = open_model(folder)
    assert set(reader.left_out) == buffer_tensors.keys() and all(
        key.startswith(("model.", "lm_head.")) for key in reader.names()
    )
    tokens = torch.arange(3, 40)[None]
    want = AutoModelForCausalLM.from_pretrained(checkpoints(name)).eval()(tokens).logits
    torch.testing.assert_close(causal_model(reader).eval()(tokens).logits, want)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_stored_tensor_are_read_in_any_ranges(checkpoints, name):
    reader = unfused(CheckpointReader.open(checkpoints(name)))
    for key in (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"):
        whole, index = reader.tensor(key), torch.tensor([30, 1, 2, 9, 8])
        assert torch.equal(reader.rows(key, index), whole[index])
        assert torch.equal(torch.cat([piece.clone() for piece in reader.chunks(key)]), whole.flatten())


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "must be False for gpt2"),
        ("gpt2", {"scale_attn_weights": False}, "must be True for gpt2"),
        ("gpt2", {"add_cross_attention": True}, "crossattention.* is missing"),
        ("gpt2", {"n_head": None}, "n_head"),
        ("gpt_neox", {"num_attention_heads": 0}, "num_attention_heads"),
    ],
)
def test_what_is_not_supported_is_refused(checkpoints, tmp_path, name, change, reason):
    folder = shutil.copytree(checkpoints(name), tmp_path / "model")
    edit_config(folder, **change)
    with pytest.raises(SurgeryError, match=reason):
        open_model(folder)


@pytest.mark.parametrize("name", NAMES)
def test_healing_one_that_was_not_converted_is_refused_before_any_work(checkpoints, monkeypatch, capsys, name):
    code, _, err = run_main(monkeypatch, capsys, "heal", checkpoints(name), "--teacher", checkpoints(name))
    assert code == 1 and f"healing does not support unconverted {name} models; convert it first" in err


@pytest.mark.parametrize("kind", ENTRIES)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_custom_class_is_a_model_like_others(name, kind):
    model, tokens = own_model(name, ENTRIES[kind]), torch.arange(3, 43)[None]
    want = model(tokens).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(tokens).logits, want)
    # Positions, learned ones too, are those that are given.
    torch.testing.assert_close(after_padding(model, tokens, 8), want, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("eager")
    records = model(tokens, output_attentions=True, output_hidden_states=True)
    assert [tuple(each.shape) for each in records.attentions] == [(1, 4, 40, 40)] * 2
    assert len(records.hidden_states) == 3
    torch.testing.assert_close(records.logits, want)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model, tokens = own_model(name, ENTRIES["grouped"]), torch.arange(3, 43)[None]
    gradients = []
    for checkpointed in (False, True):
        model.zero_grad()
        if checkpointed:
            model.train().gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        gradients.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_embeddings_can_be_replaced():
    model = own_model("gpt_neox", ENTRIES["stock"])
    assert model.get_input_embeddings() is model.model.embed_tokens
    model.resize_token_embeddings(4100)
    assert (
        model.model.embed_tokens.weight.shape == (4100, 32) and model(torch.tensor([[4099]])).logits.shape[-1] == 4100
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 6.0}}, "beyond max_position_embeddings.* remove rope_scaling"),
        ({"qkv_bias": True, "bias": False}, "qkv_bias"),
    ],
)
def test_internlm3_is_a_llama_or_refused(checkpoints, tmp_path, change, reason):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    biases = {"qkv_bias": config.pop("attention_bias"), "bias": config.pop("mlp_bias")}
    names = config | biases | {"model_type": "internlm3", "rope_theta": theta}
    (folder / "config.json").write_text(json.dumps(names))
    tokens = torch.arange(3, 40)[None]
    results = [Source.open(path, ConvertSettings()).stream.embed(tokens) for path in (folder, checkpoints("llama"))]
    assert torch.equal(*results)
    assert open_model(folder).stored_as == "internlm3"
    (folder / "config.json").write_text(json.dumps(names | change))
    with pytest.raises(SurgeryError, match=reason):
        _ = Source.open(folder, ConvertSettings()).first
    if "rope_scaling" in change:
        settings = HybridSettings(calibration="none", streaming=1.0, sinks=2, recent=6)
        assert convert_checkpoint(folder, tmp_path / "out", settings).path == tmp_path / "out"
