import json

import pytest
import torch
from measures import refuse_above
from tiny_models import CONFIGS
from torch import nn
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.kv_cache import random_tokens
from surgery.eval.session import Session
from surgery.eval.tasks.speed import SpeedTask, measure_speed
from surgery.model.cache_argument import CACHE
from surgery.running.processes import Processes

SESSION = Session(None, Processes(cpu=True), Progress(silent=True), seed=5)


def tiny(family: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[family]())


def record(model: nn.Module) -> list:
    """The tokens of every pass and the tokens that were cached before it."""
    passes, forward = [], model.forward

    def recorded(input_ids, **rest):
        cache = rest.get(CACHE)
        passes.append((input_ids, 0 if cache is None else cache.get_seq_length()))
        return forward(input_ids=input_ids, **rest)

    model.forward = recorded
    return passes


def test_every_run_prefills_once_and_decodes_greedily():
    model = tiny().train()
    reference = tiny().eval()
    passes = record(model)
    point = measure_speed(model, context=10, batch=2, new_tokens=4, repeats=3, seed=5)
    assert len(passes) == (1 + 3) * (1 + 4)  # a run to warm up
    assert model.training, "it is left as it came"
    prompt = random_tokens(model, 2, 10, seed=5)
    expected = reference.generate(prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    for run in range(4):
        tokens, cached = zip(*passes[5 * run : 5 * run + 5], strict=True)
        assert cached == (0, 10, 11, 12, 13)
        assert torch.equal(torch.cat(tokens, dim=1), expected)
    assert len(point["prefill_seconds"]) == len(point["decode_seconds"]) == 3
    median = sorted(point["decode_seconds"])[1]
    assert point["decode_tokens_per_second"] == 2 * 4 / median
    assert point["prefill_tokens_per_second"] == 2 * 10 / sorted(point["prefill_seconds"])[1]


@pytest.mark.parametrize("family", ["mistral_window", "mixtral"])
def test_the_task_gives_plain_values(family):
    task = SpeedTask((240, 8), batches=(2, 1), new_tokens=17, repeats=1)
    result = task.run(tiny(family), SESSION)
    assert json.loads(json.dumps(result)) == result
    assert [(point["context"], point["batch"]) for point in result["points"]] == [(8, 1), (8, 2), (240, 1), (240, 2)]
    assert [point["note"] for point in result["points"]] == [None] * 2 + ["beyond the model's 256 positions"] * 2
    assert (result["dtype"], result["device"], result["repeats"]) == ("float32", "cpu", 1)
    assert result["threads"] == torch.get_num_threads()
    assert task.settings() == {"contexts": [8, 240], "batches": [1, 2], "new_tokens": 17, "repeats": 1}


def test_points_that_do_not_fit_are_noted_and_larger_ones_not_tried():
    model = tiny()
    refuse_above(model, 64, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    passes = record(model)
    result = SpeedTask((16, 32, 64), batches=(1, 4), new_tokens=2, repeats=1).run(model, SESSION)
    notes = {(point["context"], point["batch"]): point["note"] for point in result["points"]}
    assert notes[16, 1] is notes[16, 4] is notes[32, 1] is notes[64, 1] is None
    assert notes[32, 4] == "out of memory"
    assert notes[64, 4] == "not tried: out of memory at 4 x 32 tokens"
    assert max(tokens.numel() for tokens, _ in passes) == 4 * 32
    refused = next(point for point in result["points"] if point["note"] == "out of memory")
    assert refused["decode_tokens_per_second"] is None
    assert json.loads(json.dumps(result)) == result


@pytest.mark.parametrize(
    "arguments",
    [{"contexts": ()}, {"contexts": (0,)}, {"contexts": (8,), "batches": ()}, {"contexts": (8,), "new_tokens": 0}],
)
def test_impossible_requests(arguments):
    with pytest.raises(SurgeryError, match="no number below 1"):
        SpeedTask(**arguments)
