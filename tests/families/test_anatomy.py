"""The anatomy that a family yields computes what transformers' own attention computes."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from config_files import edit_config
from tiny_models import ALL
from transformers import AutoModelForCausalLM

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.model_folder import model_folder
from surgery.common.errors import SurgeryError
from surgery.families import BUILT_IN, WHY_NOT, family_of
from surgery.families.attention import CapturedAttention
from surgery.families.fused import FUSED
from surgery.families.multimodal import MULTIMODAL
from surgery.families.rope import phases
from surgery.inspection.inspect import inspect_checkpoint
from surgery.running.layer_stream import single_layer_config
from surgery.running.source import Source
from surgery.running.unfused import unfused
from surgery.structures.mla.settings import ConvertSettings


def _keep_inputs(received, index, module, arguments, keywords):
    received[index] = arguments[0] if arguments else keywords["hidden_states"]


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_streamed_layers_and_anatomies_are_those_of_the_model(checkpoints, name):
    """Logits, the loss, and the norm before the attention, which is that of the model's own attention inputs."""
    folder = checkpoints(name)
    tokens = torch.randint(4096, (2, 40), generator=torch.Generator().manual_seed(0))
    model, received = AutoModelForCausalLM.from_pretrained(folder).eval(), {}
    for path, module in model.named_modules():
        if path.endswith(("self_attn", ".attn", ".attention")) and (index := re.search(r"\.(\d+)\.", path)):
            keep = partial(_keep_inputs, received, int(index[1]))
            module.register_forward_pre_hook(keep, with_kwargs=True)
    want = model(tokens, labels=tokens)
    opened = Source.open(folder, ConvertSettings())
    stream = opened.stream
    own = stream.embed(tokens)
    anatomy = own.clone()
    for index in range(opened.layers):
        with stream.layer(index) as layer:
            norm, inputs = stream.input_norm(index), layer.attention_inputs(own)
            torch.testing.assert_close(own if norm is None else stream.normalize(own, *norm), inputs)
            if index not in opened.stateful:
                torch.testing.assert_close(received[index], inputs, atol=1e-4, rtol=1e-4)
            stream.run_layer(layer, own, 2)
            captured = None if index in opened.stateful else CapturedAttention(opened.anatomy(index))
            stream.run_layer(layer, anatomy, 2, captured)
    torch.testing.assert_close(stream.logits(own), want.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stream.logits(anatomy), want.logits, atol=1e-4, rtol=1e-4)
    assert stream.loss(own, tokens) == pytest.approx(want.loss.item(), abs=1e-5)


def test_a_layer_alone_names_no_tokens_that_its_vocabulary_lacks(checkpoints):
    opened = Source.open(checkpoints("llama"), ConvertSettings())
    assert opened.config.bos_token_id == 1
    single = single_layer_config(opened.config, 0)
    assert single.bos_token_id is single.eos_token_id is single.pad_token_id is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"model_type": "qwen2_mo"}, "did you mean qwen2_moe"),
        ({"model_type": "surgery"}, "converted already; convert its source"),
        ({"model_type": "gemma4"}, "'gemma4' is not supported: its layers share caches.* 8-bit KV cache"),
        ({"model_type": "mamba"}, "'mamba' is not supported: (?!.*8-bit)"),
        ({"model_type": "kimi_k2"}, "'kimi_k2' is not supported: (?!.*8-bit).*deepseek_v3"),
        ({}, "model_type None is not supported"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantized .gptq."),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "mxfp4.*save_original_format=False",
        ),
    ],
)
def test_refused_configs(config, message):
    with pytest.raises(SurgeryError, match=message):
        family_of(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partial_rotary_factor": 0.5, "sliding_window": 16}, "a sliding window and partial rotation"),
        ({"num_key_value_heads": 4}, r"qkv_proj.weight has shape \[64, 32\].*\[96, 32\]"),
    ],
)
def test_a_phi_that_is_no_llama_is_refused(checkpoints, tmp_path, change, message):
    folder = shutil.copytree(checkpoints("phi3"), tmp_path / "phi")
    edit_config(folder, "rope_parameters", **change)
    with pytest.raises(SurgeryError, match=message):
        Source.open(folder, ConvertSettings())


def test_a_phi_is_read_as_what_it_is(checkpoints):
    inspection = [inspect_checkpoint(checkpoints(name)).architecture for name in ("phi3", "phi3_window", "llama")]
    assert [(facts["model_type"], facts["stored_as"]) for facts in inspection] == [
        ("llama", "phi3"),
        ("mistral", "phi3"),
        ("llama", None),
    ]
    reader = CheckpointReader.open(checkpoints("phi3"))
    view = unfused(reader)
    assert view.fingerprint() == reader.fingerprint() and model_folder(view) == reader.path
    parts = [view.tensor(f"model.layers.1.self_attn.{name}_proj.weight") for name in "qkv"]
    assert torch.equal(torch.cat(parts), reader.tensor("model.layers.1.self_attn.qkv_proj.weight"))


def test_the_table_of_families_has_all_of_them():
    text = (Path(__file__).parents[2] / "docs" / "families.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1] for row in text.splitlines() if row.startswith("| `")][1:]  # without its head
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted([*BUILT_IN, *FUSED, *MULTIMODAL])
    refused = text.partition("Refused by name")[2]
    assert set(re.findall(r"`(\w+)`", refused)) <= WHY_NOT.keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_phases_of_16_bits_are_complex64(dtype):
    assert phases(torch.ones(2), torch.arange(3), dtype).dtype == torch.complex64
