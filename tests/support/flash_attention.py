"""Surrogate for FlashAttention: what its functions compute, in plain PyTorch, of the arguments that they take.

transformers' own code stands around it, so that masks, windows, packed rows and widths reach it as they would reach the
kernels. It refuses what the kernels refuse.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils

WIDEST = 256


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Attention of q [B, T, H, d] over k and v [B, S, G, d], aligned at the last token."""
    if not q.shape[-1] == k.shape[-1] == v.shape[-1] <= WIDEST or q.shape[2] % k.shape[2]:
        raise RuntimeError(f"FlashAttention takes heads of one width, not {q.shape}, {k.shape}, {v.shape}")
    k, v = (each.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for each in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    lag = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
    hidden = (lag < 0) & causal
    if window_size[0] >= 0:
        hidden = hidden | (lag > window_size[0])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Attend within sequences that stand one after the other: q [T, H, d], k and v [S, G, d]."""
    settings = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    parts = [
        [part[None] for part in each.split(ends.diff().tolist())]
        for each, ends in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    ]
    return torch.cat([flash_attn_func(*each, **settings)[0] for each in zip(*parts, strict=True)])


def install(monkeypatch) -> None:
    """Have transformers take the surrogate for FlashAttention, whatever is installed."""
    pads = modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input
    functions = (flash_attn_func, flash_attn_varlen_func, None, *pads)
    monkeypatch.setattr(modeling_flash_attention_utils, "_lazy_imports", lambda *_, **__: functions)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", _can_dispatch)


def _can_dispatch(model: PreTrainedModel, *_, **__) -> bool:
    if not model._supports_flash_attn:
        raise ValueError("transformers would refuse FlashAttention")
    return True
