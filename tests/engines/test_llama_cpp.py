"""llama.cpp, prebuilt, runs what `surgery export` writes: the tokens of transformers, and a cache of latents."""

import math

import pytest
import torch
from conversions import convert_checkpoint
from engine_cases import NEW_TOKENS, PROMPTS, Case, assert_same, demo, greedy, run
from gguf_files import SENTENCEPIECE, make_model, write_gguf
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.checkpoint import CheckpointReader
from surgery.engines.trials import LLAMA_CPP
from surgery.eval.variants.engine_cache import engine_cache
from surgery.export import export_checkpoint
from surgery.running.models import tokenizer_of
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings

pytestmark = pytest.mark.engines

HEADS = {"kv_heads": 1}
CASES = [
    Case("mla", "llama", {"engine": "llama.cpp", "kv_ratio": 0.5}),
    Case("mla", "mistral", {"engine": "llama.cpp", "kv_ratio": 0.5}),
    Case("mla", "llama_wide", {"engine": "vllm", "kv_lora_rank": 512, "rope_dim": 64}),
    Case("llama", "llama", HEADS),
    Case("llama", "llama3", HEADS),
    Case("llama", "llama_bias", HEADS),
    Case("llama", "llama_linear", HEADS),
    Case("llama", "llama_yarn", HEADS),
    Case("mistral", "mistral", HEADS),
]
TEXTS = ["def main():\n    return 1\n\n\nclass  A:\n", "It's 1234567 o'clock, naïve café ☕ \t tabs  and   spaces"]


def request(model, prompts=PROMPTS, cache="f32"):
    return {"model": str(model), "prompts": prompts, "new_tokens": NEW_TOKENS, "context": 512, "cache": cache}


def generate(model, folder, prompts=PROMPTS):
    return run("llama.cpp", "run_llama_cpp.py", request(model, prompts), folder)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_same_tokens_as_transformers(case, tmp_path):
    path = case.make(tmp_path)
    exported = export_checkpoint(path, "llama.cpp", weights="f32")
    assert_same(generate(exported.path, tmp_path), path, PROMPTS, tolerance=1e-4)


def test_every_kind_that_is_said_to_load_has_a_case():
    assert {case.kind for case in CASES} == LLAMA_CPP.kinds


@pytest.mark.parametrize("to", ["mla", "gqa"])
def test_perplexity_is_transformers(to, tmp_path):
    """Measure on held-out text, with llama.cpp's own defaults: flash attention and a cache in f16."""
    kinds = {
        "mla": ConvertSettings(engine="llama.cpp", calibration="none", kv_ratio=0.5),
        "gqa": KVHeadsSettings(kv_heads=2, calibration="none"),
    }
    path = convert_checkpoint(demo(tmp_path), tmp_path / "small", kinds[to]).path
    exported = export_checkpoint(path, "llama.cpp", weights="bf16")
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer(HELD_OUT.read_text(encoding="utf-8")[:4000])["input_ids"][:256]
    settings = {**request(exported.path, [], "f16"), "flash": True, "text": text, "vocabulary": len(tokenizer)}
    result = run("llama.cpp", "run_llama_cpp.py", settings, tmp_path)["losses"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([text]), labels=torch.tensor([text])).loss
    assert len(result) == len(text) - 1
    assert math.exp(sum(result) / len(result)) == pytest.approx(math.exp(float(expected)), rel=0.005)


def mean_loss(exported, text: list[int], cache: str, folder) -> float:
    settings = {**request(exported.path, [], cache), "flash": True, "text": text, "vocabulary": 4096}
    losses = run("llama.cpp", "run_llama_cpp.py", settings, folder)["losses"]
    return sum(losses) / len(losses)


def exported_mla(folder, rank: int, rope: int):
    settings = ConvertSettings(engine="llama.cpp", calibration="none", kv_lora_rank=rank, rope_dim=rope)
    path = convert_checkpoint(demo(folder), folder / "small", settings).path
    return export_checkpoint(path, "llama.cpp", weights="f32")


def test_a_cache_in_q8_0_costs_mla_hardly_anything(tmp_path):
    exported = exported_mla(tmp_path, 96, 32)
    text = AutoTokenizer.from_pretrained(tmp_path / "small")(HELD_OUT.read_text(encoding="utf-8")[:4000])["input_ids"]
    assert exported.command_q8_0 == f"{exported.command} -fa on -ctk q8_0 -ctv q8_0"
    exact, rounded = (mean_loss(exported, text[:128], cache, tmp_path) for cache in ("f16", "q8_0"))
    assert exact != rounded == pytest.approx(exact, abs=0.02)


