"""Weights of compressed-tensors are dequantized as they are read: against that package, and what is refused."""

import json

import pytest
import torch
from command_line import run_main
from config_files import edit_config
from conversions import convert_checkpoint
from quantized_checkpoints import FORMATS, make_quantized
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from transformers import AutoModelForCausalLM

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.model_folder import model_folder
from surgery.common.errors import SurgeryError
from surgery.engines.table import diagnose
from surgery.engines.verdict import NOT_TRIED
from surgery.structures.registry import find_target

KINDS = [kind for kind in FORMATS if kind != "FP8"]
COMPRESSED = {"quant_method": "compressed-tensors"}
TOKENS = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_codes_times_scales(tmp_path, kind):
    exact = load_file(make_checkpoint(tmp_path / "exact", "llama", torch.bfloat16) / "model.safetensors")
    reader = CheckpointReader.open(make_quantized(tmp_path / "small", "llama", kind))
    assert set(reader.names()) == set(exact) and reader.dequantised_from == kind
    assert reader.stored_as is None
    stored, rounded = load_file(tmp_path / "small" / "model.safetensors"), 0
    for name, weight in exact.items():
        result, scale = reader.tensor(name), stored.get(name + "_scale")
        assert result.dtype == torch.bfloat16 and result.shape == weight.shape
        if scale is None:
            assert torch.equal(result, weight)
            continue
        # Half a step; e4m3 has steps of a sixteenth of a number. bfloat16 rounds what results from it.
        half = (weight.float().abs() / 16 if kind == "fp8" else 0) + 0.51 * scale.float().expand_as(weight)
        assert ((result.float() - weight.float()).abs() <= half + weight.float().abs() / 128).all()
        assert torch.equal(reader.rows(name, torch.tensor([5, 0])), result[[5, 0]])
        rounded += not torch.equal(result, weight)
    assert rounded


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_compressed_tensors(tmp_path, kind):
    pytest.importorskip("compressed_tensors")
    folder = make_quantized(tmp_path / "small", "llama", kind)
    edit_config(folder, dtype="float32")  # what ours are rounded to
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(model_folder(CheckpointReader.open(folder)), dtype=torch.float32)
    with torch.no_grad():
        logits, expected = ours(TOKENS).logits, theirs(TOKENS).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_conversion_dequantizes_everything(tmp_path, capsys):
    folder = make_quantized(tmp_path / "small", "llama", "int8")
    settings = find_target("lowrank").settings({"calibration": "none", "kv_ratio": 0.5})
    report = convert_checkpoint(folder, tmp_path / "out", settings).report.to_dict()
    assert report["source"]["dequantised_from"] == "int8"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    files, reader = load_file(tmp_path / "out" / "model.safetensors"), CheckpointReader.open(folder)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert torch.equal(files[name], reader.tensor(name))
    assert not [name for name in files if "scale" in name]


def test_no_engine_is_said_to_have_run_codes(tmp_path):
    folder = make_quantized(tmp_path / "small", "llama", "int8")
    assert {verdict.status for verdict in diagnose(folder).verdicts} == {NOT_TRIED}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("int8", {"weight_zero_point": torch.zeros(1)}, "weight_zero_point: this kind .* is not supported"),
        (
            "fp8",
            {"weight_scale": torch.ones(3, 1)},
            r"float8_e4m3fn .* does not fit its scales, float32 \[3, 1\]",
        ),
        ("int8", {"weight_scale": torch.ones(3)}, r"weight: int8 .* does not fit its scales, float32 \[3\]"),
        ("fp8", {"weight_scale": None}, "q_proj.weight: float8_e4m3fn .* has no scales"),
        ("fp8", {"weight": None}, "q_proj.weight: missing"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, kind, change, message):
    make_quantized(tmp_path / "small", "llama", kind)
    module, path = "model.layers.0.self_attn.q_proj.", tmp_path / "small" / "model.safetensors"
    tensors = load_file(path) | {module + part: value for part, value in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})
    with pytest.raises(SurgeryError, match=message):
        CheckpointReader.open(tmp_path / "small")


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq", "bits": 4, "version": "gemm"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({**COMPRESSED, "format": "pack-quantized"}, "pack-quantized"),
        ({**COMPRESSED, "config_groups": {"a": {"format": "nvfp4-pack-quantized"}}}, "nvfp4-pack-quantized"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({**COMPRESSED, "sparsity_config": ["dense"]}, "sparse weights"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("base_model", ["org/name", "\n- org/name", None])
def test_packed_weights_are_refused_at_once_with_a_way_out(tmp_path, entry, name, base_model):
    folder = make_quantized(tmp_path / "small", "llama", "int8")
    edit_config(folder, quantization_config=entry)
    (folder / "README.md").write_text(f"---\nbase_model: {base_model}\nlicense: mit\n---\n" * (base_model is not None))
    original = "" if base_model is None else " (org/name)"
    with pytest.raises(SurgeryError) as error:
        CheckpointReader.open(folder)
    assert error.value.path == folder and name in str(error.value)
    assert f"convert the original 16-bit checkpoint{original}, and quantize the result" in str(error.value)


def test_every_command_refuses_them(tmp_path, monkeypatch, capsys):
    folder = make_quantized(tmp_path / "small", "llama", "int8")
    edit_config(folder, quantization_config={"quant_method": "awq"}, _name_or_path="org/name")
    for command in (["inspect"], ["doctor"], ["verify"], ["convert", "--to", "gqa"], ["heads"], ["heal"], ["eval"]):
        code, _, err = run_main(monkeypatch, capsys, *command, folder)
        assert code == 1 and "the original 16-bit checkpoint (org/name)" in err.splitlines()[-1], command


def test_other_formats_are_refused_by_name(tmp_path):
    folder = make_quantized(tmp_path / "small", "llama", "int8")
    edit_config(folder, quantization_config={"quant_method": "hqq"})
    with pytest.raises(SurgeryError, match=r"the weights are quantized \(hqq\)"):
        convert_checkpoint(folder, tmp_path / "out", find_target("gqa").settings({"calibration": "none"}))
    assert not (tmp_path / "out").exists()
