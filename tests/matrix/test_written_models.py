"""The registry of models that matrices run over follows the registries of kinds and formats."""

import pytest
import torch
from own_models import KINDS
from written_models import WRITTEN, inputs

from surgery.model.configuration_surgery import _KV_CACHE_OPTIONS, SurgeryConfig
from surgery.model.parts import KINDS as ENTRY_KINDS
from surgery.model.quantization import BITS


@pytest.fixture(scope="module")
def configs() -> list[SurgeryConfig]:
    """Configurations of all models of the custom class."""
    every = [make().config.get_text_config() for make in WRITTEN.values()]
    return [config for config in every if getattr(config, "attention_layers", None)]


def entries_of(configs: list[SurgeryConfig]) -> list[dict]:
    return [entry for config in configs for entry in config.attention_layers if entry]


def caches_of(configs: list[SurgeryConfig]) -> list[dict]:
    return [cache for config in configs for layer in range(2) if (cache := config.kv_cache_of(layer))]


def test_every_kind_of_attention_has_a_model(configs):
    assert {entry["kind"] for entry in entries_of(configs)} == set(ENTRY_KINDS)
    assert KINDS.keys() <= WRITTEN.keys()


def test_every_format_and_option_of_a_cache_has_a_model(configs):
    caches, entries = caches_of(configs), entries_of(configs)
    spans = [format for entry in entries for format, _ in entry.get("codes", ())]
    assert {cache["format"] for cache in caches} | set(spans) == set(BITS)
    assert set().union(*caches) >= _KV_CACHE_OPTIONS
    assert any(entry.get("streaming") for entry in entries) and any(entry.get("window") for entry in entries)


@pytest.mark.parametrize("name", WRITTEN)
def test_outputs_depend_on_every_parameter(name):
    """`--train all`: each parameter has a gradient."""
    model = WRITTEN[name]().train()
    model(**inputs(name), use_cache=False).logits.square().mean().backward()
    assert [key for key, parameter in model.named_parameters() if not _has_gradient(parameter)] == []


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any()) and bool(parameter.grad.isfinite().all())
