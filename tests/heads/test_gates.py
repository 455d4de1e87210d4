"""Gates: what they compute, and how training moves them."""

from contextlib import nullcontext

import pytest
import torch
from scoring import scoring_session, streaming_heads

from surgery.common.errors import SurgeryError
from surgery.heads import duo, gate_training, gates
from surgery.heads.gate_training import schedule
from surgery.heads.gates import gated_heads, gated_output, recomputed_layers
from surgery.heads.streaming import streaming_output
from surgery.running.attention_tap import AttentionCall, tap_attention


def call(dtype=torch.float32) -> AttentionCall:
    """Two KV heads with two query heads each, 40 tokens of two sequences."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 40, 8, dtype=dtype) for heads in (4, 2, 2))
    return AttentionCall(0, query, key, value, None, 8**-0.5)


def test_the_mixture_is_float32_whatever_the_model_is():
    attention = call(torch.bfloat16)
    gate = torch.full((2,), 1 - 2**-12, requires_grad=True)  # which bfloat16 would round to 1
    out = gated_output(attention, gate, 0, 1)
    full, streaming = attention.output().float(), streaming_output(attention, 0, 1).float()
    assert torch.equal(out, torch.lerp(streaming, full, gate[0]).bfloat16())
    out.float().sum().backward()
    difference = (full - streaming).transpose(1, 2)
    assert gate.grad.dtype == torch.float32
    assert torch.allclose(gate.grad, difference.reshape(2, 2, -1).transpose(0, 1).reshape(2, -1).sum(1), rtol=1e-5)


@pytest.mark.parametrize("values", [(1.0, 0.0), (0.0, 0.3), (1.0, 1.0), (0.3, 0.7)])
def test_gradients_are_those_of_the_whole_mixture(values):
    """Also where a gate of 0 or 1 lets none back through one of the outputs."""
    signal, result = torch.randn(2, 40, 4, 8, generator=torch.Generator().manual_seed(1)), []
    for direct in (False, True):
        attention, gate = call(), torch.tensor(values, requires_grad=True)
        leaves = [part.requires_grad_() for part in (attention.query, attention.key, attention.value)]
        out = gated_output(attention, gate, 2, 5)
        if direct:
            share = gate.repeat_interleave(2)[:, None]
            out = share * attention.output() + (1 - share) * streaming_output(attention, 2, 5)
        (out * signal).sum().backward()
        result.append([leaf.grad for leaf in (*leaves, gate)])
    for actual, want in zip(*result, strict=True):
        torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)


def test_no_gradient_goes_back_through_an_output_that_counts_for_nothing(monkeypatch):
    passed = []

    def streamed(attention, *settings):
        passed.append((attention.kv_heads, torch.is_grad_enabled()))
        return streaming_output(attention, *settings)

    monkeypatch.setattr(gates, "streaming_output", streamed)
    gated_output(call(), torch.tensor([1.0, 0.0], requires_grad=True), 2, 5)
    gated_output(call(), torch.tensor([0.5, 0.0], requires_grad=True), 2, 5)
    assert passed == [(1, False), (1, True), (1, True), (1, True)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_gates_of_1_and_0_are_full_and_streaming_heads(checkpoints, family):
    session = scoring_session(checkpoints(family))
    model, tokens = session.model, session.text(2)
    streams = torch.tensor([[True, False], [False, True]])
    with torch.no_grad():
        with gated_heads(model, (~streams).float(), 4, 12):
            logits = model(tokens, use_cache=False).logits
        with streaming_heads(model, streams, 4, 12):
            expected = model(tokens, use_cache=False).logits
        assert torch.allclose(logits, expected, atol=1e-4)
        assert not torch.allclose(logits, model(tokens, use_cache=False).logits, atol=1e-1)


@pytest.fixture
def calls(monkeypatch):
    """An entry for each time that attention was mixed."""
    entries, computed = [], gates.gated_output
    monkeypatch.setattr(gates, "gated_output", lambda *args: entries.append(None) or computed(*args))
    return entries


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_layers_are_computed_again_as_in_evaluation(checkpoints, family, calls):
    session, results, counts = scoring_session(checkpoints(family), steps=1), [], []
    for module in session.model.modules():  # what training mode would bring in
        for name in {"jitter_noise", "attention_dropout"} & vars(module).keys():
            setattr(module, name, 0.5)
    states = [dict(layer.__dict__) for layer in session.model.base_model.layers]
    for again in (False, True):
        objective = duo.DuoObjective(session)
        objective.gates.data.fill_(0.5)
        calls.clear()
        with recomputed_layers(session.model) if again else nullcontext():
            results.append((objective.backward(0).detach(), objective.gates.grad))
        counts.append(len(calls))
    assert counts[1] == 2 * counts[0]
    torch.testing.assert_close(*results)
    assert states == [layer.__dict__ for layer in session.model.base_model.layers]


def test_layers_are_computed_again_only_where_they_would_keep_much(checkpoints, monkeypatch, calls):
    results = []
    for entry in (gate_training.KEPT_BYTES, 0):
        monkeypatch.setattr(gate_training, "KEPT_BYTES", entry)
        calls.clear()
        results.append((duo.score(scoring_session(checkpoints("llama"), steps=3)).scores, len(calls)))
    (scores, once), (same, twice) = results
    assert torch.equal(scores, same) and twice == 2 * once


def test_gradients_are_those_of_the_loss(checkpoints):
    session = scoring_session(checkpoints("llama"), steps=1)
    objective = duo.DuoObjective(session)
    parameter = objective.gates
    with torch.no_grad():
        parameter.copy_(torch.tensor([[0.3, 0.6], [0.8, 0.5]]))
    with recomputed_layers(session.model):
        objective.backward(0)
        gradient = parameter.grad.clone()
        for index in range(4):
            ends = []
            for move in (0.01, -0.01):
                with torch.no_grad():
                    parameter.view(-1)[index] += move
                ends.append(objective.backward(0).item())
                with torch.no_grad():
                    parameter.view(-1)[index] -= move
            assert (ends[0] - ends[1]) / 0.02 == pytest.approx(gradient.view(-1)[index].item(), rel=0.05, abs=2e-4)


@pytest.mark.parametrize("values", [[[0.3, 0.6], [0.8, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])
def test_the_last_layer_is_computed_where_it_is_read(checkpoints, values, monkeypatch):
    session, output = scoring_session(checkpoints("llama"), steps=1), AttentionCall.output
    result, computed = [], []
    for everywhere in (False, True):
        if everywhere:
            for module in (duo, gates):
                monkeypatch.setattr(
                    module, "tap_attention", lambda model, function, positions: tap_attention(model, function)
                )
        objective, queries = duo.DuoObjective(session), []
        with torch.no_grad():
            objective.gates.copy_(torch.tensor(values))
        monkeypatch.setattr(
            AttentionCall, "output", lambda call, q=queries: q.append(call.query.shape[2]) or output(call)
        )
        loss = objective.backward(0)
        result.append((loss.detach(), objective.gates.grad))
        computed.append(set(queries))
    num_answers = int(objective._needles.answers[0].sum())
    assert computed == [{session.settings.length, num_answers}, {session.settings.length}]
    torch.testing.assert_close(*result, rtol=1e-4, atol=1e-6)


def test_full_gates_lose_nothing_to_their_teacher(checkpoints):
    session = scoring_session(checkpoints("llama"), steps=1)
    objective = duo.DuoObjective(session)
    assert objective.backward(0) < 1e-10
    with torch.no_grad():
        objective.gates.zero_()
    assert objective.backward(0) > 1e-4


def test_gates_come_to_the_target(checkpoints):
    result = duo.score(scoring_session(checkpoints("llama"), steps=40, target=0.5, learning_rate=0.3))
    assert result.scores.shape == (2, 2) and result.scores.dtype == torch.float32
    assert result.facts["mean_gate"] == pytest.approx(0.5, abs=0.2)
    assert result.scores.unique().numel() == 4 and result.facts["steps"] == 40


def test_what_is_not_finite_stops(checkpoints):
    session = scoring_session(checkpoints("llama"), steps=2)
    session.model.base_model.norm.weight[0] = float("nan")
    with pytest.raises(SurgeryError, match=r"duo, step 1: .*contain NaN"):
        duo.score(session)


def test_rates_rise_and_fall():
    rates = [schedule(step, 20) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1, 1] and rates == rates[::-1]
    assert schedule(0, 1) == 1
