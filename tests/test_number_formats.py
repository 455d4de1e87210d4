"""Stock MLA results in the number formats that other programs put them into, and what is told where they fail."""

import json
from pathlib import Path

import pytest
import torch
from command_line import run_main
from conversions import convert_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import SHORT_TEXT, make_checkpoint, needs_constant_norm
from transformers import AutoModelForCausalLM

from surgery.architectures.deepseek_v3 import query_latent
from surgery.architectures.neutral_norm import (
    CONSTANT,
    HALF_SCALE,
    OLD_SCALE,
    TINY_EPS,
    WIDE_SCALE,
    constant_norm,
    recognized_norm,
    tiny_norm,
)
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.setting import names_of
from surgery.engines.number_formats import FP8_CACHE, ruinous_formats
from surgery.export.gguf_model import GGUFModel
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import TARGETS

OLD = Path(__file__).with_name("old_checkpoints") / "mla-stock"
SMALL = {**SHORT_TEXT, "kv_lora_rank": 12, "rope_dim": 4, "carrier": "stock"}
KINDS = {"tiny": "llama", "tiny with biases": "llama_bias", "constant": "llama_bias"}
NF4 = (-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626)
NF4 = torch.tensor((*NF4, 0.723, 1.0), dtype=torch.float64)


def rms_norm(x, weight, eps=TINY_EPS):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@pytest.fixture(scope="module")
def constant(tmp_path_factory):
    folder = tmp_path_factory.mktemp("constant")
    source = needs_constant_norm(folder / "source", torch.bfloat16)
    return convert_checkpoint(source, folder / "out", ConvertSettings(**SMALL)).path


@pytest.fixture
def results(conversions, constant):
    """A result of each kind in bfloat16."""
    tiny = {kind: conversions(KINDS[kind], ConvertSettings(**SMALL), torch.bfloat16).path for kind in list(KINDS)[:2]}
    return {**tiny, "constant": constant}


@torch.no_grad()
def logits(path, dtype, quantize=None, cache=None):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    for layer in model.model.layers:
        for module in layer.self_attn.children():
            if quantize is not None and isinstance(module, torch.nn.Linear):
                module.weight.copy_(quantize(module.weight.double()))
        if cache is not None:
            layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, latent: cache(latent))
    prompt = torch.arange(3, 51)[None] * 7 % 4000 + 3
    return model(prompt).logits.double()


def by_rows(weight, size, levels):
    """Integers with a float16 scale for so many columns, as llama.cpp stores them."""
    blocks = torch.nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
    scale = (blocks.abs().amax(-1, keepdim=True) / levels).half().double()
    values = torch.where(scale > 0, (blocks / scale).round(), 0.0).clamp(-levels, levels)
    return (values * scale).flatten(1)[:, : weight.shape[1]]


def nf4(weight):
    """bitsandbytes: sixteen quantiles of a normal distribution, 64 weights a scale."""
    flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-300)
    nearest = (flat[..., None] / scale[..., None] - NF4).abs().argmin(-1)
    return (NF4[nearest] * scale).flatten()[: weight.numel()].view(weight.shape)


def fp8(weight):
    """vLLM: one scale for a tensor."""
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn).double() * scale


def int8(weight):
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-300) / 127
    return (weight / scale).round() * scale


QUANTIZERS = {
    "Q8_0": (lambda weight: by_rows(weight, 32, 127), 0.05),
    "Q4_0": (lambda weight: by_rows(weight, 32, 8), 0.6),
    "int8": (int8, 0.05),
    "nf4": (nf4, 0.6),
    "fp8": (fp8, 0.25),
}
"""Rounding of a weight by a quantizer, and the relative difference of logits that its own rounding stays below."""


