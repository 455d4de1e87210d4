"""The probes of long range on known answers: a model that copies finds every repetition, a random one none."""

import numpy as np
import pytest
import torch
from copying_model import CERTAIN, CopyingModel
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.session import Session
from surgery.eval.tasks.match import MatchTask, agreement
from surgery.eval.tasks.repeat import LEAD, SKIPPED, SPAN, RepeatTask, repeat_rows
from surgery.running.processes import Processes

VOCABULARY = 997
IDS = np.random.default_rng(0).integers(3, VOCABULARY, size=4000)


def session(**options):
    tokenizer = type("Tokenizer", (), {"eos_token_id": None, "pad_token_id": 0})()
    return Session(tokenizer, Processes(), Progress(silent=True), **{"batch_size": 2, **options})


def random_model(seed=0):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, initializer_range=0.3)).eval()


def task(lags=(96, 160), count=3, bos=1):
    return RepeatTask({lag: repeat_rows(IDS, lag, count, 0, bos) for lag in lags})


@pytest.mark.parametrize("bos", [None, 1])
def test_a_span_of_the_text_comes_again_after_the_lag(bos):
    rows = repeat_rows(IDS, 96, 3, 0, bos)
    assert rows.tokens.shape == (3, (bos is not None) + LEAD + 96 + SPAN) and rows.second - rows.first == 96
    assert torch.equal(rows.tokens[:, rows.first : rows.first + SPAN], rows.tokens[:, rows.second :])
    text = IDS.tolist()
    row = rows.tokens[0, int(bos is not None) : rows.second].tolist()
    assert any(text[start : start + len(row)] == row for start in range(len(text)))


def test_a_copying_model_knows_the_second_occurrence_only():
    found = task().run(CopyingModel(VOCABULARY), session())
    for part in found["lags"].values():
        assert part["second"] < 1e-3 and part["first"] > np.log(VOCABULARY) - 0.1
        assert part["change"]["high"] < -1 and len(part["per_row"]) == 3
    assert found["loss"] < 1e-3 and found["change"] < -CERTAIN / 4


def test_a_random_model_knows_neither():
    found = task(count=8).run(random_model(), session())
    for part in found["lags"].values():
        assert abs(part["first"] - part["second"]) < 0.35 * part["first"]
        assert part["change"]["low"] < 0.5 and part["change"]["high"] > -0.5


def test_the_counted_tokens_are_those_behind_the_first_few():
    """Exactly the loss of one forward pass at those places."""
    model, rows = random_model(), repeat_rows(IDS, 96, 2, 0, 1)
    with torch.no_grad():
        losses = torch.nn.functional.cross_entropy(
            model(rows.tokens).logits[:, :-1].transpose(1, 2), rows.tokens[:, 1:], reduction="none"
        )
    expected = losses[:, rows.second + SKIPPED - 1 : rows.second + SPAN - 1].mean(1)
    found = RepeatTask({96: rows}).run(model, session())
    assert found["lags"]["96"]["per_row"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_settings_hold_the_data():
    one, same, other = (RepeatTask({96: repeat_rows(IDS, 96, 2, seed, 1)}).settings() for seed in (0, 0, 1))
    assert one == same != other


def test_impossible_lags():
    with pytest.raises(SurgeryError, match="lag of 64 at least"):
        repeat_rows(IDS, 32, 1, 0, None)
    with pytest.raises(SurgeryError, match="too few"):
        repeat_rows(IDS, 8192, 1, 0, None)


def test_continuations_that_agree():
    assert agreement([1, 2, 3], [1, 2, 4]) == 2 and agreement([], [1]) == 0 and agreement([1], [1, 2]) == 1
    probe = MatchTask(torch.from_numpy(IDS[:60].reshape(3, 20)), new_tokens=8)
    model, other = random_model(0), random_model(1)
    kept = probe.keep(model, session())
    same, differs = probe.run(model, session(), kept), probe.run(other, session(), kept)
    assert same["tokens"] == same["of"] == 8 and same["same"] == 1
    assert differs["tokens"] < 4 and differs["same"] == 0 and len(differs["per_prompt"]) == 3
    assert probe.run(model, session(), None)["tokens"] is None
