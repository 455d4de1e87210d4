"""Compressed stores of the older tokens of a group of adjacent layers: in a shared basis, or merged in pairs.

Shapes: B batch, S stored tokens, W layers of the group, n elements of a token in one layer (keys, then values).

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .growing import append


class GroupStore:
    """Base class of a store of the tokens of all layers of a group.

    Every layer writes each block of tokens once, in the order of the layers. A block can be read after the last layer
    has written it.
    """

    reserved = 0
    """Tokens to allocate memory for at once."""
    _tensors: tuple[str, ...] = ()  # attributes that hold a tensor with the batch as first dimension, or None

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._pending: list[Tensor] = []
        self.reset()

    def settings(self) -> tuple:
        """Return the settings in which two stores must agree to be interchangeable."""
        return (type(self).__name__, self.layers)

    def write(self, index: int, tokens: Tensor) -> None:
        """Write a block [B, 1, n tokens, ·] of layer `index` of the group.

        Raises:
            ValueError: an earlier layer of the group has not written the block.
        """
        if index != len(self._pending):
            raise ValueError(f"layer {index} of a group wrote its tokens before layer {len(self._pending)}")
        self._pending.append(tokens)
        if len(self._pending) == self.layers:
            pending, self._pending = self._pending, []
            self._encode(pending)

    def read(self, index: int, start: int, stop: int) -> Tensor:
        """Read positions `start` to `stop` - 1 for layer `index` of the group, [B, 1, stop - start, ·]."""
        raise NotImplementedError

    def numbers(self, tokens: int, width: int) -> int:
        """Return the number of stored elements for `tokens` tokens of `width` elements per layer."""
        raise NotImplementedError

    def index_bytes(self, tokens: int) -> int:
        """Return the bytes of integer indices that are stored as well."""
        return 0

    def _encode(self, blocks: list[Tensor]) -> None:
        """Store one block of every layer."""
        raise NotImplementedError

    def reset(self) -> None:
        """Drop all tokens."""
        self._pending = []
        for name in self._tensors:
            setattr(self, name, None)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, which acts on dimension 0, to all tensors with a batch dimension."""
        self._pending = [change(tokens) for tokens in self._pending]
        for name in self._tensors:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def _append(self, name: str, tensor: Tensor, tokens: int, dim: int = -2) -> None:
        """Append the entries of `tokens` tokens to an attribute."""
        capacity = -(-self.reserved // tokens) * tensor.shape[dim]
        setattr(self, name, append(getattr(self, name), tensor, dim, capacity=capacity))


class SharedCodes(GroupStore):
    """Store of latents in a shared basis: the sum of all layers' contributions, read by each layer with its own matrix.

    Attributes:
        codes: latents [B, 1, S, r].
    """

    _tensors = ("codes",)

    def __init__(self, layers: int, rank: int) -> None:
        super().__init__(layers)
        self.rank = rank

    def settings(self) -> tuple:
        """Return layers and rank."""
        return *super().settings(), self.rank

    def numbers(self, tokens: int, width: int) -> int:
        """Return the stored elements: r per token."""
        return tokens * self.rank

    def write(self, index: int, tokens: Tensor) -> None:
        """Add a layer's contribution [B, 1, n tokens, r] to the latents of a block."""
        if index and len(self._pending) != 1:
            raise ValueError(f"layer {index} of a group wrote its tokens before layer 0")
        self._pending = [tokens if index == 0 else self._pending[0] + tokens]
        if index == self.layers - 1:
            codes = self._pending.pop()
            self._append("codes", codes, codes.shape[-2])

    def read(self, index: int, start: int, stop: int) -> Tensor:
        """Read the latents [B, 1, stop - start, r], the same for every layer."""
        return self.codes[..., start:stop, :]


class PromptBasis(GroupStore):
    """Store with a basis computed from the first block: xKV as published, Chang et al., arXiv:2503.18893, section 4.

    The stacked tokens [S, W·n] of a row are projected onto their leading right singular vectors, keys and values
    separately. The vectors are eigenvectors of the Gram matrix in fp64, which avoids an SVD as long as the text.

    Attributes:
        key_codes, value_codes: latents [B, 1, S, rank].
        key_up, value_up: bases [B, W, width, rank].
    """

    _tensors = ("key_codes", "value_codes", "key_up", "value_up")

    def __init__(self, layers: int, key_width: int, key_rank: int, value_rank: int) -> None:
        """Make an empty store; the first `key_width` elements of a token are keys."""
        super().__init__(layers)
        self.key_width, self.key_rank, self.value_rank = key_width, key_rank, value_rank

    def settings(self) -> tuple:
        """Return layers and ranks."""
        return *super().settings(), self.key_rank, self.value_rank

    def numbers(self, tokens: int, width: int) -> int:
        """Return the stored elements of latents and both bases; a matrix's dimensions limit its rank."""
        total = 0
        for side, rank in ((self.key_width, self.key_rank), (width - self.key_width, self.value_rank)):
            total += min(rank, tokens, self.layers * side) * (tokens + self.layers * side)
        return total

    def read(self, index: int, start: int, stop: int) -> Tensor:
        """Read rebuilt tokens [B, 1, stop - start, n]."""
        keys = self.key_codes[..., start:stop, :] @ self.key_up[:, None, index].mT
        values = self.value_codes[..., start:stop, :] @ self.value_up[:, None, index].mT
        return torch.cat([keys, values], dim=-1)

    def _encode(self, blocks: list[Tensor]) -> None:
        stacked = torch.stack(blocks, dim=2).squeeze(1)  # [B, W, S, n]
        keys, values = stacked[..., : self.key_width], stacked[..., self.key_width :]
        self.key_codes, self.key_up = _leading_basis(keys, self.key_rank)
        self.value_codes, self.value_up = _leading_basis(values, self.value_rank)


class MergedPairs(GroupStore):
    """Store of two layers merged into one direction: MiniCache, Liu et al., arXiv:2405.14366, section 4.

    For each KV head, keys and values separately, the unit vectors x and y of a token in the two layers become
    ``(sin((1-t)Ω) x + sin(tΩ) y) / sin Ω`` with Ω the angle between them (SLERP, eq. 3); each layer multiplies it by
    its own norm. The `kept` tokens of a block with the widest angles (mean over heads) are not merged. The paper uses a
    threshold between the least and the greatest angle instead; a fixed count makes the bytes predictable. RoPE
    preserves norms and angles, so merging before it is the same as after it.

    Attributes:
        directions: merged directions [B, 1, S, n].
        norms: [B, 1, S, 2 layers · 2G], keys of all heads, then values.
        exact: unmerged tokens [B, 2 layers, blocks · kept, n].
        exact_slots: positions of unmerged tokens, int32 [B, 2, blocks · kept], for keys and for values.
    """

    _tensors = ("directions", "norms", "exact", "exact_slots")

    def __init__(self, heads: int, key_width: int, block: int, kept: int, interpolation: float) -> None:
        """Make an empty store; `kept` tokens of each `block` stay unmerged, `interpolation` is t."""
        super().__init__(layers=2)
        self.heads, self.key_width, self.interpolation = heads, key_width, interpolation
        self.block, self.kept = block, min(kept, block)

    def settings(self) -> tuple:
        """Return layers, unmerged tokens and t."""
        return *super().settings(), self.kept, self.interpolation

    def numbers(self, tokens: int, width: int) -> int:
        """Return the stored elements: a direction per token, four norms per head, unmerged tokens of both layers."""
        return tokens * (width + 4 * self.heads) + tokens // self.block * self.kept * 2 * width

    def index_bytes(self, tokens: int) -> int:
        """Return the bytes of `exact_slots`."""
        return tokens // self.block * self.kept * 2 * torch.int32.itemsize

    def read(self, index: int, start: int, stop: int) -> Tensor:
        """Read tokens [B, 1, stop - start, n] of layer `index` of the group: its norms times shared directions."""
        parts = []
        norms = self.norms.chunk(2, dim=-1)[index].chunk(2, dim=-1)
        for half, span in enumerate(self._spans(self.directions.shape[-1])):
            direction = self.directions[..., span].unflatten(-1, (self.heads, -1))
            merged = (direction * norms[half].unsqueeze(-1)).flatten(-2)
            if self.kept:
                exact = self.exact[:, index, None, :, span]
                slots = self.exact_slots[:, None, half, :, None].long().expand_as(exact)
                merged = merged.scatter(2, slots, exact)
            parts.append(merged[..., start:stop, :])
        return torch.cat(parts, dim=-1)

    def _encode(self, blocks: list[Tensor]) -> None:
        tokens, width = blocks[0].shape[-2:]
        stored = 0 if self.directions is None else self.directions.shape[-2]
        directions, slots, exact = [], [], []
        norms: list[list[Tensor]] = [[], []]
        for span in self._spans(width):
            first, second = (block[..., span].unflatten(-1, (self.heads, -1)) for block in blocks)
            merged, angle = slerp(first, second, self.interpolation)
            directions.append(merged.flatten(-2))
            for layer, heads in enumerate((first, second)):
                norms[layer].append(heads.norm(dim=-1))
            widest = angle.mean(-1).squeeze(1).topk(self.kept, dim=-1).indices.sort(dim=-1).values  # [B, k]
            slots.append((stored + widest).int())
            index = widest[:, None, :, None]
            exact.append([b[..., span].gather(2, index.expand(-1, 1, -1, b[..., span].shape[-1])) for b in blocks])
        self._append("directions", torch.cat(directions, dim=-1), tokens)
        self._append("norms", torch.cat([*norms[0], *norms[1]], dim=-1), tokens)
        by_layer = [torch.cat(layers, dim=-1) for layers in zip(*exact, strict=True)]
        self._append("exact", torch.cat(by_layer, dim=1), tokens)
        self._append("exact_slots", torch.stack(slots, dim=1), tokens, dim=-1)

    def _spans(self, width: int) -> tuple[slice, slice]:
        return slice(0, self.key_width), slice(self.key_width, width)


def slerp(first: Tensor, second: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Interpolate the directions of vectors [..., d] spherically; return unit vectors [..., d] and angles [...] in rad.

    At an angle near 0 the result is the weighted mean of both. With a zero vector, as at padding, the angle is 0.
    """
    wide = torch.promote_types(first.dtype, torch.float32)
    x, y = (torch.nn.functional.normalize(v.to(wide), dim=-1) for v in (first, second))
    empty = ~(x.any(-1, keepdim=True) & y.any(-1, keepdim=True))
    angle = (x * y).sum(-1, keepdim=True).clamp(-1, 1).acos().masked_fill(empty, 0)
    sine = angle.sin()
    small = sine < 1e-4
    safe = sine.masked_fill(small, 1)
    first_weight = (((1 - t) * angle).sin() / safe).masked_fill(small, 1 - t)
    second_weight = ((t * angle).sin() / safe).masked_fill(small, t)
    return (first_weight * x + second_weight * y).to(first.dtype), angle.squeeze(-1)


def _leading_basis(layers: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Project tokens of W layers [B, W, S, d] onto a common basis [B, W, d, r]; return latents [B, 1, S, r] first."""
    _, count, tokens, dim = layers.shape
    stacked = layers.transpose(1, 2).flatten(2).double()  # [B, S, W·d]
    rank = min(rank, tokens, count * dim)
    basis = torch.linalg.eigh(stacked.mT @ stacked).eigenvectors[..., -rank:]
    codes = (stacked @ basis).to(layers.dtype)
    return codes[:, None], basis.to(layers.dtype).unflatten(1, (count, dim)).contiguous()
