"""Quantization with calibrated steps and means per channel, packed into one row per token.

A channel of b bits holds `mean + step * (code - (2^b - 1) / 2)` with codes 0 … 2^b - 1: a uniform mid-rise quantizer
with a calibrated range. A row depends on its token alone, so the same values give the same bytes in any batch, chunk or
order. The arithmetic is in fp32, whatever the model's dtype.

The first channels may make up for the rounding of the others: if a reader adds `P · others` to them, they are stored as
`first + correction · (others - decoded others)`, so that it reads what `P · others` would have given without rounding.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .token_format import TokenFormat

SHORT_FIELD = 32
"""Mean channels per field below which one gather unpacks a row faster than one slice per field.

On one core, 64 rows of 66 fields of 6 channels take 0.08 ms by a gather and 1.5 ms by slices; 1,024 rows of 9 fields of
227 channels take 9.5 ms and 1.3 ms.
"""


class TokenQuantizer(nn.Module):
    """Quantizer of tokens [..., channels] to packed rows [..., row_bytes] uint8.

    Attributes:
        step, mean: [channels] fp32, from the checkpoint; they stay fp32 when the model is cast.
        correction: [correcting, channels - correcting] fp32, likewise; only if some channels correct others.
    """

    def __init__(self, token_format: TokenFormat, correcting: int = 0) -> None:
        """Create a quantizer whose first `correcting` channels make up for the rounding of the others."""
        super().__init__()
        self.format, self.correcting = token_format, correcting
        channels = token_format.channels
        if correcting:
            correction = torch.zeros(correcting, channels - correcting, dtype=torch.float32)
            self.register_buffer("correction", correction)
        self.register_buffer("step", torch.ones(channels, dtype=torch.float32))
        self.register_buffer("mean", torch.zeros(channels, dtype=torch.float32))
        for name, table in self._tables().items():
            self.register_buffer(name, table, persistent=False)
        self._is_checked = False

    def _tables(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the lookup tables of the format: each channel's highest code, byte and lowest bit, and the layout."""
        channels, factors = self.format.layout()
        fields = self.format.fields()
        channel_bytes = [byte for start, count, *_ in fields for byte in range(start, start + count)]
        shifts = [position for _, count, position, _ in fields for _ in range(count)]
        highest = [2.0**bits - 1 for bits in self.format.bits()]
        return {
            "highest": torch.tensor(highest, dtype=torch.float32, device=device),
            "channel_bytes": torch.tensor(channel_bytes, dtype=torch.int64, device=device),
            "channel_shifts": torch.tensor(shifts, dtype=torch.uint8, device=device),
            "field_channels": torch.tensor(channels, device=device),
            "field_factors": torch.tensor(factors, dtype=torch.uint8, device=device),
        }

    def _apply(self, fn, recurse=True):
        # `model.to(bfloat16)` would round the stored values, so only the device changes.
        values = {name: getattr(self, name) for name in ("step", "mean", "correction") if hasattr(self, name)}
        super()._apply(fn, recurse)
        for name, value in values.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float32:
                setattr(self, name, (moved if value.is_meta else value).to(moved.device, torch.float32))
        for name, table in self._tables(self.highest.device).items():
            setattr(self, name, table)
        return self

    def initialize_weights(self) -> None:
        """Initialize buffers that no checkpoint has loaded."""
        init.ones_(self.step)
        init.zeros_(self.mean)
        if self.correcting:
            init.zeros_(self.correction)
        for name, table in self._tables(self.highest.device).items():
            init.copy_(getattr(self, name), table)

    def check(self) -> None:
        """Check steps and means, once, before their first use.

        Raises:
            ValueError: a step that is not positive and finite, or another value that is not finite.
        """
        if self._is_checked or self.step.is_meta:
            return
        good = (self.step > 0) & self.step.isfinite() & self.mean.isfinite()
        if not bool(good.all()):
            channel = int((~good).nonzero()[0, 0])
            raise ValueError(
                f"channel {channel} has step {float(self.step[channel])} and mean {float(self.mean[channel])}: steps "
                "must be positive and finite, means finite; the checkpoint is damaged"
            )
        if self.correcting and not bool(self.correction.isfinite().all()):
            raise ValueError("the correction of a quantizer is not finite; the checkpoint is damaged")
        self._is_checked = True

    def encode(self, values: Tensor) -> Tensor:
        """Quantize and pack values [..., channels] of any dtype → rows [..., row_bytes] uint8."""
        return self.pack(self._levels(self.corrected(values)).to(torch.uint8))

    def decode(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Unpack and dequantize rows [..., row_bytes] → values [..., channels] in `dtype`."""
        return self._dequantize(self.unpack(rows)).to(dtype)

    def decode_cached(self, rows: Tensor, new: Tensor) -> Tensor:
        """Decode rows [B, 1, S, row_bytes], whose last T are the rows of `new` [B, 1, T, channels].

        These get the gradient of `new`, straight-through where it is not clipped.
        """
        read = self.decode(rows, new.dtype)
        return with_gradient(read, self.unclipped(new)) if new.requires_grad else read

    def read(self, values: Tensor) -> Tensor:
        """Quantize and dequantize values [..., channels]."""
        return self.rounded(self.corrected(values)).to(values.dtype)

    def rounded(self, values: Tensor) -> Tensor:
        """Round values [..., channels], which are corrected already, to those that a row can hold, fp32."""
        return self._dequantize(self._levels(values))

    def corrected(self, values: Tensor) -> Tensor:
        """Make the first channels of values [..., channels] up for the rounding of the others; fp32 if they do."""
        if not self.correcting:
            return values
        first, others = values.float().tensor_split([self.correcting], dim=-1)
        part = slice(self.correcting, None)
        rounding = others - self._dequantize(self._levels(others, part), part)
        return torch.cat((first + nn.functional.linear(rounding, self.correction), others), dim=-1)

    def clipped(self, values: Tensor) -> Tensor:
        """Return the bool mask of values [..., channels] outside the range of their channel."""
        return (self.corrected(values).float() - self.mean).abs() > 0.5 * (self.highest + 1) * self.step

    def unclipped(self, values: Tensor) -> Tensor:
        """Return values [..., channels] with zero gradient where they are clipped.

        A small change of a clipped value does not change its code. Inside the range the gradient is straight-through
        (Bengio et al., arXiv:1308.3432).
        """
        return torch.where(self.clipped(values), values.detach(), values)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [..., channels] uint8 → rows [..., row_bytes]."""
        return (codes[..., self.field_channels] * self.field_factors).sum(-2, dtype=torch.uint8)

    def unpack(self, rows: Tensor) -> Tensor:
        """Unpack rows [..., row_bytes] → codes [..., channels] uint8."""
        fields = self.format.fields()
        if self.format.channels < SHORT_FIELD * len(fields):
            return (rows.index_select(-1, self.channel_bytes) >> self.channel_shifts) & self.highest.to(torch.uint8)
        codes = [
            (rows[..., start : start + count] >> position) & ((1 << bits) - 1)
            for start, count, position, bits in fields
        ]
        return torch.cat(codes, dim=-1)

    def _dequantize(self, codes: Tensor, part: slice = slice(None)) -> Tensor:
        step, mean, highest = self.step[part], self.mean[part], self.highest[part]
        return torch.addcmul(mean - 0.5 * highest * step, codes.to(torch.float32), step)

    def _levels(self, values: Tensor, part: slice = slice(None)) -> Tensor:
        step, mean, highest = self.step[part], self.mean[part], self.highest[part]
        levels = (values.float() - mean) / step + 0.5 * highest
        return torch.minimum(levels.round().clamp_min(0), highest)


def with_gradient(read: Tensor, new: Tensor) -> Tensor:
    """Give the last tokens of `read` [B, 1, S, ·] the straight-through gradient of `new` [B, 1, T, ·]."""
    if not new.requires_grad:
        return read
    old = read.shape[2] - new.shape[2]
    own = read[..., old:, :].detach() + (new - new.detach())
    return torch.cat((read[..., :old, :], own), dim=2)


def with_gains(rows: Tensor, gains: Tensor) -> Tensor:
    """Append gains [..., G] of a key norm, in fp16, to packed rows [..., row_bytes]."""
    return torch.cat((rows, gains.detach().to(torch.float16).contiguous().view(torch.uint8)), dim=-1)


def gains_in(rows: Tensor, packed: int) -> Tensor:
    """Return the gains [..., G] fp16 that follow the `packed` bytes of rows [..., bytes]."""
    return rows[..., packed:].contiguous().view(torch.float16)
