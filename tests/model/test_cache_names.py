"""A transformers that hands caches on under another name than the model's code reads is refused, not misread."""

import pytest
from own_models import lossless_low_rank, tiny_source
from transformers.models.llama.modeling_llama import LlamaAttention


def test_caches_by_another_name_are_refused(monkeypatch):
    source = tiny_source("llama")
    lossless_low_rank(source)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, cache=None, **kwargs):
        raise AssertionError

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(ValueError, match=r"transformers below 5\.24"):
        lossless_low_rank(source)
