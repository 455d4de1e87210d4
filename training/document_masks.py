"""Does a model keep attention inside the documents of a packed row? It is asked, not guessed from its class."""

from __future__ import annotations

import torch
from torch import LongTensor, Tensor, nn

from surgery.eval.logits import evaluation_mode

ROUNDING = 0.01
"""Largest part of the difference that attention across documents makes, that still counts as rounding: packed and
alone, a document goes through kernels of other shapes. In bfloat16, 16 units of its last place, which is more."""


@torch.no_grad()
def honours_document_masks(model: nn.Module, length: int = 128) -> bool:
    """Return whether `Batch.position_ids` are enough for a model to see every document alone.

    transformers takes positions that restart for a packed row and masks what is before, where there is neither an
    attention mask nor a cache. An attention that knows no such rule may ignore positions altogether, or refuse them, as
    layers that share a cache do. Two documents of random tokens are run packed and the second alone. The outputs of the
    second must be equal but for rounding, measured by how far they are from equal when nothing says that there are two
    documents.

    Args:
        model: any causal model, before it is wrapped or sharded.
        length: tokens of the row that is tried, at least 4; take the length that is trained on, since a window shows
            only in rows longer than it.
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
    # At their worst: a window shows only in tokens further on than it is long.
    error, leak = (packed - alone).abs().amax(-1), (joined - alone).abs().amax(-1).amax()
    dtype = next(model.parameters()).dtype
    return bool(leak > 0 and error.amax() <= max(ROUNDING, 16 * torch.finfo(dtype).eps) * leak)


def _states(model: nn.Module, tokens: LongTensor, positions: LongTensor) -> Tensor:
    """Return the outputs of the model's body, or of the whole where it has none, in fp32."""
    body = getattr(model, "base_model", model)
    output = body(input_ids=tokens, position_ids=positions, use_cache=False)
    states = getattr(output, "last_hidden_state", None)
    return (output.logits if states is None else states).float()
