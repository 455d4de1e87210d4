"""Weights of compressed-tensors are dequantized as they are read: against that package, and what is refused."""

import json

import pytest
import torch
from config_files import edit_config
from conversions import convert_checkpoint
from quantized_checkpoints import FORMATS, KNOWN, make_known, make_quantized, words
from safetensors.torch import load_file, save_file
from tiny_models import make_checkpoint
from transformers import AutoModelForCausalLM

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.quantized.packed_columns import unpacked
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
    assert set(reader.names()) == set(exact) and reader.dequantised_from == kind.removesuffix(" plain")
    assert reader.stored_as is None
    stored, rounded = load_file(tmp_path / "small" / "model.safetensors"), 0
    for name, weight in exact.items():
        result, scale = reader.tensor(name), stored.get(name + "_scale")
        assert result.dtype == torch.bfloat16 and result.shape == weight.shape
        if scale is None:
            assert torch.equal(result, weight)
            continue
        # Half a step; e4m3 has steps of a sixteenth of a number. bfloat16 rounds what results from it.
        step = scale.float().view(scale.shape[0], -1, 1) if scale.numel() > 1 else scale.float()
        half = (weight.float().abs() / 16 if "fp8" in kind else 0) + 0.51 * step.expand_as(
            weight.float().view(scale.shape[0], scale.shape[1] if scale.ndim == 2 else 1, -1)
        ).reshape_as(weight)
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
    ours = AutoModelForCausalLM.from_pretrained(CheckpointReader.open(folder).model_folder(), dtype=torch.float32)
    with torch.no_grad():
        logits, expected = ours(TOKENS).logits, theirs(TOKENS).logits
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", KNOWN)
def test_numbers_are_those_that_were_packed(tmp_path, kind):
    reference = make_known(tmp_path / "small", "llama", kind)
    reader = CheckpointReader.open(tmp_path / "small")
    assert reader.dequantised_from == kind.removesuffix(" nested") and reader.stored_as is None
    exact = load_file(make_checkpoint(tmp_path / "exact", "llama", torch.bfloat16) / "model.safetensors")
    assert set(reader.names()) == set(exact) and reference
    for name, weight in exact.items():
        result, expected = reader.tensor(name), reference.get(name, weight.float())
        assert result.dtype == torch.bfloat16 and torch.equal(result, expected.bfloat16()), name
        if name in reference:
            assert torch.equal(reader.rows(name, torch.tensor([5, 0])), result[[5, 0]])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_of_any_width_are_found_in_their_words(bits):
    codes = torch.randint(2**bits, (5, 64), generator=torch.Generator().manual_seed(bits))
    selection = torch.tensor([63, 0, 10, 21, 42])  # 10 and 21 lie in two words each at 3 bits
    assert torch.equal(unpacked(words(codes.tolist(), bits), selection, bits), codes[:, selection])


