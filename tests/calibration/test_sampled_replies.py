"""Replies are drawn from the model's distribution, of prompts of any length at once."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import DEMO
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from surgery.calibration.conversations import sample_replies
from surgery.common.errors import SurgeryError
from surgery.running.chat_templates import render_chat


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_replies_follow_prompts_of_any_length_and_the_seed(model):
    prompts = [[1, 5, 7], [1, 9]]
    replies = sample_replies(model, prompts, 6, ends=())
    assert [reply[: len(prompt)] for reply, prompt in zip(replies, prompts, strict=True)] == prompts
    assert {len(reply) for reply in replies} == {9} and max(map(max, replies)) < 97
    assert model.training  # as it came
    first, again, other = (sample_replies(model, [[1]], 24, ends=(), seed=seed) for seed in (0, 0, 1))
    assert first == again != other


def test_frequencies_follow_the_model(model):
    replies = torch.tensor(sample_replies(model, [[1]] * 4000, 1, ends=()))
    with torch.no_grad():
        expected = model(torch.tensor([[1]])).logits[0, 0].softmax(-1)
    drawn = replies[:, 1].bincount(minlength=97) / len(replies)
    assert (drawn - expected).abs().sum() < 0.15  # total variation of 4,000 draws of about 97 outcomes


def test_a_reply_keeps_the_token_that_ends_it(model):
    replies = sample_replies(model, [[1]] * 8, 30, ends=range(48))
    assert all(reply[-1] < 48 and min(reply[1:-1], default=48) >= 48 for reply in replies)


def test_a_broken_model_is_reported():
    class Broken(torch.nn.Linear):
        config = SimpleNamespace()

        def forward(self, **_):
            return SimpleNamespace(logits=torch.full((1, 1, 5), float("nan")), past_key_values=None)

    with pytest.raises(SurgeryError, match="contain NaN or infinity"):
        sample_replies(Broken(1, 1), [[1]], 4, ends=())


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ ().__class__.x }}", None])
def test_a_template_that_fails_is_one_line(template):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = template
    with pytest.raises(SurgeryError, match=r"the chat template of .* rejects the conversation: .+") as error:
        render_chat(tokenizer, [{"role": "user", "content": "x"}])
    assert "\n" not in str(error.value)
