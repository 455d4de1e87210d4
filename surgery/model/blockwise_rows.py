"""CPU attention of few queries over a cache of packed rows, block by block.

Decoding reads the whole cache for one token. Unpacking it at once would write and reread a copy many times its size.
Here one block of tokens at a time is unpacked into a small reused buffer and multiplied by the queries, with the online
softmax of FlashAttention (arXiv:2205.14135). All in fp32.

Columns of the buffer are bit fields: the first fields of all bytes of a section, then the second ones, and so on. One
shift and one mask then unpack many runs at once. Steps and means of latents are folded into queries and outputs. Shared
keys are dequantized and rotated by their position within the block; queries are rotated back by the block's position.
If values are read from the shared keys too, the buffer also has the keys before their rotation.

Shapes: B batch, T new tokens, S tokens in the cache, n tokens of a block, r rank, ρ width of the shared key.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from .token_format import PATTERNS, Runs, TokenFormat
from .token_quantizer import TokenQuantizer

BLOCK = 1280
"""Most tokens of a block: enough for matrix products at full speed, with a buffer that stays in the L2 cache."""
MOST_QUERIES = 16
"""Most query tokens; for more, unpacking the cache at once is faster."""

_workspace = threading.local()


class _Section:
    """Section of a packed row: the bytes of the latent or of the shared key.

    Attributes:
        spans: per field index, the byte range with such a field; shifts and masks [bytes] of that range, uint8.
        channels: channel of each column within the section; 0 if the byte lacks the field.
        real: 1 for columns with a channel, else 0.
    """

    def __init__(self, runs: Runs, start: int) -> None:
        patterns = [PATTERNS[name] for name, count in runs for _ in range(count)]
        # For each byte the channel of its first field, and the distance between the channels of its fields.
        bytes_of, channel, self.spans, channels = [], 0, [], []
        for name, count in runs:
            bytes_of += [(channel + byte, count) for byte in range(count)]
            channel += count * len(PATTERNS[name])
        for field in range(max(map(len, patterns), default=0)):
            first = next(byte for byte, pattern in enumerate(patterns) if len(pattern) > field)
            fields = [pattern if len(pattern) > field else None for pattern in patterns[first:]]
            shifts = [sum(pattern[:field]) if pattern else 0 for pattern in fields]
            masks = [(1 << pattern[field]) - 1 if pattern else 0 for pattern in fields]
            span = slice(start + first, start + len(patterns))
            self.spans.append((span, torch.tensor(shifts).byte(), torch.tensor(masks).byte()))
            channels += [
                begin + field * count if pattern else -1
                for (begin, count), pattern in zip(bytes_of[first:], fields, strict=True)
            ]
        index = torch.tensor(channels, dtype=torch.long)
        self.real, self.channels, self.width = (index >= 0).float(), index.clamp_min(0), len(channels)

    def unpack(self, rows: Tensor, out: Tensor, codes: Tensor) -> None:
        """Unpack rows [B, n, bytes] into `out` [B, n, width] fp32; `codes` [B, n, ≥ bytes] uint8 is scratch memory."""
        column = 0
        for number, (span, shifts, masks) in enumerate(self.spans):
            source, size = rows[..., span], span.stop - span.start
            part = codes[..., :size]
            if number:
                source = torch.bitwise_right_shift(source, shifts, out=part)
            torch.bitwise_and(source, masks, out=part)
            out[..., column : column + size].copy_(part)
            column += size

    def columns(self, values: Tensor) -> Tensor:
        """Map channels [..., channels] to columns [..., width]; zero if the byte lacks the field."""
        return values[..., self.channels] * self.real

    def channel_sums(self, columns: Tensor, channels: int) -> Tensor:
        """Map columns [..., width] back to channels [..., channels]."""
        return columns.new_zeros(*columns.shape[:-1], channels).index_add_(-1, self.channels, columns * self.real)


class BlockwiseRows:
    """Blockwise attention over the packed rows of one layer."""

    def __init__(self, latent_runs: Runs, rope_runs: Runs, inv_freq: Tensor, predicts_values: bool = False) -> None:
        """Prepare tables.

        Args:
            latent_runs, rope_runs, predicts_values: as in `QuantizedLatentEntry`.
            inv_freq: inverse frequencies [ρ/2] of the shared key's pairs of channels.
        """
        self._predicts_values = predicts_values
        self._rank = TokenFormat(latent_runs).channels
        self._latent = _Section(latent_runs, 0)
        self._rope = _Section(rope_runs, TokenFormat(latent_runs).row_bytes)
        self._inv_freq = inv_freq.double()[self._rope.channels[0::2] // 2]
        self._turns = self._rotations(torch.arange(BLOCK))

    def attend(
        self,
        query: Tensor,
        rows: Tensor,
        first: Tensor,
        quantizer: TokenQuantizer,
        starts: Tensor,
        *,
        mask: Tensor | None = None,
        gains: Tensor | None = None,
    ) -> Tensor:
        """Compute attention over all rows.

        Args:
            query: queries of the last T tokens, rotated, times the attention scale [B, H, T, r + ρ].
            rows: packed rows [B, S, bytes]; further bytes may follow the packed values.
            first: first tokens in full precision [B, F, r + ρ].
            quantizer: quantizer of the rows.
            starts: index of each row's first token [B], at most half a block less F.
            mask: bool, true for visible keys, or additive [B or 1, 1, T, S]; None is causal.
            gains: factors of the scores [B, H, 1, S].

        Returns:
            Weighted sums of latents [B, H, T, r] fp32, or of latents and unrotated keys [B, H, T, r + ρ].
        """
        rank, latent, length, tokens = self._rank, self._latent, rows.shape[1], query.shape[2]
        step, offset = quantizer.step, quantizer.mean - 0.5 * quantizer.highest * quantizer.step
        rope_step, rope_offset = self._rope.columns(step[rank:]), self._rope.columns(offset[rank:])
        query = query.float()
        content = latent.columns(query[..., :rank] * step[:rank])
        # Contribution of the latents' offsets to every score; it cancels in the softmax unless keys have gains.
        constant = (query[..., :rank] * offset[:rank]).sum(-1, keepdim=True)
        turning = _complex(self._rope.columns(query[..., rank:]))
        units = (first.float()[..., :rank] - offset[:rank]) / step[:rank]
        first_latents, first_keys = latent.columns(units), self._rope.columns(first.float()[..., rank:])
        index = (starts[:, None] + torch.arange(first.shape[1]))[..., None]
        positions = torch.arange(length - tokens, length)

        # Columns of the buffer: rotated keys, latents, and keys before their rotation if values are read from them.
        rope, read = self._rope.width, self._rope.width + latent.width
        width = read + rope if self._predicts_values else read
        sums = _RunningSoftmax()
        size = -(-length // -(-length // BLOCK))
        for start in range(0, length, size):
            block = rows[:, start : start + size]
            memory, codes = _memory(*block.shape, width)
            turned, latents = memory[..., :rope], memory[..., rope:read]
            keys = memory[..., read:] if self._predicts_values else turned
            latent.unpack(block, latents, codes)
            self._rope.unpack(block, keys, codes)
            torch.addcmul(rope_offset, keys, rope_step, out=keys)
            if not start:
                latents.scatter_(1, index.expand_as(first_latents), first_latents)
                keys.scatter_(1, index.expand_as(first_keys), first_keys)
            torch.mul(_complex(keys), self._turns[: block.shape[1]], out=_complex(turned))
            turned_query = torch.view_as_real(turning * self._rotations(torch.arange(-start, 1 - start))).flatten(-2)
            scores = torch.cat((turned_query, content), dim=-1).flatten(1, 2) @ memory[..., :read].mT
            scores = scores.unflatten(1, query.shape[1:3])
            if gains is not None:
                scores = (scores + constant) * gains[..., start : start + size]
            sums.add(_masked(scores, mask, positions, start), memory[..., rope:])
        out = sums.result()
        latents = latent.channel_sums(out[..., : latent.width], rank) * step[:rank] + offset[:rank]
        if not self._predicts_values:
            return latents
        return torch.cat((latents, self._rope.channel_sums(out[..., latent.width :], query.shape[-1] - rank)), dim=-1)

    def _rotations(self, positions: Tensor) -> Tensor:
        """Compute e^{jθ n} [n, ρ/2] of positions [n], in fp64, as complex64."""
        angles = positions[:, None].double() * self._inv_freq
        return torch.complex(angles.cos(), angles.sin()).to(torch.complex64)


def _complex(pairs: Tensor) -> Tensor:
    """View neighboring elements [..., ρ] as complex values [..., ρ/2]."""
    return torch.view_as_complex(pairs.unflatten(-1, (pairs.shape[-1] // 2, 2)))


class _RunningSoftmax:
    """Online softmax: weighted sums of values whose scores arrive in blocks."""

    def __init__(self) -> None:
        self._highest: Tensor | None = None

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a block of finite scores [B, H, T, n] and values [B, n, d]."""
        m_i = scores.amax(-1, keepdim=True)
        if self._highest is not None:
            m_i = torch.maximum(m_i, self._highest)
        weights = (scores - m_i).exp_()
        l_i, acc = weights.sum(-1, keepdim=True), (weights.flatten(1, 2) @ values).unflatten(1, scores.shape[1:3])
        if self._highest is not None:
            alpha = (self._highest - m_i).exp_()
            l_i, acc = l_i.addcmul_(self._total, alpha), acc.addcmul_(self._out, alpha)
        self._highest, self._total, self._out = m_i, l_i, acc

    def result(self) -> Tensor:
        """Return the weighted sums [B, H, T, d]."""
        return self._out / self._total


def _masked(scores: Tensor, mask: Tensor | None, positions: Tensor, start: int) -> Tensor:
    """Mask scores [B, H, T, n] of the keys from `start` on; hidden ones become very low but stay finite."""
    least, stop = torch.finfo(scores.dtype).min, start + scores.shape[-1]
    if mask is None:
        if len(positions) == 1:
            return scores
        return scores.masked_fill(positions[:, None] < torch.arange(start, stop), least)
    mask = mask[..., start:stop]
    return scores.masked_fill(~mask, least) if mask.dtype == torch.bool else (scores + mask).clamp_min(least)


def _memory(batch: int, tokens: int, row_bytes: int, width: int) -> tuple[Tensor, Tensor]:
    """Return thread-local buffers: values [batch, tokens, width] fp32, codes [batch, tokens, row_bytes] uint8."""
    parts = []
    for name, dtype, last in (("values", torch.float32, width), ("codes", torch.uint8, row_bytes)):
        size, buffer = batch * tokens * last, getattr(_workspace, name, None)
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # later calls outside inference mode write to it
                buffer = torch.empty(size, dtype=dtype)
            setattr(_workspace, name, buffer)
        parts.append(buffer[:size].view(batch, tokens, last))
    return parts[0], parts[1]