@pytest.mark.parametrize("nested", [False, True])
def test_numbers_are_those_of_bitsandbytes(tmp_path, nested):
    functional = pytest.importorskip("bitsandbytes.functional")
    make_known(tmp_path / "small", "llama", "nf4")
    edit_config(tmp_path / "small", dtype="float32")  # what ours are rounded to
    path, name = tmp_path / "small" / "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
    # In rows of whole blocks: on the CPU 0.50 gives back other numbers than it was given where they are not.
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(0))
    codes, state = functional.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4")
    parts = {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
    save_file(load_file(path) | {name: codes} | parts, path, {"format": "pt"})
    theirs, ours = functional.dequantize_4bit(codes, state), CheckpointReader.open(tmp_path / "small").tensor(name)
    assert (ours - theirs).abs().max() <= 2**-23 * theirs.abs().max()


def test_a_conversion_dequantizes_everything(tmp_path, capsys):
    folder = make_quantized(tmp_path / "small", "llama", "int4")
    settings = find_target("lowrank").settings({"calibration": "none", "kv_ratio": 0.5})
    report = convert_checkpoint(folder, tmp_path / "out", settings).report.to_dict()
    assert report["source"]["dequantised_from"] == "int4"
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    files, reader = load_file(tmp_path / "out" / "model.safetensors"), CheckpointReader.open(folder)
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert torch.equal(files[name], reader.tensor(name))
    assert not [name for name in files if "packed" in name or "scale" in name]


def test_no_engine_is_said_to_have_run_codes(tmp_path):
    folder = make_quantized(tmp_path / "small", "llama", "int4")
    assert {verdict.status for verdict in diagnose(folder).verdicts} == {NOT_TRIED}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("int4", {"weight_zero_point": torch.zeros(1)}, "weight_zero_point: this kind .* is not supported"),
        ("int4", {"weight_scale": torch.ones(3, 1)}, r"weight: int32 .* does not fit its scales, float32 \[3, 1\]"),
        ("int4", {"weight_shape": torch.tensor([7, 7])}, r"int32 .* does not hold \[7, 7\] values of 4 bits"),
        ("fp8", {"weight_scale": None}, "q_proj.weight: float8_e4m3fn .* has no scales"),
        ("int4", {"weight_scale": None}, "q_proj.weight_scale: missing"),
        ("GPTQ int4", {"qzeros": None}, "q_proj.qzeros: missing"),
        ("GPTQ int4", {"scales": torch.ones(2, 3)}, "q_proj.weight: int32 .* does not fit its scales, float32"),
        ("GPTQ int4", {"g_idx": torch.zeros(5, dtype=torch.int32)}, "q_proj.qweight: int32 .* bits per value"),
        ("AWQ int4", {"scales": torch.ones(3, 7)}, "q_proj.weight: int32 .* does not fit its scales, float32"),
        ("nf4", {"weight.absmax": torch.ones(3)}, "q_proj.weight: uint8 .* does not fit its scales, float32"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.tensor([91, 93]).byte()}, "no valid quantization state"),
        ("int8", {"SCB": torch.ones(3)}, r"q_proj.weight: int8 .* does not fit its scales, float32 \[3\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, kind, change, message):
    (make_known if kind in KNOWN else make_quantized)(tmp_path / "small", "llama", kind)
    module, path = "model.layers.0.self_attn.q_proj.", tmp_path / "small" / "model.safetensors"
    tensors = load_file(path) | {module + part: value for part, value in change.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})
    with pytest.raises(SurgeryError, match=message):
        CheckpointReader.open(tmp_path / "small")


def test_biases_that_autogptq_made_up_are_left_out(tmp_path):
    make_known(tmp_path / "small", "llama", "GPTQ int4")
    path = tmp_path / "small" / "model.safetensors"
    tensors = load_file(path)
    words = [name for name in tensors if name.endswith("qweight")]
    biases = {name.replace("qweight", "bias"): torch.zeros(tensors[name].shape[1]) for name in words}
    entries = "model.layers.0.self_attn.q_proj.bias"
    biases[entries] += 1
    save_file(tensors | biases, path, {"format": "pt"})
    assert set(CheckpointReader.open(tmp_path / "small").names()) & set(biases) == {entries}
    save_file(tensors | {entries: torch.zeros(32)}, path, {"format": "pt"})  # not of every matrix: the model's own
    assert entries in CheckpointReader.open(tmp_path / "small").names()


def test_groups_without_scales_are_refused_as_they_are_read(tmp_path):
    make_known(tmp_path / "small", "llama", "GPTQ int8")
    path, name = tmp_path / "small" / "model.safetensors", "model.layers.0.self_attn.q_proj."
    tensors = load_file(path)
    tensors[name + "g_idx"][3] = 99
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(SurgeryError, match=r"q_proj.g_idx: group index out of range"):
        CheckpointReader.open(tmp_path / "small").tensor(name + "weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, r"the weights are quantized \(hqq\)"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq with marlin is not supported"),
        ({"quant_method": "gptq", "bits": 4, "rotation": "hadamard"}, "gptq with rotated weights is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with gemv is not supported"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 3}}}}, "'3'.* is not supported; use 4 or 8"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparse weights is not supported"),
        ({**COMPRESSED, "sparsity_config": ["dense"]}, "with sparse weights is not supported"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "rotated weights"),
        ({**COMPRESSED, "format": "marlin-24"}, "marlin-24 is not supported"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, settings, message):
    folder = make_quantized(tmp_path / "small", "llama", "int4")
    edit_config(folder, quantization_config=settings)
    with pytest.raises(SurgeryError, match=message):
        convert_checkpoint(folder, tmp_path / "out", find_target("gqa").settings({"calibration": "none"}))
    assert not (tmp_path / "out").exists()
