"""Per-token losses of a batch, from one forward pass or through the KV cache, and divergence from a baseline."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.eval.logits import ROWS_AT_ONCE, LogitReader


def losses_of_states(reader: LogitReader, states: Tensor, targets: LongTensor) -> Tensor:
    """Compute the cross-entropy [B, n] in nats, fp32 on the CPU, of `targets` [B, n] given states [B, n, ...]."""
    return _losses(reader, states, targets).cpu()


def losses_through_cache(reader: LogitReader, tokens: LongTensor, decoded: int) -> Tensor:
    """Compute the cross-entropy [B, T-1] of `tokens` [B, T] through the model's KV cache.

    The last token is only a target. Of the rest, all but the last `decoded` tokens are prefilled in one pass and those
    are fed one by one, so that they attend to earlier tokens through the cache. For a lossless cache this equals the
    losses of one forward pass up to rounding. Raises SurgeryError: the model returns no cache, or `decoded` leaves
    nothing to prefill.
    """
    length = tokens.shape[1]
    if not 1 <= decoded < length - 1:
        raise SurgeryError(f"decoded must be from 1 to {length - 2} for {length} tokens, not {decoded}")
    # The last token is only a target.
    prefill = length - 1 - decoded
    states, cache = reader.extend(tokens[:, :prefill], None)
    losses = [_losses(reader, states, tokens[:, 1 : prefill + 1])]
    for position in range(prefill, length - 1):
        states, cache = reader.extend(tokens[:, position : position + 1], cache)
        losses.append(_losses(reader, states, tokens[:, position + 1 : position + 2]))
    return torch.cat(losses, dim=1).cpu()


def losses_and_divergence(
    reader: LogitReader, states: Tensor, targets: LongTensor, baseline_head: nn.Module | None, baseline_states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute losses and the divergence from a baseline at the same positions, with one computation of the logits.

    States are [B, n, ...], targets [B, n]; without a frozen head, the baseline's are logits. Returns cross-entropy as
    in `losses_of_states`, KL(baseline || model) in nats, and whether the top-1 tokens agree: [B, n] each, on the CPU.
    """
    losses, kl, same = [], [], []
    for part, other, target in _in_parts(states, baseline_states, targets.to(states.device)):
        logits = reader.logits(part)
        other = other.to(logits.device)
        expected = (other if baseline_head is None else baseline_head(other)).float()
        log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
        losses.append(-log_q.gather(-1, target.to(log_q.device).unsqueeze(-1)).squeeze(-1))
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
        same.append(expected.argmax(-1) == logits.argmax(-1))
    return tuple(torch.cat(parts, dim=1).cpu() for parts in (losses, kl, same))


def _losses(reader: LogitReader, states: Tensor, targets: LongTensor) -> Tensor:
    """Compute `losses_of_states` on the device of the logits."""
    targets, parts = targets.to(states.device), []
    for part, labels in _in_parts(states, targets):
        logits = reader.logits(part)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten(), reduction="none")
        parts.append(loss.view(labels.shape))
    return torch.cat(parts, dim=1)


def _in_parts(states: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors along positions, so that at most `ROWS_AT_ONCE` rows of logits are materialized at once."""
    positions = max(1, ROWS_AT_ONCE // len(states))
    return zip(*(each.split(positions, dim=1) for each in (states, *others)), strict=True)
