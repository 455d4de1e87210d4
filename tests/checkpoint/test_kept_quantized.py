"""--keep-quantised: attention is dequantized and converted, everything else stays as it is stored, and loads."""

import json

import pytest
import torch
from config_files import edit_config
from conversions import convert_checkpoint
from quantized_checkpoints import FORMATS, KNOWN, make_known, make_quantized
from safetensors.torch import load_file
from tiny_models import make_checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import surgery
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.engines.table import diagnose
from surgery.running.loading import load_config
from surgery.structures.dry_run import plan_conversion
from surgery.structures.registry import find_target
from surgery.structures.slices.settings import SliceSettings

TOKENS = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(0))
QUICK = {"calibration": "none", "keep_quantised": True}


def settings(to, **more):
    return find_target(to).settings({**QUICK, **more})


def logits(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        return model(TOKENS).logits


def stays_as_stored(source, out, part="scale"):
    """Check that everything but attention has the source's bytes, and attention none of these parts.

    Stock MLA scales the norms before attention by powers of two.
    """
    stored, files = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    for name in [name for name in files if name.endswith("input_layernorm.weight")]:
        ratios = (files[name].double() / stored.pop(name).double()).unique()
        assert len(ratios) == 1 and float(ratios.log2()).is_integer()
    outside = [name for name in stored if "self_attn" not in name and name in files]
    assert any("mlp" in name and part in name for name in outside)
    assert all(torch.equal(files[name], stored[name]) for name in outside)
    assert not [name for name in files if "self_attn" in name and part in name]


def loads(out, dtype):
    """transformers computes with it what the readers here say of it; engines are not said to have run its codes."""
    assert not [verdict for verdict in diagnose(out).verdicts if verdict.loads]
    edit_config(out, dtype=str(dtype).removeprefix("torch."))  # what ours are rounded to
    assert torch.equal(logits(out, dtype), logits(CheckpointReader.open(out).model_folder(), dtype))


FEW = {"calibration_tokens": 256, "calibration_length": 64, "held_out": 1}
CASES = [
    ("llama", "int4", "mla", {}),
    ("llama", "fp8", "lowrank", {"kv_ratio": 0.5}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("llama", "int8", "quantized", {"bits": 8, "calibration": "builtin", **FEW}),
            ("llama", "int8 plain", "gqa", {}),
            ("llama", "int8", "crosslayer", {"calibration": "builtin", **FEW}),
            ("llama", "fp8", "hybrid", {"streaming": 1.0, "sinks": 2, "recent": 6}),
            ("gemma2", "int4", "mla", {}),
            ("glm4", "fp8", "mla", {}),
        )
    ),
]


@pytest.mark.parametrize(("family", "kind", "to", "more"), CASES)
def test_compressed_tensors_next_to_converted_attention(tmp_path, family, kind, to, more):
    pytest.importorskip("compressed_tensors")
    source = make_quantized(tmp_path / "source", family, kind)
    convert_checkpoint(source, tmp_path / "out", settings(to, **more))
    stays_as_stored(source, tmp_path / "out")
    loads(tmp_path / "out", torch.float32)


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "deepseek_v3"))]
)
def test_fp8_next_to_converted_attention(tmp_path, family, monkeypatch):
    monkeypatch.setattr("quantized_checkpoints.BLOCK", 8)
    monkeypatch.setitem(FORMATS["FP8"][0], "weight_block_size", [8, 8])
    source, out = make_quantized(tmp_path / "source", family, "FP8"), tmp_path / "out"
    convert_checkpoint(source, out, settings("mla"))
    stays_as_stored(source, out)
    loads(out, torch.bfloat16)  # which transformers makes of them without a GPU
    # With one, it has modules of its own for what is stored in fp8.
    document = json.loads((out / "config.json").read_text())["quantization_config"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(CheckpointReader.open(out).path))
    fp8 = FineGrainedFP8Config(weight_block_size=[8, 8], modules_to_not_convert=document["modules_to_not_convert"])
    replace_with_fp8_linear(model, fp8.modules_to_not_convert, fp8, pre_quantized=True)
    theirs = {name for name, module in model.named_modules() if type(module).__name__.startswith("FP8")}
    tensors = {
        name.removesuffix(".weight_scale_inv") for name in load_file(out / "model.safetensors") if "_inv" in name
    }
    assert theirs == {name.partition(".experts.")[0] + ".experts" * (".experts." in name) for name in tensors}