@pytest.mark.parametrize("kind", KINDS)
def test_float16_computes_what_float32_does(results, kind):
    """deepseek-ai/DeepSeek-V2#93, vllm-project/vllm#946: T4 and V100 have no bfloat16."""
    exact = logits(results[kind], torch.float32)
    half = logits(results[kind], torch.float16)
    assert half.isfinite().all()
    assert (half - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_weight_quantizers_leave_the_model(results, kind, quantizer):
    """ggml-org/llama.cpp#11446: quantized low-rank matrices."""
    exact = logits(results[kind], torch.float32)
    quantize, bound = QUANTIZERS[quantizer]
    other = logits(results[kind], torch.float32, quantize)
    assert (other - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("kind", KINDS)
def test_latents_fit_an_fp8_cache(results, kind):
    exact = logits(results[kind], torch.float32)

    def stored(latent):
        assert latent.abs().max() < 448
        return latent.to(torch.float8_e4m3fn).to(latent)

    assert (logits(results[kind], torch.float32, cache=stored) - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_llama_cpp_keeps_what_makes_latents(results, kind):
    """ggml-org/llama.cpp#11446, by the package that writes GGUF files."""
    gguf = pytest.importorskip("gguf")
    weight = load_file(results["tiny"] / "model.safetensors")[
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    ].float()
    form = gguf.GGMLQuantizationType[kind]
    back = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), form), form).copy())
    assert (back - weight)[:12].norm() / weight[:12].norm() < 0.15


@pytest.mark.parametrize("scale", [HALF_SCALE, WIDE_SCALE])
@pytest.mark.parametrize("rank", [1, 7, 64, 512])
def test_the_norm_of_a_tiny_latent_is_linear_within_its_bound(rank, scale):
    """The error that the module states, for latents of any direction and size."""
    norm = tiny_norm(scale)
    generator = torch.Generator().manual_seed(rank)
    for size in (0.01, 1.0, 8.0):
        latent = size * torch.randn(256, rank, generator=generator, dtype=torch.float64)
        out = rms_norm(latent * norm.scale, norm.weight) / norm.gain
        energy = norm.scale**2 * latent.square().mean(-1) / TINY_EPS
        error = (latent - out).norm(dim=-1) / latent.norm(dim=-1)
        assert (error <= energy / 2 + 1e-12).all()
    assert scale**2 / TINY_EPS / 2 <= (2.0**-13 if scale == HALF_SCALE else 2.0**-19) * 1.05


@pytest.mark.parametrize("rank", [1, 12, 511])
def test_norms_are_recognized(rank):
    """Recognize those of this version and of earlier ones, whose constant channel had the weight of the others."""
    for norm in map(tiny_norm, (HALF_SCALE, WIDE_SCALE, OLD_SCALE)):
        assert recognized_norm(norm.weights(rank), None) == norm
    norm = constant_norm(rank)
    bias = torch.zeros(rank + 1)
    bias[-1] = CONSTANT
    assert norm.weights(rank)[-1] == 0
    assert recognized_norm(norm.weights(rank), bias) == norm
    assert recognized_norm(torch.full((rank + 1,), norm.weight), bias) == norm
    assert recognized_norm(torch.rand(rank), None) is None


@pytest.mark.parametrize("input_scale", [1.0, 2.0**-7])
@pytest.mark.parametrize("size", [0.0, 0.01, 30.0])
def test_biases_of_queries_are_exact_and_no_larger_than_weights(size, input_scale):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(24, 32, generator=generator, dtype=torch.float64) / input_scale
    bias = size * torch.randn(24, generator=generator, dtype=torch.float64)
    inputs = torch.randn(64, 32, generator=generator, dtype=torch.float64) * input_scale
    tensors = {name: tensor.double() for name, tensor in query_latent(query, bias, input_scale).items()}
    latent = inputs @ tensors["q_a_proj.weight"].mT + tensors["q_a_proj.bias"]
    latent = rms_norm(latent, tensors["q_a_layernorm.weight"])
    files = tensors["q_b_proj.weight"]
    torch.testing.assert_close(latent @ files.mT, inputs @ query.mT + bias, rtol=1e-5, atol=1e-5)
    assert (files[:, -1].abs() <= files[:, :-1].abs().amax(1) * 1.001).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_ruins_a_result(results, kind):
    assert ruinous_formats(CheckpointReader.open(results[kind])) == []
    assert "ruined_by" not in json.loads((results[kind] / "surgery_report.json").read_text())["target"]


