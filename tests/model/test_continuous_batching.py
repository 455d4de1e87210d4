"""transformers' continuous batching (`generate_batch`): fewer KV heads run, the custom model class refuses, stock MLA
fails."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import surgery  # noqa: F401  registers the custom model class with AutoModel

OLD = Path(__file__).resolve().parents[1] / "old_checkpoints"
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]


def loaded(kind):
    return AutoModelForCausalLM.from_pretrained(OLD / kind, dtype=torch.float32).eval()


def batched(model, **settings):
    """Results by prompt. By default its pages take most of the memory that is free."""
    pages = ContinuousBatchingConfig(num_blocks=8)
    files = model.generate_batch(PROMPTS, GenerationConfig(**settings), pages, progress_bar=False)
    return {tuple(each.prompt_ids): each for each in files.values()}


SAID = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}


@pytest.mark.slow  # torch compiles the pages
def test_fewer_heads_write_in_batches_what_they_write_alone():
    model = loaded("gqa")
    files = batched(model, **SAID)
    for prompt in PROMPTS:
        alone = model.generate(torch.tensor([prompt]), **SAID)[0, len(prompt) :].tolist()
        assert files[tuple(prompt)].generated_tokens == alone


@pytest.mark.slow
def test_stock_mla_fails_in_transformers():
    """Its pages are for as many heads as the config names, and the class caches one latent: docs/serving.md says so."""
    for each in batched(loaded("mla-stock"), **SAID).values():
        assert "index_copy_" in each.error and not each.generated_tokens


@pytest.mark.parametrize("kind", ["mla-own", "lowrank", "gqa-by-layer", "hybrid", "quantized"])
def test_the_custom_class_refuses_at_once(kind):
    with pytest.raises(ValueError, match="continuous batching is not supported, as its pages hold keys and values"):
        loaded(kind).generate_batch(PROMPTS, generation_config=GenerationConfig(max_new_tokens=2))


@pytest.mark.parametrize("kind", ["mla-own", "gqa-by-layer"])
def test_engines_that_bring_an_attention_of_their_own_are_refused(kind):
    """vLLM asks so where the plugin is missing."""
    with pytest.raises(ValueError, match="install model-surgery in vLLM's environment"):
        type(loaded(kind)).is_backend_compatible()
