"""Peak and footprint are counted in live models."""

import pytest
from own_models import KINDS, tiny_source

from surgery.eval.kv_cache import GROWTH_STEPS, measure_kv
from surgery.eval.kv_flow import causal_entries, measure_footprint, measure_peak
from surgery.eval.tasks.kv_bytes import CHUNK, CONTEXTS, STEPS, KVBytesTask, by_context
from surgery.eval.variants.sink_window import sink_window

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_a_full_model_peaks_at_what_it_holds_and_computes_everything():
    model = tiny_source("llama")
    assert measure_peak(model, 20, 5) == measure_kv(model, 25).held_bytes
    assert measure_footprint(model, 20, 5) == 1.0


def test_a_sliding_window_is_counted_by_hand_and_chunks_peak_lower():
    model = tiny_source("mistral")
    window, tokens = model.config.sliding_window, 25
    records = causal_entries(window) + (tokens - window) * window
    assert measure_footprint(model, 20, 5) == records / causal_entries(tokens)
    # The whole prompt is in the layer that reads it first, windows in all that have read it.
    assert measure_peak(model, 20, 5) > measure_kv(model, 25).held_bytes
    assert measure_peak(model, 40, 2, chunk=8) < measure_peak(model, 40, 2)


def test_a_variant_is_seen_through():
    model = sink_window(tiny_source("llama"), 2, 4)
    records = causal_entries(6) + (25 - 6) * 6
    assert measure_footprint(model, 20, 5) == records / causal_entries(25)


class Alone:
    """A session of one process."""

    class processes:
        from_main = staticmethod(lambda function: function())


def test_the_task_measures_all_three():
    model = KINDS["hybrid"](tiny_source("llama"))
    result = KVBytesTask(40).run(model, Alone)
    steps = min(GROWTH_STEPS, 39)
    prompt = 40 - steps
    assert result["held_bytes"] == model.kv_cache_bytes(1, 40)
    assert result["peak_bytes"] == measure_peak(model, prompt, steps)
    assert result["chunked_peak_bytes"] == measure_peak(model, 40 - STEPS, STEPS, CHUNK)
    assert result["footprint"] == measure_footprint(model, 40 - STEPS, STEPS)
    assert list(result["by_context"]) == [str(tokens) for tokens in CONTEXTS]


def test_a_fault_in_a_forward_pass_is_not_hidden(monkeypatch):
    monkeypatch.setattr("surgery.eval.kv_flow.forward_with_cache", lambda *_: None.shape)
    with pytest.raises(AttributeError):
        measure_footprint(tiny_source("llama"), 20, 5)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_bytes_at_longer_contexts_are_by_the_formula_of_the_measured_ones(kind):
    source = tiny_source("llama")
    model = KINDS[kind](source) if kind else source
    result = by_context(model, measure_kv(model, 40))
    expected = model.kv_cache_bytes if kind else lambda batch, tokens: tokens * result["1024"] // 1024
    assert result == {str(tokens): expected(1, tokens) for tokens in (1024, 8192, 32_768, 131_072)}
