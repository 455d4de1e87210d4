"""Greedy completions: the same as token by token, and found again where they were finished before."""

import dataclasses
import json
import logging
import warnings

import pytest
import torch
from sessions import Bars
from tiny_models import DEMO
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.common.errors import SurgeryError
from surgery.eval.generation import complete
from surgery.eval.session import Session
from surgery.eval.tasks.generate import GenerateTask
from surgery.running.processes import Processes

PROMPTS = [[1, 40, 7, 300], [1], [9, 9, 12], list(range(5, 30)), [1, 2, 77], [1, 55, 56, 57, 58, 3000], [800, 4000]]


@pytest.fixture
def model(checkpoints):
    return AutoModelForCausalLM.from_pretrained(checkpoints("llama"))


@pytest.fixture
def session(checkpoints):
    return Session(AutoTokenizer.from_pretrained(checkpoints("llama")), Processes(), Bars(), batch_size=3)


@torch.no_grad()
def greedy(model, prompt, new_tokens, eos):
    """One prompt, one token at a time, the whole context again for each."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        token = int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if token in eos:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def test_equals_greedy_decoding_of_each_prompt(model, session):
    completions = complete(model, session, PROMPTS, 12, "write")
    assert completions == [greedy(model, prompt, 12, {0}) for prompt in PROMPTS]
    assert len({tuple(completion) for completion in completions}) > 3
    assert session.progress.phases == [{"name": "write", "total": 7, "unit": "prompt", "done": 7}]


def test_batches_of_like_lengths(model, session, monkeypatch):
    sizes, generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda input_ids, **how: sizes.append(len(input_ids)) or generate(input_ids, **how)
    )
    complete(model, session, PROMPTS, 2, "write")
    assert sizes == [3, 3, 1]


def test_stops_before_any_eos(model, session):
    free = complete(model, session, PROMPTS, 12, "write")
    eos = {free[0][3], free[3][5]}
    model.generation_config.eos_token_id = sorted(eos)
    stopped = complete(model, session, PROMPTS, 12, "write")
    assert stopped == [greedy(model, prompt, 12, eos | {0}) for prompt in PROMPTS]
    assert len(stopped[0]) <= 3 and len(stopped[3]) <= 5

    model.generation_config.eos_token_id = None
    session.tokenizer.eos_token = session.tokenizer.convert_ids_to_tokens(free[0][3])
    assert complete(model, session, PROMPTS, 12, "write")[0] == greedy(model, PROMPTS[0], 12, {free[0][3]})


def test_ignores_the_sampling_of_the_checkpoint(model, session, caplog):
    expected = complete(model, session, PROMPTS, 12, "write")
    own = model.generation_config
    own.update(do_sample=True, temperature=5.0, top_k=3, repetition_penalty=1.9, num_beams=2, max_length=5)
    before = own.to_dict()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        assert complete(model, session, PROMPTS, 12, "write") == expected
    assert not caplog.records
    assert model.generation_config is own and own.to_dict() == before


def test_leaves_the_mode_of_the_model(model, session):
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    assert complete(model, session, PROMPTS, 6, "write") == [greedy(model.eval(), p, 6, {0}) for p in PROMPTS]
    model.train()
    complete(model, session, PROMPTS[:1], 1, "write")
    assert all(module.training for module in model.modules())


def test_goes_beyond_the_context_of_the_model_but_not_without_a_prompt(model, session):
    long = [1] + [5 + i % 90 for i in range(model.config.max_position_embeddings + 20)]
    assert complete(model, session, [long, [1, 2]], 3, "write") == [greedy(model, p, 3, {0}) for p in (long, [1, 2])]
    with pytest.raises(SurgeryError, match="prompt is empty"):
        complete(model, session, [[1], []], 3, "write")
    assert complete(model, session, [], 3, "write") == []


def test_writes_side_by_side():
    model, tokenizer = AutoModelForCausalLM.from_pretrained(DEMO), AutoTokenizer.from_pretrained(DEMO)
    task = GenerateTask(("import os\nimport ", "def __init__(self"), new_tokens=8)
    session = Session(tokenizer, Processes(), Bars())
    result = task.run(model, session)
    assert json.loads(json.dumps(result)) == result
    assert [completion["prompt"] for completion in result["completions"]] == list(task.prompts)
    ids = [[tokenizer.bos_token_id, *tokenizer(p, add_special_tokens=False).input_ids] for p in task.prompts]
    texts = [tokenizer.decode(each) for each in complete(model, session, ids, 8, "write")]
    assert [completion["text"] for completion in result["completions"]] == texts
    assert texts[1].startswith(","), "a model of Python goes on with its arguments"
    assert len(task.run(model, dataclasses.replace(session, limit=1))["completions"]) == 1
    assert task.settings() == {"prompts": list(task.prompts), "new_tokens": 8}
