import hashlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from measures import recall_accuracy
from tiny_models import byte_tokenizer
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import surgery
from surgery.common.errors import SurgeryError
from surgery.eval.recall import NAMES, recall_prompts
from surgery.eval.sequences import tokenize

ASSETS = Path(surgery.__file__).parent / "assets"


@pytest.fixture(scope="module")
def filler(tokenizer):
    return tokenize(tokenizer, (ASSETS / "heldout-stdlib.txt").read_text(encoding="utf-8")[:20_000])


@pytest.fixture(scope="module")
def demo_model():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "demo-model", dtype=torch.float32)


def test_the_answer_is_masked_and_planted(tokenizer, filler):
    prompts = recall_prompts(tokenizer, filler, count=6, length=256, seed=3)
    assert prompts.tokens.shape == prompts.answer_mask.shape == (6, 256)
    assert (prompts.tokens[:, 0] == tokenizer.bos_token_id).all()
    for row, mask in zip(prompts.tokens, prompts.answer_mask, strict=True):
        text, answer = tokenizer.decode(row), tokenizer.decode(row[mask])
        assert text.count("# The secret key of") == 4
        name = text.rpartition("key of ")[2].split()[0]
        assert len(answer.strip()) == 5 and answer.strip().isdigit()
        assert f"# The secret key of {name} is{answer}.\n" in text
        assert text.endswith(f"# Recall: the secret key of {name} is{answer}.\n")


def test_the_published_task_does_not_change(tokenizer):
    text = tokenize(tokenizer, (ASSETS / "heldout-stdlib.txt").read_text(encoding="utf-8"))
    prompts = recall_prompts(tokenizer, text, count=48, length=1024, seed=3)
    assert hashlib.sha256(prompts.tokens.numpy().astype("<i8").tobytes()).hexdigest()[:16] == "4e8dd49f8d136b23"
    assert hashlib.sha256(prompts.answer_mask.numpy().tobytes()).hexdigest()[:16] == "724b8a7e7b302fcc"


@pytest.mark.parametrize("special", [{}, {"bos_token": "<s>", "eos_token": "</s>"}])
def test_a_tokenizer_of_bytes(special):
    tokenizer = byte_tokenizer(**special)
    prompts = recall_prompts(tokenizer, tokenize(tokenizer, "x = 1\n" * 200), count=4, length=400, seed=0, facts=2)
    assert prompts.tokens.shape == (4, 400)
    assert prompts.answer_mask.sum(1).tolist() == [6] * 4  # a space and five digits
    assert prompts.answer_mask[:, -8:-2].all()  # then a full stop and a newline


@pytest.mark.parametrize(
    "tokenizer",
    [
        byte_tokenizer(merges=(("s", "Ġ"),)),  # the question's last word takes the answer's space
        byte_tokenizer(merges=tuple((str(digit), ".") for digit in range(10))),  # the last digit takes the full stop
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"?": 0}, unk_token="?")), unk_token="?"),
    ],
)
def test_a_tokenizer_that_hides_the_answer_is_refused(tokenizer):
    with pytest.raises(SurgeryError, match="does not work with this tokenizer"):
        recall_prompts(tokenizer, [0] * 1000, count=1, length=400, seed=0, facts=1)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"length": 64}, "4 facts and a question take"),
        ({"length": 10**6}, "too few for windows of 1000000"),
        ({"facts": 0}, "planted facts must be from 1 to 24, not 0"),
        ({"facts": len(NAMES) + 1}, "planted facts must be from 1 to 24, not 25"),
    ],
)
def test_impossible_prompts(tokenizer, filler, request_, message):
    with pytest.raises(SurgeryError, match=message):
        recall_prompts(tokenizer, filler, **{"count": 1, "length": 256, "seed": 0, **request_})


class Oracle(nn.Module):
    """Predicts the token that follows, unless that is at one of the wrong positions of the sequence."""

    def __init__(self, wrong: tuple[int, ...] = ()):
        super().__init__()
        self.wrong = list(wrong)

    def forward(self, input_ids, **_):
        following = input_ids.roll(-1, dims=1)
        following[:, [position - 1 for position in self.wrong]] += 1
        return SimpleNamespace(logits=nn.functional.one_hot(following % 4096, 4096).float())


def test_an_answer_is_right_if_every_digit_is_and_nothing_else_counts(tokenizer, filler):
    prompts = recall_prompts(tokenizer, filler, count=5, length=160, seed=0)
    assert recall_accuracy(Oracle(), prompts, batch_size=2) == 1.0
    last = int(prompts.answer_mask[0].nonzero()[-1])
    assert recall_accuracy(Oracle(wrong=(last,)), prompts) == 0.0
    others = (~prompts.answer_mask.any(0)).nonzero().flatten()[1:]
    assert recall_accuracy(Oracle(wrong=tuple(others.tolist())), prompts) == 1.0


def test_teacher_forcing_decides_as_decoding_does(demo_model, tokenizer, filler):
    prompts = recall_prompts(tokenizer, filler, count=4, length=128, seed=5)
    decoded = 0
    for row, mask in zip(prompts.tokens, prompts.answer_mask, strict=True):
        answer = row[mask]
        question = row[: mask.nonzero()[0]][None]
        tokens = demo_model.generate(
            question, attention_mask=torch.ones_like(question), max_new_tokens=len(answer), do_sample=False
        )
        decoded += torch.equal(tokens[0, question.shape[1] :], answer)
    assert recall_accuracy(demo_model, prompts, batch_size=4) == decoded / 4
    assert decoded >= 2


@pytest.mark.slow
def test_the_demo_model_has_its_published_recall(demo_model, tokenizer):
    text = tokenize(tokenizer, (ASSETS / "heldout-stdlib.txt").read_text(encoding="utf-8"))
    prompts = recall_prompts(tokenizer, text, count=48, length=1024, seed=3)
    assert recall_accuracy(demo_model, prompts) == pytest.approx(41 / 48)