def test_what_ruins_a_result_of_an_earlier_version_is_told(monkeypatch, capsys):
    for verb in ("doctor", "inspect"):
        code, printed, _ = run_main(monkeypatch, capsys, verb, str(OLD), "--json")
        facts = json.loads(printed)
        formats = facts["ruined_by"] if verb == "doctor" else facts["architecture"]["ruined_by"]
        assert code == 0 and {"float16", "Q8_0", "Q4_0"} <= set(formats)
        code, printed, _ = run_main(monkeypatch, capsys, verb, str(OLD))
        assert code == 0 and "float16" in printed


def test_a_constant_channel_of_an_earlier_version_overflows_an_fp8_cache(results, tmp_path):
    source = results["constant"]
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("kv_a_layernorm.weight"):
            tensor[-1] = tensor[0]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert ruinous_formats(CheckpointReader.open(tmp_path)) == [FP8_CACHE]


def test_convert_and_card_name_what_ruins_a_result(checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("surgery.structures.converter.ruinous_formats", lambda reader: ["float16"])
    source = checkpoints("llama", torch.bfloat16)
    out = tmp_path / "out"
    flags = ["--kv-lora-rank", "12", "--rope-dim", "4", "--calibration", "none"]
    code, printed, _ = run_main(monkeypatch, capsys, "convert", str(source), "--to", "mla", *flags, "--out", str(out))
    assert code == 0 and "float16" in printed.split("Next:")[0]
    assert "Ruined by float16" in (out / "README.md").read_text()
    assert json.loads((out / "surgery_report.json").read_text())["target"]["ruined_by"] == ["float16"]


def test_a_float16_source_becomes_what_engines_serve(checkpoints, tmp_path):
    """Its latent needs no constant, and so no bias, which engines drop."""
    settings = {"engine": "llama.cpp", "kv_ratio": 0.5, "calibration": "none"}
    source = checkpoints("mistral", torch.float16)
    for name, dtype in (("plain", None), ("cast", "bfloat16")):
        result = convert_checkpoint(source, tmp_path / name, ConvertSettings(**settings, weights_dtype=dtype))
        config = json.loads((result.path / "config.json").read_text())
        assert config["attention_bias"] is False and result.report.target["latent_norm"] == "tiny"
        assert config["dtype"] == (dtype or "float16")
        exported = GGUFModel.of(CheckpointReader.open(result.path))
        assert not any(tensor.tiny for tensor in exported.tensors())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_weights_have_the_dtype_asked_for(checkpoints, tmp_path, dtype):
    settings = KVHeadsSettings(kv_heads=1, method="mean-pool", calibration="none", weights_dtype=dtype)
    result = convert_checkpoint(checkpoints("qwen2", torch.bfloat16), tmp_path / "out", settings)
    reader = CheckpointReader.open(result.path)
    assert {reader.info(name).dtype for name in reader.names()} == {getattr(torch, dtype)}
    assert reader.config["dtype"] == dtype and "torch_dtype" not in reader.config
    report = json.loads((result.path / "surgery_report.json").read_text())
    assert report["settings"]["weights_dtype"] == dtype


def test_values_are_rounded_as_torch_does(checkpoints):
    reader = CheckpointReader.open(checkpoints("llama"))
    cast = reader.in_dtype(torch.bfloat16)
    for name in reader.names():
        assert torch.equal(cast.tensor(name), reader.tensor(name).bfloat16())
    name, rows = "model.embed_tokens.weight", torch.tensor([5, 0, 4000, 5])
    assert torch.equal(cast.rows(name, rows), reader.tensor(name).bfloat16()[rows])
    assert cast.in_dtype(torch.bfloat16) is cast and cast.fingerprint() == reader.fingerprint()


def test_values_beyond_float16_are_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "large", "llama", torch.float32)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    cast = CheckpointReader.open(folder).in_dtype(torch.float16)
    with pytest.raises(SurgeryError, match="weights-dtype"):
        cast.tensor("model.norm.weight")


def test_every_target_takes_a_dtype():
    for target in TARGETS.working().values():
        assert "weights_dtype" in names_of(target.settings_class)
