from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.calibration.self_samples import sample_from_model
from surgery.common.errors import SurgeryError

TOKENIZER = SimpleNamespace(bos_token_id=1, eos_token_id=0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_samples_are_whole_sequences_from_bos(model):
    samples = sample_from_model(model, TOKENIZER, tokens=100, length=24, batch_size=2)
    assert samples.shape == (5, 24) and samples.dtype == torch.int64
    assert (samples[:, 0] == 1).all()
    assert samples.max() < 97
    assert model.training  # as it came


def test_the_seed_decides(model):
    first, again, other = (sample_from_model(model, TOKENIZER, 48, 24, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_cold_samples_are_greedy(model):
    cold = sample_from_model(model, TOKENIZER, 16, 16, temperature=1e-4)
    with torch.no_grad():
        assert torch.equal(model.eval()(cold).logits.argmax(-1)[:, :-1], cold[:, 1:])


def test_frequencies_follow_the_model(model):
    samples = sample_from_model(model, TOKENIZER, tokens=8000, length=2, batch_size=4000)
    with torch.no_grad():
        expected = model(torch.tensor([[1]])).logits[0, 0].softmax(-1)
    drawn = samples[:, 1].bincount(minlength=97) / len(samples)
    assert (drawn - expected).abs().sum() < 0.15  # total variation of 4,000 draws of about 97 outcomes


def test_eos_stands_in_for_a_missing_bos(model):
    tokenizer = SimpleNamespace(bos_token_id=None, eos_token_id=3)
    assert sample_from_model(model, tokenizer, 4, 4)[0, 0] == 3


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"tokens": 0}, "cannot sample 0 tokens"),
        ({"length": 1}, "in sequences of 1"),
        ({"batch_size": 0}, "0 at once"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"length": 65}, "longer than the model's 64 positions"),
        ({"tokenizer": SimpleNamespace(bos_token_id=None, eos_token_id=None)}, "neither a bos nor an eos"),
    ],
)
def test_impossible_requests(model, request_, message):
    with pytest.raises(SurgeryError, match=message):
        sample_from_model(model, **{"tokenizer": TOKENIZER, "tokens": 8, "length": 8, **request_})


def test_a_broken_model_is_reported(model):
    class Broken(torch.nn.Linear):
        config = SimpleNamespace()

        def forward(self, **_):
            return SimpleNamespace(logits=torch.full((1, 1, 5), float("nan")), past_key_values=None)

    with pytest.raises(SurgeryError, match="not finite"):
        sample_from_model(Broken(1, 1), TOKENIZER, 4, 4)
