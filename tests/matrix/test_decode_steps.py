"""Steps of decoding never wait for the device, copy no constants to it, and leave caches where they are in memory."""

import pytest
import torch
from no_host_sync import NoHostSync
from own_models import tokens
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from written_models import IMAGES, QUICK, WRITTEN

from surgery.acceleration import accelerate
from surgery.kernels import operation

pytestmark = pytest.mark.usefixtures("no_gradients")

PROMPT, STEPS = 7, 4
"""Enough for windows to move, and for a block of 4 and a group of 8 after a window to become full."""


def fill(model: PreTrainedModel, padded: bool, cache: Cache) -> list[dict[str, torch.Tensor | None]]:
    """Read a prompt; arguments of the steps after it."""
    ids = tokens(length=PROMPT + STEPS)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT] if padded else None, past_key_values=cache)
    return [
        {"input_ids": ids[:, at : at + 1], "attention_mask": mask[:, : at + 1] if padded else None}
        for at in range(PROMPT, PROMPT + STEPS)
    ]


def reserved(model: PreTrainedModel) -> Cache:
    """A cache with memory for the whole text."""
    if hasattr(model, "reserved_cache"):
        return model.reserved_cache(PROMPT + STEPS)
    return StaticCache(config=model.config, max_cache_len=PROMPT + STEPS)


CASES = [
    pytest.param(name, padded, marks=[] if name in QUICK or padded else [pytest.mark.slow])
    for name in WRITTEN
    for padded in (True, False)
]


@pytest.mark.parametrize(("name", "padded"), CASES)
def test_steps_never_wait_for_the_device_and_move_no_cache(name, padded):
    """Nothing that was there after the prompt moves, and steps read what they read in a cache that grows."""
    model = WRITTEN[name]()
    cache, growing = reserved(model), DynamicCache(config=model.config)
    steps, _ = fill(model, padded, cache), fill(model, padded, growing)
    values = addresses(cache)
    for step in steps:
        with NoHostSync(allow_transformers=padded or name == IMAGES):
            logits, expected = (model(**step, past_key_values=each).logits for each in (cache, growing))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        now = addresses(cache)
        assert not {path for path in values.keys() & now.keys() if values[path] != now[path]}
        values |= now


WITHOUT_KERNELS = (IMAGES, "grouped", "quantized_plain", "fewer_heads")
"""A class that takes no attention functions, and plain heads."""
KERNELS = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in WRITTEN
    if name not in WITHOUT_KERNELS
]


@pytest.mark.parametrize("name", KERNELS)
def test_steps_on_kernels_never_wait_for_the_device(name, monkeypatch):
    """Put around the kernels what `accelerate` does; their references run instead."""
    monkeypatch.setattr(operation, "refusal", lambda *tensors: "a test")
    model = WRITTEN[name]()
    cache, growing = reserved(model), DynamicCache(config=model.config)
    steps, _ = fill(model, True, cache), fill(model, True, growing)
    assert accelerate(model, compare=False).layers
    for step in steps:
        with NoHostSync(allow_transformers=True):
            model(**step, past_key_values=cache)
            model(**step, past_key_values=growing)


def addresses(value: object, path: str = "", records: set[int] | None = None) -> dict[str, int]:
    """Map the attributes that lead to a cache's tensors to their addresses in memory; empty ones have none."""
    records = set() if records is None else records
    if isinstance(value, torch.Tensor):
        return {path: value.data_ptr()} if value.numel() else {}
    if id(value) in records or isinstance(value, torch.nn.Module | type):
        return {}
    records.add(id(value))
    children = enumerate(value) if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).items()
    return {key: at for name, child in children for key, at in addresses(child, f"{path}.{name}", records).items()}