@pytest.mark.parametrize("codes", [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}])
def test_bitsandbytes_next_to_converted_attention(tmp_path, codes):
    pytest.importorskip("bitsandbytes")
    # Rows of whole blocks, as its CPU wants.
    shape = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **shape, **heads)).bfloat16().save_pretrained(tmp_path / "exact")
    options = {"quantization_config": BitsAndBytesConfig(**codes), "dtype": torch.bfloat16, "device_map": "cpu"}
    source, out = tmp_path / "source", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(tmp_path / "exact", **options).save_pretrained(source)
    convert_checkpoint(source, out, settings("lowrank", kv_ratio=0.5))
    stays_as_stored(source, out, "SCB" if "load_in_8bit" in codes else "absmax")
    want = logits(CheckpointReader.open(out).model_folder(), torch.bfloat16)
    assert (logits(out, torch.bfloat16) - want).abs().max() < 0.02 * want.abs().max()  # it computes in steps of its own


def test_a_result_is_a_source_again(tmp_path):
    source, result = make_quantized(tmp_path / "source", "llama", "int4"), tmp_path / "made"
    convert_checkpoint(source, result, settings("lowrank", kv_ratio=0.5))
    assert "Matrices outside of attention are stored in int4" in (result / "README.md").read_text()
    assert not surgery.verify(result, device="cpu", progress=False).failed
    convert_checkpoint(result, tmp_path / "slice", SliceSettings(kv_ratio=0.25, **QUICK))
    files, stored = load_file(tmp_path / "slice" / "model.safetensors"), load_file(result / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_packed"
    assert torch.equal(files[name], stored[name])
    convert_checkpoint(result, tmp_path / "exact", SliceSettings(kv_ratio=0.25, calibration="none"))
    assert "quantization_config" not in json.loads((tmp_path / "exact" / "config.json").read_text())


def test_a_dry_run_counts_what_is_stored(tmp_path):
    source = make_quantized(tmp_path / "source", "llama", "int4")
    entries, exact = (
        plan_conversion(source, tmp_path / "out", settings("lowrank", kv_ratio=0.5, keep_quantised=keep)).disk
        for keep in (True, False)
    )
    stored = load_file(source / "model.safetensors")
    parts = {name: tensor for name, tensor in stored.items() if ".mlp." in name}
    numbers = sum(int(shape.prod()) for name, shape in parts.items() if name.endswith("weight_shape"))
    saved = 2 * numbers - sum(tensor.nbytes for tensor in parts.values())
    assert exact["output_bytes"] - entries["output_bytes"] == saved > 0


def refused(source, message):
    with pytest.raises(SurgeryError, match=message):
        convert_checkpoint(source, source.parent / "out", settings("gqa"))
    assert not (source.parent / "out").exists()


@pytest.mark.parametrize("kind", ["GPTQ int4", "AWQ int4"])
def test_formats_of_which_no_part_was_tried_are_refused(tmp_path, kind):
    make_known(tmp_path / "source", "llama", kind)
    method = KNOWN[kind][0]["quant_method"]
    refused(tmp_path / "source", f"partly quantized {method} checkpoints are untested .* drop --keep-quantised")


@pytest.mark.parametrize(
    ("family", "kind", "message"),
    [
        ("qwen3_moe", "int4", "all experts into one unquantized tensor"),
        ("qwen3_moe", "FP8", "is not a multiple of the block size"),
        ("phi3", "fp8", "its weights are renamed on loading"),
    ],
)
def test_what_would_not_load_is_refused(tmp_path, family, kind, message):
    refused(make_quantized(tmp_path / "source", family, kind), message)


def test_without_codes_there_is_nothing_to_keep(tmp_path):
    refused(make_checkpoint(tmp_path / "source", "llama"), "keep_quantised needs quantized weights")
