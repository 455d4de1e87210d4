"""Check of a whole model in transformers: equal logits in one pass, in pieces through its cache, and in a batch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from surgery.architectures.custom_class import layer_entries
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.model.cache_argument import CACHE
from surgery.running.models import whole_model
from surgery.running.source import OwnSource, Source
from surgery.verification.again import run_layers
from surgery.verification.written import QUANTIZED_TOLERANCE

LENGTH, PIECES, PADDING = 48, (20, 20, 8), 5
TOLERANCE = 1e-3
"""Tolerance of logits in float32, relative to their standard deviation."""


@torch.no_grad()
def check_whole_model(reader: CheckpointReader, opened: Source | OwnSource, seed: int) -> str:
    """Check that logits do not depend on how a prompt is split, or on other rows; return a summary of the comparisons.

    Caches with scales or bases of token groups are not left-padded, which would shift the groups. Caches that quantize
    groups of tokens are not read in pieces either: the pass that completes a group computes another function.

    Raises:
        SurgeryError: transformers does not load the model, or logits depend on splits or on other rows.
    """
    model = whole_model(reader.model_folder(), dtype=torch.float32).to(opened.stream.device)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(opened.config.vocab_size, (1, LENGTH), generator=generator).to(model.device)
    whole = model(ids).logits
    entries, spread = layer_entries(reader.config), float(whole.std())
    quantized = bool(reader.config.get("kv_cache"))
    grouped = quantized or any(entry.shares_cache for entry in entries)
    rounds = quantized or any(entry.quantizes for entry in entries)

    def compare(other: Tensor, how: str) -> None:
        difference = float((other - whole[:, -other.shape[1] :]).abs().max()) / max(spread, 1e-30)
        if not difference <= (QUANTIZED_TOLERANCE if rounds else TOLERANCE):
            raise SurgeryError(
                f"logits {how} differ by {difference:.1e} of their standard deviation from those of one pass"
            )

    by_layers = opened.stream.logits(run_layers(opened.stream, ids.cpu(), None)[:, -1:].to(opened.stream.device))
    if not quantized:
        compare(by_layers.to(whole), "of layers run one by one")
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, **{CACHE: cache}).logits for piece in ids.split(PIECES, dim=1)]
        compare(torch.cat(pieces, dim=1), "of a prompt in pieces")
    padding = 0 if grouped else PADDING
    rows = torch.cat([torch.cat([ids.new_zeros(1, padding), ids], dim=1), torch.cat([ids, ids[:, :padding]], dim=1)])
    mask = torch.ones_like(rows)
    mask[0, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)  # like `generate`
    batched = model(rows, attention_mask=mask, position_ids=positions).logits[:1, -LENGTH:]
    compare(batched, "of a row next to another")
    ways = [] if quantized else ["layer by layer", "in pieces"]
    ways.append("next to another row" if grouped else "left-padded next to another row")
    return f"{type(model).__name__}: equal logits {', '.join(ways)}"
