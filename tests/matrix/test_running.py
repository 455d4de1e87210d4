"""Running is right or refused, for every class that is written: equal to the uncached forward pass, or one line."""

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import flash_attention
import pytest
import torch
from own_models import LATENT, low_rank_entry, tiny_source, tokens
from refusals import RUNNING
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedModel
from written_models import CUSTOM, IMAGES, INT4, QUICK, WRITTEN, from_entries

pytestmark = pytest.mark.usefixtures("no_gradients")

PROMPT, NEW = 5, 6
LOSSY = [name for name in WRITTEN if name.startswith("quantized") or name == "mixed"]
"""Models whose cache gives back other numbers than it was given, or gives them back later than one pass would."""
TOLERANCE = 2e-4


@cache
def written_model(name: str) -> PreTrainedModel:
    return WRITTEN[name]()


@cache
def tolerance(name: str) -> float:
    """Return the tolerance of logits against one uncached pass: that of plain decoding, if the cache is lossy."""
    if name not in LOSSY:
        return TOLERANCE
    model, ids = written_model(name), tokens()
    pieces = ids.split((PROMPT, *[1] * (ids.shape[1] - PROMPT)), dim=1)
    entries, decoded = DynamicCache(config=model.config), []
    for piece in pieces:
        output = model(input_ids=piece, past_key_values=entries)
        decoded.append(output.logits)
    return TOLERANCE + 2 * (torch.cat(decoded, dim=1) - uncached(model, ids)).abs().max().item()


def uncached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


def close(name: str, actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance(name), rtol=1e-4)


def generated(name: str, **settings) -> None:
    """Compare the logits of what is generated greedily with one uncached pass over it."""
    model, ids = written_model(name), settings.pop("ids", tokens()[:, :PROMPT])
    settings |= {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "disable_compile": True}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    assert output.sequences.shape[1] == ids.shape[1] + NEW
    expected = uncached(model, output.sequences)[:, ids.shape[1] - 1 : -1]
    close(name, torch.stack(output.logits, dim=1), expected)


def packed(name: str) -> None:
    """Two documents in a row, at other positions in each row."""
    model, ids = written_model(name), tokens()
    for cuts in ((5, 5), (3, 7)):
        rows = [torch.cat((torch.arange(cut), torch.arange(12 - cut))) for cut in cuts]
        positions = torch.stack(rows)
        if name == IMAGES:
            positions = positions.expand(4, -1, -1)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for row, cut in enumerate(cuts):
            alone = [uncached(model, part[None])[0] for part in (ids[row, :cut], ids[row, cut:])]
            torch.testing.assert_close(logits[row], torch.cat(alone), atol=TOLERANCE, rtol=1e-4)


def left_padding(name: str) -> None:
    model, ids = written_model(name), tokens(batch=1, length=8)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), ids), dim=1)
    mask = (torch.arange(11) >= 3).long()[None]
    entries = DynamicCache(config=model.config)
    logits = []
    for piece in (slice(0, 9), slice(9, 10), slice(10, 11)):
        settings = {} if name == IMAGES else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, piece]}
        call = {"input_ids": padded[:, piece], "attention_mask": mask[:, : piece.stop], **settings}
        logits.append(model(**call, past_key_values=entries).logits)
    close(name, torch.cat(logits, dim=1)[:, 3:], uncached(model, ids))


def right_padding(name: str) -> None:
    model, ids = written_model(name), tokens(batch=1, length=8)
    padded = torch.cat((ids, torch.zeros(1, 3, dtype=torch.long)), dim=1)
    mask = (torch.arange(11) < 8).long()[None]
    close(name, model(input_ids=padded, attention_mask=mask).logits[:, :8], uncached(model, ids))


def assisted(name: str) -> None:
    """Drafts of another model are taken back from the cache, or refused (huggingface/transformers#48280)."""
    assistant = copy.deepcopy(written_model(name)) if name == IMAGES else tiny_source("llama", num_hidden_layers=1)
    generated(name, ids=tokens(batch=1, length=PROMPT), assistant_model=assistant)


def prompt_lookup(name: str) -> None:
    generated(name, ids=tokens(batch=1, length=4).repeat(1, 3), prompt_lookup_num_tokens=3)


def beams(name: str) -> None:
    """The score of the best beam is that of one pass over it."""
    model, ids = written_model(name), tokens()[:, :PROMPT]
    settings = {"num_beams": 3, "do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "length_penalty": 0.0}
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)
    new = output.sequences[:, PROMPT:, None]
    scores = uncached(model, output.sequences)[:, PROMPT - 1 : -1].log_softmax(-1).gather(-1, new)[..., 0]
    torch.testing.assert_close(output.sequences_scores, scores.sum(-1), atol=2 * NEW * tolerance(name), rtol=1e-3)


def static(name: str) -> None:
    generated(name, cache_implementation="static")


