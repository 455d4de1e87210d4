"""transformers' continuous batching (`generate_batch`): fewer KV heads run, the own class refuses."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import surgery  # noqa: F401  makes AutoModel know the own class

OLD = Path(__file__).resolve().parents[1] / "old_checkpoints"
PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]


def loaded(kind):
    return AutoModelForCausalLM.from_pretrained(OLD / kind, dtype=torch.float32).eval()


@pytest.mark.slow  # torch compiles the pages
def test_fewer_heads_write_in_batches_what_they_write_alone():
    model = loaded("gqa")
    said = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    batch = model.generate_batch(PROMPTS, generation_config=GenerationConfig(**said), progress_bar=False)
    written = {tuple(each.prompt_ids): each.generated_tokens for each in batch.values()}
    for prompt in PROMPTS:
        alone = model.generate(torch.tensor([prompt]), **said)[0, len(prompt) :].tolist()
        assert written[tuple(prompt)] == alone


@pytest.mark.parametrize("kind", ["mla-own", "lowrank", "gqa-by-layer", "hybrid", "quantized", "xkv"])
def test_the_own_class_refuses_at_once(kind):
    with pytest.raises(ValueError, match="continuous batching keeps keys and values of one shape in pages"):
        loaded(kind).generate_batch(PROMPTS, generation_config=GenerationConfig(max_new_tokens=2))
