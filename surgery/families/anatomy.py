"""Family-neutral attention layer that every transform works on.

Shapes: ``H`` query heads, ``G`` key/value heads, ``d`` head dimension of queries and keys, ``e`` head dimension of
values, ``D`` hidden size. Query head ``h`` reads key/value head ``h // (H // G)``.

Convention for every checkpoint: a rotary pair is ``(i, i + d/2)``, read as the complex number
``x[i] + 1j * x[i + d/2]`` that position ``m`` multiplies by ``exp(1j * inv_freq[i] * m)``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from surgery.families.softmax import Softmax

if TYPE_CHECKING:
    from typing_extensions import Self


STILL = ("inv_freq", "order")
"""Fields that :func:`moved` leaves on their device and in their dtype."""

Made = TypeVar("Made")


def moved(instance: Made, *args, **kwargs) -> Made:
    """Copy a dataclass, with every field that has a ``to`` method moved or cast, as :meth:`torch.Tensor.to`."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance) if field.name not in STILL}
    return replace(instance, **{name: each.to(*args, **kwargs) for name, each in values.items() if hasattr(each, "to")})


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm per head, or over all heads together: ``weight * x / sqrt(mean(x**2) + eps)``."""

    weight: Tensor  # [d], or [heads, d] for a norm over all heads
    eps: float

    def to(self, *args, **kwargs) -> HeadNorm:
        """Return a copy whose weight is moved or cast."""
        return moved(self, *args, **kwargs)

    @property
    def joint(self) -> bool:
        """True if one mean is taken over all heads."""
        return self.weight.ndim == 2

    def gain(self, x: Tensor) -> Tensor:
        """Compute the inverse RMS [..., heads] of head vectors ``x`` [..., heads, d]."""
        mean = x.square().mean((-2, -1) if self.joint else -1, keepdim=self.joint)
        gain = (mean + self.eps).rsqrt()
        return gain[..., 0].expand(x.shape[:-1]) if self.joint else gain

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize head vectors [..., heads, d]."""
        return x * self.gain(x)[..., None] * self.weight


@dataclass(frozen=True)
class Projection:
    """Queries, keys and values of an attention layer before RoPE; ``...`` stands for batch and sequence.

    With a key norm the key is ``k * key_gain[..., None]``: ``k`` includes the norm's weight and ``key_gain`` is the
    inverse RMS. ``k`` is then linear in the input, so a latent can hold it. ``key_gain`` multiplies whole logits,
    which is exact: a layer that does not cache keys has no other way to keep a key norm.
    """

    q: Tensor  # [..., H, d], after the query norm
    k: Tensor  # [..., G, d], linear (affine) in the input
    v: Tensor  # [..., G, e]
    key_gain: Tensor | None  # [..., G]


@dataclass(frozen=True, kw_only=True)
class LayerAnatomy:
    """Base class of attention anatomies: softmax, output gate, device and dtype."""

    PROJECTIONS: ClassVar[tuple[tuple[str, str], ...]]
    """Pairs of a weight's field and its module name in checkpoints."""

    scale: float  # multiplies q.k before the softmax
    softcap: float | None = None  # cap of the logits, see `Softmax`
    sinks: Tensor | None = None  # [H], learned sink logits, see `Softmax`
    gate: Tensor | None = None  # [H, e, D], output gate: sigmoid(gate x + gate_bias) multiplies each head's output
    gate_bias: Tensor | None = None  # [H, e]

    @property
    def softmax(self) -> Softmax:
        """Softmax of the layer: scale, cap and sinks."""
        return Softmax(self.scale, self.softcap, self.sinks)

    def open_gate(self, x: Tensor) -> Tensor | None:
        """Compute the gate values [..., H, e] from inputs ``x`` [..., D]; None without a gate."""
        return None if self.gate is None else _heads(x, self.gate, self.gate_bias).sigmoid()

    def gated(self, attn_output: Tensor, x: Tensor) -> Tensor:
        """Return the input of the output projection, [..., H, e]: the heads' outputs times the gate, if any."""
        return attn_output if self.gate is None else attn_output * self.open_gate(x)

    def to(self, *args, **kwargs) -> Self:
        """Return a copy with every tensor but ``inv_freq`` and ``order`` moved or cast, as :meth:`torch.Tensor.to`."""
        return moved(self, *args, **kwargs)

    def shapes(self) -> Self:
        """Return a copy whose projections are on the meta device: shapes and dtypes without data."""
        weights = {field: getattr(self, field) for field, _ in self.PROJECTIONS}
        return replace(self, **{field: weight.to("meta") for field, weight in weights.items() if weight is not None})

    def damaged(self) -> str | None:
        """Return the checkpoint's name of a projection with NaN or infinity; None if all are finite."""
        for field, name in self.PROJECTIONS:
            weight = getattr(self, field)
            if weight is not None and not weight.isfinite().all():
                return name
        return None