def continued(name: str) -> None:
    """A cache that was filled before, and a copy of it, each go on with a text of its own."""
    model, ids = written_model(name), tokens()
    entries = DynamicCache(config=model.config)
    model(input_ids=ids[:, :PROMPT], past_key_values=entries)
    for rest, own in ((ids[:, PROMPT:], copy.deepcopy(entries)), (ids[:, PROMPT:].flip(1), entries)):
        logits = [model(input_ids=token, past_key_values=own).logits for token in rest.split(1, dim=1)]
        close(name, torch.cat(logits, dim=1), uncached(model, torch.cat((ids[:, :PROMPT], rest), dim=1))[:, PROMPT:])


def chunked(name: str) -> None:
    generated(name, ids=tokens(), prefill_chunk_size=4)


def attentions(name: str) -> None:
    model, ids = written_model(name), tokens()
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        entries = DynamicCache(config=model.config)
        for piece, entry in ((ids[:, :PROMPT], PROMPT), (ids[:, PROMPT:], ids.shape[1])):
            output = model(input_ids=piece, past_key_values=entries, output_attentions=True)
            for weights in output.attentions:
                assert weights.shape == (2, weights.shape[1], piece.shape[1], entry)
                torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]), atol=1e-5, rtol=0)
                later = torch.arange(entry) > torch.arange(entry - piece.shape[1], entry)[:, None]
                assert not weights[..., later].any()
    finally:
        model.set_attn_implementation(before)


def embeddings(name: str) -> None:
    model, ids = written_model(name), tokens()
    embedded = model.get_input_embeddings()(ids)
    close(name, model(inputs_embeds=embedded).logits, uncached(model, ids))
    settings = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None}
    ones = torch.ones_like(ids)
    by_embeddings = model.generate(inputs_embeds=embedded, attention_mask=ones, **settings)
    assert torch.equal(by_embeddings, model.generate(input_ids=ids, attention_mask=ones, **settings)[:, ids.shape[1] :])


def compiled(name: str) -> None:
    model, ids = written_model(name), tokens()
    torch._dynamo.reset()
    step = torch.compile(model.__call__, backend="eager")
    entries = DynamicCache(config=model.config)
    model(input_ids=ids[:, :-1], past_key_values=entries)
    close(name, step(input_ids=ids[:, -1:], past_key_values=entries).logits, uncached(model, ids)[:, -1:])


ASPECTS: dict[str, Callable[[str], None]] = {
    "packed": packed,
    "left_padding": left_padding,
    "right_padding": right_padding,
    "generate": generated,
    "assisted": assisted,
    "prompt_lookup": prompt_lookup,
    "beams": beams,
    "static": static,
    "continued": continued,
    "chunked": chunked,
    "attentions": attentions,
    "embeddings": embeddings,
    "compiled": compiled,
}


def marks(name: str, aspect: str | None = None) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK and aspect != "compiled" else [pytest.mark.slow]


CASES = [
    pytest.param(aspect, name, marks=marks(name, aspect))
    for aspect in ASPECTS
    for name in WRITTEN
    if name in QUICK or aspect != "compiled"  # compiling takes long, and forms of caches differ in nothing more
]


@pytest.mark.parametrize(("aspect", "name"), CASES)
def test_runs_right_or_refuses(aspect, name):
    if (pattern := RUNNING.get((aspect, name))) is None:
        ASPECTS[aspect](name)
        return
    with pytest.raises(ValueError, match=pattern) as refusal:
        ASPECTS[aspect](name)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", CUSTOM)
def test_packed_rows_are_refused_where_a_cache_is_kept(name):
    """huggingface/transformers#46634, hiyouga/LLaMA-Factory#4224: documents of a row that attend to each other."""
    model, positions = written_model(name), torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)
    if name == IMAGES:
        positions = positions.expand(4, -1, -1)
    with pytest.raises(ValueError, match="pass use_cache=False"):
        model(input_ids=tokens(), position_ids=positions, use_cache=True)


def test_documents_are_read_off_the_arguments_of_varlen_kernels():
    """`cu_seq_lens_q` and `seq_idx`, as transformers' DataCollatorWithFlattening gives them."""
    model, ids = written_model("hybrid"), tokens(batch=1)
    positions = torch.cat((torch.arange(5), torch.arange(7)))[None]
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    varlen = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    numbers = {"seq_idx": (torch.arange(12) >= 5).int()[None]}
    for message in (varlen, numbers, varlen | {"position_ids": positions}):
        assert torch.equal(model(input_ids=ids, use_cache=False, **message).logits, expected)
    ones = torch.ones_like(ids)
    assert torch.equal(
        model(input_ids=ids, position_ids=positions, attention_mask=ones, use_cache=False).logits, expected
    )
    with pytest.raises(ValueError, match="mark different documents"):
        model(input_ids=ids, position_ids=torch.arange(12)[None], use_cache=False, **numbers)
    with pytest.raises(ValueError, match="packed documents with padding"):
        padded = torch.cat((ids, ids[:, :2]), dim=1)
        mask = (torch.arange(14) < 12).long()[None]
        longer = torch.cat((positions, torch.tensor([[0, 1]])), dim=1)
        model(input_ids=padded, position_ids=longer, attention_mask=mask, use_cache=False)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_training_has_the_gradients_of_documents_alone(checkpointing):
    """Layers that read latents of earlier ones read those of the same document."""
    shares = low_rank_entry(shared_layers=1, shared_rank=2 * LATENT)
    entries = [{**entry, "window": 3, "sinks": 2} for entry in (low_rank_entry(), shares)]
    model = from_entries(*entries, kv_cache=INT4).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    ids, positions = tokens(batch=1), torch.cat((torch.arange(5), torch.arange(7)))[None]

    def gradients(*calls: dict) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.enable_grad():
            for call in calls:
                model(**call, use_cache=False).logits.square().sum().backward()
        return {key: parameter.grad.clone() for key, parameter in model.named_parameters()}

    alone = gradients({"input_ids": ids[:, :5]}, {"input_ids": ids[:, 5:]})
    for key, gradient in gradients({"input_ids": ids, "position_ids": positions}).items():
        torch.testing.assert_close(gradient, alone[key], atol=1e-3, rtol=1e-4)


