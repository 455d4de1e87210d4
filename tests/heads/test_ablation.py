"""Ablation: what the loss rises by when a head streams, and that a head is measured once."""

import pytest
import torch
from scoring import scoring_session
from torch.nn.functional import cross_entropy

from surgery.heads import ablation
from surgery.heads.journal import Journal
from surgery.heads.streaming import streaming_heads


def answer_loss(session, streams) -> float:
    """The mean loss of answers in the session's needles, from all logits at once."""
    needles = session.needles(session.settings.samples)
    with torch.no_grad(), streaming_heads(session.model, streams, session.settings.sinks, session.settings.recent):
        logits = session.model(needles.tokens, use_cache=False).logits[:, :-1].double()
    each = cross_entropy(logits.flatten(0, 1), needles.tokens[:, 1:].flatten(), reduction="none")
    each = each.view(len(logits), -1) * needles.answers[:, 1:]
    return (each.sum(1) / needles.answers.sum(1)).mean().item()


def test_scores_are_rises_of_the_loss(checkpoints):
    session = scoring_session(checkpoints("llama"), samples=3, facts=2)
    result = ablation.score(session)
    nothing = torch.zeros(2, 2, dtype=torch.bool)
    assert result.facts["answer_loss"] == pytest.approx(answer_loss(session, nothing), rel=1e-5)
    for layer in range(2):
        for head in range(2):
            streams = nothing.clone()
            streams[layer, head] = True
            rise = answer_loss(session, streams) - answer_loss(session, nothing)
            assert result.scores[layer, head].item() == pytest.approx(rise, abs=1e-5)
    assert result.scores.dtype == torch.float32 and result.scores.unique().numel() == 4
    assert torch.equal(result.parts["answer_loss"], result.scores)
    assert not torch.equal(result.parts["text_loss"], result.scores)


def test_a_head_that_nobody_reads_costs_nothing(checkpoints):
    session = scoring_session(checkpoints("qwen3"), samples=2)
    session.model.base_model.layers[1].self_attn.o_proj.weight[:, 32:] = 0  # KV head 1: query heads 2 and 3 of 16
    scores = ablation.score(session).scores
    assert scores[1, 1] == 0 and (scores.view(-1)[:3] != 0).all()


def test_goes_on_where_it_stopped(checkpoints, tmp_path):
    source, path = checkpoints("llama"), tmp_path / "journal"
    expected = ablation.score(scoring_session(source, samples=2))

    class Stopped(Journal):
        def put(self, key, tensors, facts=None):
            super().put(key, tensors, facts)
            if key.endswith(" 1"):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ablation.score(scoring_session(source, Stopped(path, {}), samples=2))
    session = scoring_session(source, Journal(path, {}), samples=2)
    passes = []
    original = session.model.base_model.forward
    session.model.base_model.forward = lambda *args, **kwargs: passes.append(1) or original(*args, **kwargs)
    result = ablation.score(session)
    # Two heads are left, with two sequences of needles and two of text each; two tell how the logits are read.
    assert len(passes) == 2 * 4 + 2
    assert session.progress.done == 5
    assert torch.equal(result.scores, expected.scores) and result.facts == expected.facts


def test_weights_need_not_be_resident(checkpoints):
    accelerate = pytest.importorskip("accelerate")
    expected = ablation.score(scoring_session(checkpoints("llama"), samples=2)).scores
    session = scoring_session(checkpoints("llama"), samples=2)
    accelerate.cpu_offload(session.model, execution_device="cpu")
    assert torch.equal(ablation.score(session).scores, expected)
