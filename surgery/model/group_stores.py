"""Stores of a group of adjacent layers for tokens that are no longer exact: in a shared basis, or merged in pairs.

Shapes: B batch, S tokens stored, W layers of the group, n elements of a token in one layer (its keys, then its values).

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .growing import append


class GroupStore:
    """Tokens of all layers of a group.

    Every layer writes each block of tokens once, in the order of the layers; the block can be read when the last one
    has written.
    """

    reserved = 0
    """Tokens that memory is allocated for at once."""
    _kept: tuple[str, ...] = ()  # attributes that hold a tensor with the batch as first dimension, or None

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._pending: list[Tensor] = []
        self.reset()

    def settings(self) -> tuple:
        """Return the settings that two stores must share to be interchangeable."""
        return (type(self).__name__, self.layers)

    def write(self, place: int, tokens: Tensor) -> None:
        """Takes a block [B, 1, n tokens, ·] of the layer at `place`.

        Raises:
            ValueError: an earlier layer of the group has not written it.
        """
        if place != len(self._pending):
            raise ValueError(f"layer {place} of a group wrote its tokens where layer {len(self._pending)} was expected")
        self._pending.append(tokens)
        if len(self._pending) == self.layers:
            pending, self._pending = self._pending, []
            self._encode(pending)

    def read(self, place: int, start: int, stop: int) -> Tensor:
        """Positions `start` to `stop` - 1 for the layer at `place`, [B, 1, stop - start, ·]."""
        raise NotImplementedError

    def numbers(self, tokens: int, width: int) -> int:
        """Numbers kept of `tokens` tokens of `width` numbers in each layer, in the dtype of the tokens."""
        raise NotImplementedError

    def index_bytes(self, tokens: int) -> int:
        """Bytes kept beside those numbers."""
        return 0

    def _encode(self, blocks: list[Tensor]) -> None:
        """Stores one block of every layer."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forgets all tokens."""
        self._pending = []
        for name in self._kept:
            setattr(self, name, None)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on dimension 0, to everything kept for each row of the batch."""
        self._pending = [change(tokens) for tokens in self._pending]
        for name in self._kept:
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def _append(self, name: str, tensor: Tensor, tokens: int, dim: int = -2) -> None:
        """Adds entries that so many tokens have."""
        capacity = -(-self.reserved // tokens) * tensor.shape[dim]
        setattr(self, name, append(getattr(self, name), tensor, dim, capacity=capacity))


class SharedCodes(GroupStore):
    """Codes in one basis for the group: the sum of what its layers write, read by each through its own basis.

    Attributes:
        codes: [B, 1, S, r].
    """

    _kept = ("codes",)

    def __init__(self, layers: int, rank: int) -> None:
        super().__init__(layers)
        self.rank = rank

    def settings(self) -> tuple:
        """Layers and rank."""
        return *super().settings(), self.rank

    def numbers(self, tokens: int, width: int) -> int:
        """r of each token."""
        return tokens * self.rank

    def write(self, place: int, tokens: Tensor) -> None:
        """Takes a layer's share of the codes of a block [B, 1, n tokens, r]."""
        if place and len(self._pending) != 1:
            raise ValueError(f"layer {place} of a group wrote its tokens before the first one")
        self._pending = [tokens if place == 0 else self._pending[0] + tokens]
        if place == self.layers - 1:
            codes = self._pending.pop()
            self._append("codes", codes, codes.shape[-2])

    def read(self, place: int, start: int, stop: int) -> Tensor:
        """Codes [B, 1, stop - start, r], the same for every layer."""
        return self.codes[..., start:stop, :]


class PromptBasis(GroupStore):
    """A basis of the first block's own: xKV as published, Chang et al., arXiv:2503.18893, section 4.

    The stacked tokens [S, W·n] of a row are projected on their leading right singular vectors, keys and values apart.
    The vectors are those of the Gram matrix in fp64, which asks for no singular value decomposition as long as a text.

    Attributes:
        key_codes, value_codes: [B, 1, S, ranks].
        key_up, value_up: [B, W, width, ranks].
    """

    _kept = ("key_codes", "value_codes", "key_up", "value_up")

    def __init__(self, layers: int, key_width: int, key_rank: int, value_rank: int) -> None:
        """`key_width`: how many of a token's numbers are keys."""
        super().__init__(layers)
        self.key_width, self.key_rank, self.value_rank = key_width, key_rank, value_rank

    def settings(self) -> tuple:
        """Layers and ranks."""
        return *super().settings(), self.key_rank, self.value_rank

    def numbers(self, tokens: int, width: int) -> int:
        """Codes of each token, and the two bases; a rank cannot exceed what it is the rank of."""
        total = 0
        for side, rank in ((self.key_width, self.key_rank), (width - self.key_width, self.value_rank)):
            total += min(rank, tokens, self.layers * side) * (tokens + self.layers * side)
        return total

    def read(self, place: int, start: int, stop: int) -> Tensor:
        """Rebuilt tokens [B, 1, stop - start, n]."""
        keys = self.key_codes[..., start:stop, :] @ self.key_up[:, None, place].mT
        values = self.value_codes[..., start:stop, :] @ self.value_up[:, None, place].mT
        return torch.cat([keys, values], dim=-1)

    def _encode(self, blocks: list[Tensor]) -> None:
        stacked = torch.stack(blocks, dim=2).squeeze(1)  # [B, W, S, n]
        keys, values = stacked[..., : self.key_width], stacked[..., self.key_width :]
        self.key_codes, self.key_up = _leading(keys, self.key_rank)
        self.value_codes, self.value_up = _leading(values, self.value_rank)