FLASH = ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2", "some/kernel")
NAMES = ("paged|eager", "paged|sdpa", "flex_attention", "nonsense")


@pytest.mark.parametrize("name", ["latent", "hybrid", "quantized_plain", IMAGES])
@pytest.mark.parametrize("implementation", NAMES)
def test_attention_that_is_not_for_converted_models_is_refused_in_one_line(name, implementation):
    """QwenLM/Qwen3-VL#1682, huggingface/transformers#31741: tracebacks where an attention is not supported."""
    model = copy.deepcopy(written_model(name))
    with pytest.raises(ValueError, match=r"This model supports eager, sdpa") as refusal:
        model.set_attn_implementation(implementation)
    assert "\n" not in str(refusal.value) and "http" not in str(refusal.value)
    model.get_decoder().config._attn_implementation = implementation
    with pytest.raises(ValueError, match=r"This model supports eager, sdpa"):
        model(input_ids=tokens())


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CUSTOM])
def test_flash_attention_gives_what_eager_attention_gives(name, monkeypatch):
    """QwenLM/Qwen3-VL#1682, huggingface/transformers#31741: FlashAttention on the custom class."""
    flash_attention.install(monkeypatch)
    model, ids = copy.deepcopy(written_model(name)), tokens()
    if pattern := RUNNING.get(("flash", name)):
        for implementation in FLASH:
            with pytest.raises(ValueError, match=pattern):
                model.set_attn_implementation(implementation)
        return
    packed_call = {"position_ids": torch.cat((torch.arange(5), torch.arange(7)))[None], "use_cache": False}
    if name == IMAGES:
        packed_call["position_ids"] = packed_call["position_ids"].expand(4, -1, -1)
    left = {"attention_mask": (torch.arange(12) >= torch.tensor([[0], [4]])).long()}
    right = {"attention_mask": (torch.arange(12) < torch.tensor([[12], [8]])).long()}
    pieces = ids.split((5, 4, 1, 1, 1), dim=1)

    def outputs(implementation: str) -> tuple[Tensor, Tensor]:
        model.set_attn_implementation(implementation)
        entries = DynamicCache(config=model.config)
        decoded = [model(input_ids=piece, past_key_values=entries).logits for piece in pieces]
        padded = [model(input_ids=ids, **mask).logits[mask["attention_mask"].bool()] for mask in (left, right)]
        return torch.cat([*decoded, model(input_ids=ids[:1], **packed_call).logits.view(2, 6, -1)], 1), torch.cat(
            padded
        )

    (decoded, padded), (expected, expected_padded) = outputs("flash_attention_2"), outputs("eager")
    torch.testing.assert_close(decoded, expected, atol=TOLERANCE, rtol=1e-4)
    close(name, padded, expected_padded)  # real tokens and padding share scales of a quantized cache
    model.set_attn_implementation("flash_attention_2")
    with pytest.raises(ValueError, match="need a batch size of 1"):
        model(input_ids=ids, **packed_call)


@pytest.mark.parametrize("name", ["mla", "fewer_heads"])
def test_stock_results_take_flash_attention(name, monkeypatch):
    """QwenLM/Qwen3-VL#1682, huggingface/transformers#31741."""
    flash_attention.install(monkeypatch)
    model = copy.deepcopy(written_model(name))
    expected = model(input_ids=tokens()).logits
    model.set_attn_implementation("flash_attention_2")
    torch.testing.assert_close(model(input_ids=tokens()).logits, expected, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize("name", ["latent", IMAGES])
@pytest.mark.parametrize("implementation", ["flash_attention_2", "some-hub/kernel"])
def test_a_config_file_does_not_choose_the_attention(name, implementation, tmp_path):
    """QwenLM/Qwen3-VL#1682: `attn_implementation` in config.json. A kernel of the hub would be code that runs."""
    model = written_model(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"attn_implementation": implementation}
    if name == IMAGES:
        config["text_config"]["attn_implementation"] = implementation
        config["vision_config"]["attn_implementation"] = implementation
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert _loaded(tmp_path).get_decoder().config._attn_implementation == "sdpa"
    assert _loaded(tmp_path, attn_implementation="eager").get_decoder().config._attn_implementation == "eager"


def _loaded(path: Path, **settings) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_pretrained(path, **settings)