@dataclass(frozen=True)
class AttentionAnatomy(LayerAnatomy):
    """One attention layer: weights, norms, rotary frequencies and softmax scale. Tensors share dtype and device."""

    PROJECTIONS = (("q", "q_proj"), ("gate", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "o_proj"))

    q: Tensor  # [H, d, D]
    k: Tensor  # [G, d, D]
    v: Tensor  # [G, e, D]
    o: Tensor  # [D, H, e]
    inv_freq: Tensor  # [d/2], float64, radians per token
    q_bias: Tensor | None = None  # [H, d]
    k_bias: Tensor | None = None  # [G, d]
    v_bias: Tensor | None = None  # [G, e]
    o_bias: Tensor | None = None  # [D]
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    window: int | None = None  # sliding window in tokens, the query's included; None: full attention
    order: Tensor | None = None  # [d], checkpoint row of each query or key row; None: same order
    rope_factor: float = 1.0  # RoPE's factor on queries and keys (YaRN); its square is in `scale`
    partial_factor: float = 1.0  # `rope_factor` under partial rotation (Phi-4-mini); its square is in `q`

    @property
    def heads(self) -> int:
        return self.q.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    @property
    def head_dim(self) -> int:
        return self.q.shape[1]

    @property
    def value_dim(self) -> int:
        return self.v.shape[1]

    @property
    def hidden(self) -> int:
        return self.q.shape[2]

    @property
    def key_gains(self) -> int:
        """Key-norm gains per token: 0 without a key norm, 1 for a norm over all heads, else one per KV head."""
        return 0 if self.k_norm is None else 1 if self.k_norm.joint else self.kv_heads

    @property
    def kv_width(self) -> int:
        """Elements that the layer caches per token."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def stored(self, heads: Tensor) -> Tensor:
        """Reorder rows of queries or keys, [heads, d] or [heads, d, ...], to the checkpoint's order."""
        return heads if self.order is None else heads[:, self.order.argsort().to(heads.device)]

    def with_scaled_queries(self, factor: float) -> AttentionAnatomy:
        """Return a copy whose rotated query rows are multiplied by a factor."""
        rows = torch.where(self.inv_freq > 0, factor, 1.0).repeat(2).to(self.q)
        bias = None if self.q_bias is None else self.q_bias * rows
        return replace(self, q=self.q * rows[:, None], q_bias=bias)

    def stored_queries(self) -> tuple[Tensor, Tensor | None]:
        """Return the checkpoint's query projection [H d, D] and bias [H d]; twice the rows with gates after heads."""
        if self.partial_factor != 1.0:
            plain = self.with_scaled_queries(self.partial_factor**-2)
            return replace(plain, partial_factor=1.0).stored_queries()
        weight, bias = self.stored(self.q), None if self.q_bias is None else self.stored(self.q_bias)
        if self.gate is not None:
            weight = torch.cat([weight, self.gate], dim=1)
            bias = None if bias is None else torch.cat([bias, self.gate_bias], dim=1)
        return weight.flatten(0, 1), None if bias is None else bias.flatten()

    def key_weight(self) -> tuple[Tensor, Tensor | None]:
        """Return weight [G, d, D] and bias [G, d] of :attr:`Projection.k`, times the key norm's weight, if any."""
        if self.k_norm is None:
            return self.k, self.k_bias
        weight = self.k_norm.weight
        bias = None if self.k_bias is None else self.k_bias * weight
        return self.k * weight[..., None], bias

    def project(self, x: Tensor) -> Projection:
        """Project inputs ``x`` [..., D] to queries, keys and values."""
        q = _heads(x, self.q, self.q_bias)
        k = _heads(x, self.k, self.k_bias)
        v = _heads(x, self.v, self.v_bias)
        if self.q_norm is not None:
            q = self.q_norm(q)
        gain = None
        if self.k_norm is not None:
            gain = self.k_norm.gain(k)
            k = k * self.k_norm.weight
        return Projection(q, k, v, gain)

    def project_queries(self, x: Tensor) -> Tensor:
        """Project inputs to queries alone, [..., H, d]."""
        q = _heads(x, self.q, self.q_bias)
        return q if self.q_norm is None else self.q_norm(q)

    def project_key_gain(self, x: Tensor) -> Tensor | None:
        """Compute :attr:`Projection.key_gain` alone, [..., G]."""
        if self.k_norm is None:
            return None
        return self.k_norm.gain(_heads(x, self.k, self.k_bias))


def _heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    heads, dim, _ = weight.shape
    flat = torch.nn.functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return flat.unflatten(-1, (heads, dim))
