"""Test of whether a model keeps attention inside the documents of a packed row, by running it."""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor, nn

from surgery.eval.logits import evaluation_mode

ROUNDING = 0.01
"""Largest error that counts as rounding, relative to the effect of attention across documents. A packed document runs
through kernels of other shapes than a single one. In bfloat16 the limit is 16 epsilon, which is more."""


@torch.no_grad()
def honours_document_masks(model: nn.Module, length: int = 128) -> bool:
    """Return whether `Batch.position_ids` suffice to keep a model's attention inside each document.

    Without an attention mask and a cache, transformers takes restarting position ids for a packed row. An attention
    that does not implement this ignores position ids, or refuses them. The test runs two documents of random tokens
    packed, and the second alone, whose outputs must agree up to rounding, relative to their difference when position
    ids do not restart. `length` is the training length: a sliding window shows only in longer rows.
    """
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    index = torch.arange(length, device=device)
    cut = length // 2
    positions = torch.where(index < cut, index, index - cut)[None]
    with evaluation_mode(model):
        alone = _states(model, tokens[:, cut:], index[None, : length - cut])
        try:
            packed = _states(model, tokens, positions)[:, cut:]
        except ValueError:
            return False
        joined = _states(model, tokens, index[None])[:, cut:]
    # The maximum, not the mean: a sliding window shows only in tokens beyond its length.
    error, leak = (packed - alone).abs().amax(-1), (joined - alone).abs().amax(-1).amax()
    dtype = next(model.parameters()).dtype
    return bool(leak > 0 and error.amax() <= max(ROUNDING, 16 * torch.finfo(dtype).eps) * leak)


def _states(model: nn.Module, tokens: LongTensor, positions: LongTensor) -> Tensor:
    """Return the body's hidden states in fp32, or the logits of a model without a separate body."""
    body = getattr(model, "base_model", model)
    output = body(input_ids=tokens, position_ids=positions, use_cache=False)
    states = getattr(output, "last_hidden_state", None)
    return (output.logits if states is None else states).float()
