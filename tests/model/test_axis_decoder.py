"""Positions of several axes, inside of a vision-language model."""

import copy
import pickle

import pytest
import torch
from picture_models import CONFIGS, prompt
from transformers import AutoModelForImageTextToText, DynamicCache

from surgery.model import SurgeryConfig, SurgeryForConditionalGeneration, SurgeryPicturesConfig

BLOCK = {"rank": 12, "keys": [0, 1], "values": [0, 1]}
LOW_RANK = {"kind": "low_rank", "blocks": [BLOCK], "shared_layers": 0, "shared_rank": 0, "sinks": 0, "window": 0}
STREAMING = {**LOW_RANK, "streaming": {"blocks": [0], "sinks": 2, "recent": 5}}


def latent(frequencies):
    return {"kind": "latent", "kv_lora_rank": 10, "rope_inv_freq": frequencies, "key_norm_eps": 1e-6}


def model_of(entry, name="qwen3_vl"):
    torch.manual_seed(0)
    source = CONFIGS[name]()
    text = SurgeryConfig.from_base(source.text_config, [entry] * source.text_config.num_hidden_layers)
    config = SurgeryPicturesConfig(**{**source.to_dict(), "base_model_type": name, "text_config": text.to_dict()})
    return AutoModelForImageTextToText.from_config(config).eval()


def test_every_pair_turns_by_its_axis():
    """Sections of 3, 3 and 2 pairs interleaved; other frequencies have no axis."""
    decoder = model_of(LOW_RANK).get_decoder()
    own = decoder.rotary_emb.inv_freq.tolist()
    assert decoder.axes_of((*own, 0.0)) == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    assert decoder.axes_of((own[0], 0.123)) is None
    cos, sin = decoder.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.tensor([3, 50, 700])[:, None, None])
    attention = model_of(latent(own)).get_decoder().layers[0].self_attn
    with torch.no_grad():
        result = attention.rotary(torch.tensor([3, 50, 700])[:, None, None])
    for actual, want in zip(result, (cos, sin), strict=True):
        torch.testing.assert_close(actual[0, 0, 0].double(), want[0, 0, : len(own)])
    decoder = model_of(None, "qwen2_5_vl").get_decoder()
    assert decoder.axes_of(tuple(decoder.rotary_emb.inv_freq.tolist())) == [0, 0, 1, 2]


def test_frequencies_of_no_axis_turn_text_alone():
    model, inputs = model_of(latent([0.5, 0.123])), prompt("qwen3_vl")
    assert model(inputs["input_ids"][:, :8]).logits.isfinite().all()
    with pytest.raises(ValueError, match="must hold the family's own frequencies"):
        model(**inputs)


@pytest.mark.parametrize("entry", [LOW_RANK, STREAMING], ids=["low_rank", "streaming"])
@torch.no_grad()
def test_positions_are_kept_with_the_cache(entry):
    """Given late, left out later, in a copy of the cache, and after tokens were taken back."""
    model, decoder = model_of(entry), model_of(entry).get_decoder()
    decoder.load_state_dict(model.get_decoder().state_dict())
    ids = torch.randint(3, 4000, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12).expand(3, 2, -1).clone()
    positions[:, :, 4:8] = torch.tensor([[4, 4, 4, 4], [4, 4, 5, 5], [4, 5, 4, 5]])[:, None]
    want = decoder(ids, position_ids=positions).last_hidden_state
    assert float((want - decoder(ids).last_hidden_state).abs().max()) > 1e-2

    cache = DynamicCache(config=decoder.config)
    calls = [(slice(0, 4), None), (slice(4, 8), positions[..., 4:8]), (slice(8, 10), None)]
    result = [decoder(ids[:, at], position_ids=values, past_key_values=cache).last_hidden_state for at, values in calls]
    assert cache.axis_positions.shape == (3, 2, 10)
    if entry is LOW_RANK:
        decoder(ids[:, :2], past_key_values=cache)
        cache.crop(-2)
    cache = copy.deepcopy(cache)
    result.append(decoder(ids[:, 10:], position_ids=positions[0, :, 10:], past_key_values=cache).last_hidden_state)
    torch.testing.assert_close(torch.cat(result, dim=1), want, rtol=0, atol=1e-5)
    assert not hasattr(decoder(ids).past_key_values, "axis_positions")


@pytest.mark.parametrize("entry", [LOW_RANK, None], ids=["low_rank", "stock"])
@torch.no_grad()
def test_copies_and_saved_models_compute_the_same(tmp_path, entry):
    model, inputs = model_of(entry), prompt("qwen3_vl")
    want = model(**inputs).logits
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(reloaded) is type(model) and isinstance(reloaded, SurgeryForConditionalGeneration)
    for other in (reloaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(**inputs).logits, want)
    model.set_attn_implementation("eager")
    records = model(**inputs, output_attentions=True)
    torch.testing.assert_close(records.logits, want, rtol=0, atol=1e-5)
    assert len(records.attentions) == 2


def test_a_wrapper_of_nothing_converted_is_refused():
    config = SurgeryPicturesConfig(base_model_type="llava", text_config={"base_model_type": "llama"})
    with pytest.raises(ValueError, match="this is not a converted model"):
        SurgeryForConditionalGeneration(config)
    with pytest.raises(ValueError, match="is not supported by the installed transformers"):
        SurgeryPicturesConfig(base_model_type="nothing")