def test_heads_of_32_start_with_a_cache_in_q8_0(tmp_path):
    exported = export_checkpoint(demo(tmp_path), "llama.cpp", weights="f32")
    assert exported.command_q8_0 and mean_loss(exported, [1, 2, 3], "q8_0", tmp_path) > 0


@pytest.mark.parametrize(("rank", "rope"), [(48, 16), (96, 16)])
def test_it_does_not_start_if_rows_are_not_whole_blocks(rank, rope, tmp_path):
    exported = exported_mla(tmp_path, rank, rope)
    assert exported.command_q8_0 is None
    with pytest.raises(AssertionError, match="Failed to init server"):
        mean_loss(exported, [1, 2], "q8_0", tmp_path)


@pytest.fixture(scope="module")
def channels_that_are_large(tmp_path_factory):
    """A checkpoint with heads of 64, of which two channels of the keys are large, as real ones are; and its GGUF."""
    folder = tmp_path_factory.mktemp("large")
    path = Case("llama", "llama_wide", HEADS).make(folder)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data[[5, 37]] *= 8
        layer.self_attn.q_proj.weight.data.view(8, 64, -1)[:, [5, 37]] /= 8
    model.save_pretrained(path)
    return path, export_checkpoint(path, "llama.cpp", weights="f32").path


@pytest.mark.parametrize("form", ["q8_0", "q5_0", "q4_0"])
def test_a_quantized_cache_loses_what_its_variant_loses(form, channels_that_are_large, tmp_path):
    path, exported = channels_that_are_large
    text = torch.randint(3, 4096, (96,), generator=torch.Generator().manual_seed(0))
    settings = {**request(exported, [], form), "flash": True, "text": text.tolist(), "vocabulary": 4096}
    result = run("llama.cpp", "run_llama_cpp.py", settings, tmp_path)["losses"]
    reference = torch.tensor([each is not None for each in result])
    result = torch.tensor([each for each in result if each is not None])

    @torch.no_grad()
    def losses(**of_variant):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        model = engine_cache(model, **of_variant) if of_variant else model
        logits = model(text[None], use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, text[1:], reduction="none")[reference]

    exact, own = losses(), losses(format=form)
    # llama.cpp quantizes queries to q8_0 too, whose error is as large as that of such keys.
    assert (result - own).norm() < (0.9 if form == "q8_0" else 0.35) * (result - exact).norm()
    assert float(result.mean()) == pytest.approx(float(own.mean()), abs=0.01)


@pytest.mark.parametrize("weights", ["bf16", "f16", "q8_0"])
def test_the_demo_model_converted(weights, tmp_path):
    """Its bf16 weights to the bit, and in q8_0 near them; text goes through llama.cpp's own tokenizer."""
    settings = ConvertSettings(engine="llama.cpp", calibration="none", kv_ratio=0.5)
    path = convert_checkpoint(demo(tmp_path), tmp_path / "mla", settings).path
    exported = export_checkpoint(path, "llama.cpp", weights=weights)
    result = generate(exported.path, tmp_path, TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert result["prompt_tokens"] == [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    if weights == "bf16":
        assert_same(result, path, TEXTS, tolerance=0.05)
    else:
        _, logprobs = greedy(path, TEXTS)
        assert all(abs(entry[0] - exact[0]) < 0.2 for entry, exact in zip(result["logprobs"], logprobs, strict=True))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tokenizer.ggml.add_space_prefix": False},
        {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True},
        {"general.name": "Phi-3 mini"},
    ],
    ids=str,
)
def test_text_is_split_by_a_sentencepiece_gguf_as_here(more, tmp_path):
    """The first predictions on texts with spaces at their start and after special tokens, bytes, and ties of scores."""
    texts = ["abc", " a", "a  bc cab", "<|x|>a<s> b", "<|x|>  a<s>  a", "\u00e9", "ab<|x|>"]
    filler = [
        "<|endoftext|>",
        *(f"<filler {number}>" for number in range(4095 - len(SENTENCEPIECE["tokenizer.ggml.tokens"]))),
    ]
    values = dict(SENTENCEPIECE)
    for key, value in {"tokens": filler, "scores": [-99.0] * len(filler), "token_type": [1] * len(filler)}.items():
        values[f"tokenizer.ggml.{key}"] = [*values[f"tokenizer.ggml.{key}"], *value]
    model = make_model("llama")
    path = write_gguf(tmp_path / "a.gguf", model, more=values | more)
    result = generate(path, tmp_path, texts)
    tokenizer = tokenizer_of(CheckpointReader.open(path))
    for row, text in enumerate(texts):
        ids = tokenizer(text).input_ids
        assert result["prompt_tokens"][row] == len(ids), text
        logprobs = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert result["logprobs"][row][0] == pytest.approx(logprobs.max().item(), abs=1e-4), text
