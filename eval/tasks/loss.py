"""Held-out loss by source and position, with and without the KV cache, and divergence from the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.common.human import perplexity
from surgery.eval.held_out_text import HeldOutText
from surgery.eval.logits import ROWS_AT_ONCE, LogitReader, evaluation_mode
from surgery.eval.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from surgery.evaluation.task_data import TaskData

MEMORIZED = 0.1
"""Baseline loss in nats below which a token counts as memorized; such tokens hide damage to attention."""
FIRST_BUCKET = 32
"""Tokens in the first position bucket; every later bucket is as long as all buckets before it."""


@dataclass(frozen=True)
class KeptPredictions:
    """Final states [B, T - 1, ...] of the baseline by batch of this process, on the CPU, losses in nats, and head.

    A copy, so that the model can be freed; no head if the states are logits.
    """

    head: nn.Module | None
    states: dict[int, Tensor]
    losses: dict[int, Tensor]


@dataclass(frozen=True)
class LossTask:
    """Loss, perplexity, bits per byte, KL divergence from the baseline and top-1 agreement on held-out text.

    Attributes:
        text: windows of held-out text.
        decoded: tokens at the end of each window that are decoded one by one for the through-cache loss; 0 skips it.
    """

    text: HeldOutText
    decoded: int = 128
    name: ClassVar[str] = "loss"
    native: ClassVar[bool] = False

    def settings(self) -> dict[str, Any]:
        count, length = self.text.tokens.shape
        return {
            "windows": count,
            "length": length,
            "decoded": self.decoded,
            "sources": list(self.text.sources),
            "data_sha256": self.text.sha256,
        }

    @torch.no_grad()
    def keep(self, model: PreTrainedModel, session: Session) -> KeptPredictions:
        """Return the baseline's predictions, with which the other models are compared."""
        batches = self._batches(session)
        states_of: dict[int, Tensor] = {}
        losses: dict[int, Tensor] = {}
        with (
            evaluation_mode(model),
            session.progress.phase("loss: baseline's predictions", len(batches), "batch") as advance,
        ):
            reader = LogitReader(model, batches[0][1])

            def run(batch: tuple[int, LongTensor]) -> None:
                index, tokens = batch
                states = reader.states(tokens)[:, :-1]
                states_of[index], losses[index] = states.cpu(), losses_of_states(reader, states, tokens[:, 1:])

            session.processes.map(run, batches, advance)
        return KeptPredictions(reader.frozen_head(), states_of, losses)

    @torch.no_grad()
    def run(self, model: PreTrainedModel, session: Session, kept: KeptPredictions | None) -> dict[str, Any]:
        batches = self._batches(session)
        with evaluation_mode(model), session.progress.phase("loss", len(batches), "batch") as advance:
            reader = LogitReader(model, batches[0][1])

            def measure(batch: tuple[int, LongTensor]) -> dict[str, np.ndarray]:
                index, tokens = batch
                states = reader.states(tokens)[:, :-1]
                if kept is None:
                    values = {"loss": losses_of_states(reader, states, tokens[:, 1:])}
                else:
                    baseline = kept.head, kept.states[index]
                    compared = losses_and_divergence(reader, states, tokens[:, 1:], *baseline)
                    values = dict(zip(("loss", "kl", "same"), compared, strict=True)) | {"baseline": kept.losses[index]}
                if self.decoded:
                    values["cached"] = losses_through_cache(reader, tokens, self.decoded)
                return {name: value.numpy() for name, value in values.items()}

            parts = session.processes.map(measure, batches, advance)
        return self._summary({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _batches(self, session: Session) -> list[tuple[int, LongTensor]]:
        return list(enumerate(self.text.first(session.limit).tokens.split(session.batch_size)))

    def _summary(self, values: dict[str, np.ndarray]) -> dict[str, Any]:
        """Aggregate per-token values [N, T - 1] into the result."""
        losses = values["loss"].astype(np.float64)
        text = self.text.first(len(losses))
        source, size = text.source[:, 1:].numpy(), text.bytes[:, 1:].numpy()
        result = {
            "sequences": len(losses),
            "length": text.tokens.shape[1],
            **_totals(losses, size),
            "perplexity": ppl if math.isfinite(ppl := perplexity(float(losses.mean()))) else None,  # JSON lacks inf
            "per_sequence": losses.mean(axis=1).tolist(),
            "by_source": {
                name: _totals(losses[source == index], size[source == index])
                for index, name in enumerate(self.text.sources)
                if (source == index).any()
            },
            "by_position": [
                {"start": start, "end": end, **_totals(losses[:, start - 1 : end - 1], size[:, start - 1 : end - 1])}
                for start, end in position_buckets(text.tokens.shape[1])
            ],
            "memorised": _memorized(losses, values.get("baseline", losses)),
            "cached": None,
            "divergence": None,
        }
        if "cached" in values:
            cached = values["cached"].astype(np.float64)
            result["cached"] = {
                "loss": float(cached.mean()),
                "prefill": text.tokens.shape[1] - 1 - self.decoded,
                "decoded": self.decoded,
                # Only decoded tokens read the cache as in generation, so their loss says more than the overall mean.
                "decoded_loss": float(cached[:, -self.decoded :].mean()),
                "decoded_per_sequence": cached[:, -self.decoded :].mean(axis=1).tolist(),
                "decoded_loss_one_forward": float(losses[:, -self.decoded :].mean()),
                "largest_difference": float(np.abs(cached - losses).max()),
                "per_sequence": cached.mean(axis=1).tolist(),
            }
        if "kl" in values:
            kl, same = values["kl"].astype(np.float64), values["same"]
            result["divergence"] = {
                "kl": float(kl.mean()),
                "kl_99": float(np.quantile(kl, 0.99)),
                "kl_99_9": float(np.quantile(kl, 0.999)),
                "top1_agreement": float(same.mean()),
                "kl_per_sequence": kl.mean(axis=1).tolist(),
                "agreement_per_sequence": same.mean(axis=1).tolist(),
            }
        return result


def position_buckets(length: int) -> list[tuple[int, int]]:
    """Return ranges [start, end) of target positions in `length` tokens: 1-31, 32-63, 64-127, 128-255, ..."""
    edges = [1]
    edge = FIRST_BUCKET
    while edge < length:
        edges.append(edge)
        edge *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


def _totals(losses: np.ndarray, size: np.ndarray) -> dict[str, Any]:
    nats, bytes_ = float(losses.sum()), int(size.sum())
    return {
        "loss": nats / losses.size,
        "tokens": losses.size,
        "bits_per_byte": nats / math.log(2) / bytes_ if bytes_ else None,
    }


def _memorized(losses: np.ndarray, baseline: np.ndarray) -> dict[str, Any]:
    """Aggregate losses [N, T - 1] of memorized and other tokens, by the losses [N, T - 1] of the baseline.

    "per_sequence" is scaled so that its mean over sequences is "loss_of_others".
    """
    memorized = baseline < MEMORIZED
    others = int((~memorized).sum())
    return {
        "share": float(memorized.mean()),
        "loss": float(losses[memorized].mean()) if memorized.any() else None,
        "loss_of_others": float(losses[~memorized].mean()) if others else None,
        "per_sequence": (np.where(memorized, 0.0, losses).sum(1) * len(losses) / others).tolist() if others else None,
    }


def build(data: TaskData) -> LossTask:
    """Build the task from the settings and texts of an evaluation."""
    return LossTask(data.text, data.settings.decoded)


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

    Args:
        states: states of the model [B, n, ...].
        targets: target tokens [B, n].
        baseline_head: frozen LM head of the baseline; None if `baseline_states` are logits.
        baseline_states: states of the baseline [B, n, ...].

    Returns:
        Cross-entropy as in `losses_of_states`, KL(baseline || model) in nats, and whether the top-1 tokens agree:
        [B, n] each, on the CPU.
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