class MergedPairs(GroupStore):
    """Two layers merged into one direction: MiniCache, Liu et al., arXiv:2405.14366, section 4.

    For each KV head, keys and values apart, the unit vectors x and y of a token in the two layers become
    ``(sin((1-t)Ω) x + sin(tΩ) y) / sin Ω`` with Ω the angle between them (SLERP, eq. 3); each layer multiplies it by
    its own norm. The tokens of a block with the widest angles (mean over heads) are kept as they were: a fixed share,
    where the paper takes those above a threshold between least and greatest angle, so that the bytes can be foretold.
    Rotation leaves norms and angles as they are, so merging before it is the same as after it.

    Attributes:
        directions: [B, 1, S, n].
        norms: [B, 1, S, 2 layers · 2G], keys of all heads, then values.
        exact: [B, 2 layers, blocks · kept, n], the tokens with the widest angles.
        exact_slots: int32 [B, 2, blocks · kept], for keys and for values.
    """

    _kept = ("directions", "norms", "exact", "exact_slots")

    def __init__(self, heads: int, key_width: int, block: int, kept: int, interpolation: float) -> None:
        """`kept`: tokens of each `block` that are not merged; `interpolation`: t, the later layer's share."""
        super().__init__(layers=2)
        self.heads, self.key_width, self.interpolation = heads, key_width, interpolation
        self.block, self.kept = block, min(kept, block)

    def settings(self) -> tuple:
        """Layers, tokens kept, t."""
        return *super().settings(), self.kept, self.interpolation

    def numbers(self, tokens: int, width: int) -> int:
        """A direction and four norms per head of each token; both layers' numbers of those that are not merged."""
        return tokens * (width + 4 * self.heads) + tokens // self.block * self.kept * 2 * width

    def index_bytes(self, tokens: int) -> int:
        """Positions of the tokens that are not merged, for keys and for values."""
        return tokens // self.block * self.kept * 2 * torch.int32.itemsize

    def read(self, place: int, start: int, stop: int) -> Tensor:
        """Tokens [B, 1, stop - start, n] of the layer at `place`: its norms, the shared directions."""
        parts = []
        norms = self.norms.chunk(2, dim=-1)[place].chunk(2, dim=-1)
        for index, span in enumerate(self._spans(self.directions.shape[-1])):
            direction = self.directions[..., span].unflatten(-1, (self.heads, -1))
            merged = (direction * norms[index].unsqueeze(-1)).flatten(-2)
            if self.kept:
                exact = self.exact[:, place, None, :, span]
                slots = self.exact_slots[:, None, index, :, None].long().expand_as(exact)
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
        of_layers = [torch.cat(layers, dim=-1) for layers in zip(*exact, strict=True)]
        self._append("exact", torch.cat(of_layers, dim=1), tokens)
        self._append("exact_slots", torch.stack(slots, dim=1), tokens, dim=-1)

    def _spans(self, width: int) -> tuple[slice, slice]:
        return slice(0, self.key_width), slice(self.key_width, width)


def slerp(first: Tensor, second: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """Spherical interpolation of the directions of two vectors [..., d]: unit vector [..., d] and angle [...], in rad.

    Where the angle vanishes the result is the weighted mean of both. A zero vector, as padding is, makes no angle.
    """
    wide = torch.promote_types(first.dtype, torch.float32)
    x, y = (torch.nn.functional.normalize(v.to(wide), dim=-1) for v in (first, second))
    empty = ~(x.any(-1, keepdim=True) & y.any(-1, keepdim=True))
    angle = (x * y).sum(-1, keepdim=True).clamp(-1, 1).acos().masked_fill(empty, 0)
    sine = angle.sin()
    small = sine < 1e-4
    safe = sine.masked_fill(small, 1)
    before = (((1 - t) * angle).sin() / safe).masked_fill(small, 1 - t)
    after = ((t * angle).sin() / safe).masked_fill(small, t)
    return (before * x + after * y).to(first.dtype), angle.squeeze(-1)


def _leading(layers: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens of W layers [B, W, S, d] in their leading common basis: codes [B, 1, S, r] and up [B, W, d, r]."""
    _, count, tokens, dim = layers.shape
    stacked = layers.transpose(1, 2).flatten(2).double()  # [B, S, W·d]
    rank = min(rank, tokens, count * dim)
    basis = torch.linalg.eigh(stacked.mT @ stacked).eigenvectors[..., -rank:]
    codes = (stacked @ basis).to(layers.dtype)
    return codes[:, None], basis.to(layers.dtype).unflatten(1, (count, dim)).contiguous()
