"""Healing on a GPU queues its work: no microbatch makes the host wait for the device."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from device_checks import on_device
from no_host_sync import NoHostSync
from own_models import KINDS, tiny_source
from training_data import packed_batch

from surgery.training.chunks import States
from surgery.training.data import IGNORED
from surgery.training.distillation import Body, Distillation
from surgery.training.objectives import PARTS, ObjectiveWeights
from surgery.training.top_k import top_k

LENGTH = 16


@pytest.fixture(scope="module")
def models():
    with torch.no_grad():
        source = tiny_source("llama")
        return source, KINDS["latent"](source).requires_grad_(True)


@pytest.mark.parametrize(("custom_class", "document_masks"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("part", PARTS)
def test_a_microbatch_does_not_wait(models, part, custom_class, document_masks):
    teacher, student = models
    student = student if custom_class else deepcopy(teacher).requires_grad_(True)
    weights = ObjectiveWeights(**{"kl": 0.0, part: 1.0})
    module = Distillation(student, weights, teacher, document_masks=document_masks).train()
    data = packed_batch()
    with NoHostSync():
        loss, parts = module(data.to("cpu"), float(data.predicted))
        loss.backward()
    assert loss.isfinite() and parts[part] == loss
    assert any(each.grad is not None for each in student.parameters())


def test_a_microbatch_stays_on_its_device():
    on_device("microbatches")


def test_kept_logits_do_not_wait_either(models):
    teacher, student = models
    data = packed_batch()
    body = Body.of(teacher)
    with torch.no_grad():
        top = top_k(States(body.states(data.tokens, None)[:, :-1].flatten(0, 1), body.head()), 8)
    grid = top.map(lambda tensor: tensor.unflatten(0, (2, LENGTH - 1)))
    module = Distillation(student, ObjectiveWeights()).train()
    with NoHostSync():
        loss, _ = module(data, float(data.predicted), grid)
        loss.backward()
    flat = data.predicting - data.predicting // LENGTH
    assert torch.equal(grid.ids[data.predicting // LENGTH, data.predicting % LENGTH], top.ids[flat])


@pytest.mark.parametrize("custom_class", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_documents_that_the_host_knows_make_the_same_states(models, custom_class, packed):
    body, data = Body.of(models[custom_class]), packed_batch()
    positions = data.position_ids if packed else torch.arange(LENGTH)[None]
    spans = data.spans if packed else [[slice(0, LENGTH)]] * 2
    with torch.no_grad():
        queries, reference = (body.states(data.tokens, positions, each) for each in (None, spans))
    assert torch.equal(queries, reference)


def test_a_batch_knows_where_its_documents_are_and_where_it_predicts():
    documents = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 2]])
    data = replace(packed_batch(), documents=documents, spans=None)
    assert data.spans == ((slice(0, 4),), (slice(0, 1), slice(1, 3), slice(3, 4))) and data.packed
    assert not replace(data, documents=documents[:1], spans=None).packed
    data = packed_batch()
    entries = (data.labels[:, 1:] != IGNORED).flatten()
    assert data.predicted == int(entries.sum()) and data.packed
    assert torch.equal(data.tokens.flatten()[data.predicting + 1], data.labels[:, 1:].flatten()[entries])
    nothing = replace(data, labels=torch.full_like(data.labels, IGNORED), predicting=None)
    assert nothing.predicted == 0 and nothing.to("cpu").predicted == 0
