import torch
from tiny_models import CONFIGS
from torch import nn
from transformers import AutoModelForCausalLM

from surgery.eval.memory import OutOfMemory, free_memory, unless_out_of_memory
from surgery.eval.tensor_bytes import weight_bytes


def tiny(family: str) -> nn.Module:
    return AutoModelForCausalLM.from_config(CONFIGS[family]())


def test_weights_are_counted_once_and_in_their_own_dtype():
    tied, untied = tiny("llama"), tiny("mistral")
    embedding = 4096 * 32 * 4
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    buffers = sum(buffer.nbytes for buffer in tied.buffers())
    assert weight_bytes(tied) == sum(parameter.nbytes for parameter in tied.parameters()) + buffers
    assert weight_bytes(untied) == weight_bytes(tied) + embedding
    assert weight_bytes(nn.Linear(8, 4).to(torch.bfloat16)) == (8 * 4 + 4) * 2


def test_the_cache_of_any_accelerator_is_emptied(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append("mps"))
    free_memory()
    assert emptied == ["mps"]


def test_a_real_refusal_of_the_allocator_is_told():
    assert isinstance(unless_out_of_memory(lambda: torch.empty(1 << 60, dtype=torch.uint8)), OutOfMemory)
    assert unless_out_of_memory(lambda: 3) == 3
