"""One text through a model's live caches in several ways, which must agree: in other pieces, beside other texts.

Every block of layers gets the same inputs in all of them, so differences are of one block and do not add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from surgery.architectures.own_class import MODEL_TYPE
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.running.layer_stream import LayerStream, StreamedLayer, blocks_of
from surgery.running.source import OwnSource, Source
from surgery.verification.caches import (
    bytes_in,
    counts_slots,
    new_cache,
    prompt_of,
    reads_ahead,
    run_through_cache,
    takes_prompt_whole,
)
from surgery.verification.probe import ProbeRun
from surgery.verification.record import Recorded
from surgery.verification.written import measured_tokens

PIECE = 7
"""Tokens at a time in the third way: no divisor of the sizes that caches keep tokens in."""

ALONE, BESIDE, PADDED = "alone", "beside another", "behind padding"


@dataclass
class Agreement:
    """Largest differences of a block's output, relative to its largest value.

    Attributes:
        pieces: by how the text came; empty where the ways are different functions.
        batches: by what it came beside.
        not_in_pieces, not_in_batches: why a way was left out.
        quantized: whether a cache keeps codes, which rounding moves by a step.
        kv_tokens, kv_bytes: of the live caches of all layers, in the dtype of the weights.
        logits: difference to the report's, relative to the largest; None where it has none.
    """

    loaded_as: str = ""
    pieces: dict[str, float] = field(default_factory=dict)
    batches: dict[str, float] = field(default_factory=dict)
    not_in_pieces: str = ""
    not_in_batches: str = ""
    quantized: bool = False
    kv_tokens: int = 0
    kv_bytes: int = 0
    logits: float | None = None

    def see(self, found: dict[str, float], way: str, got: Tensor, want: Tensor) -> None:
        """Notes what a way made of a block's inputs beside what the first did."""
        worst = float((got - want).abs().max() / want.abs().max())
        found[way] = max(found.get(way, 0.0), worst if worst == worst else torch.inf)


@torch.no_grad()
def run_agreement(opened: Source | OwnSource, recorded: Recorded, progress: Progress) -> Agreement:
    """Runs all blocks of a checkpoint.

    Raises:
        SurgeryError: a layer does not load, or the report is of another vocabulary.
    """
    stream, config = opened.stream, opened.config
    if recorded.probe is not None and max(recorded.probe.tokens) >= config.vocab_size:
        raise SurgeryError(f"the report's tokens are of a vocabulary larger than {config.vocab_size}")
    probe, agreement = ProbeRun(stream, recorded.probe), Agreement()
    length = probe.hidden.shape[1]
    agreement.kv_tokens = recorded.kv[0] if recorded.kv else measured_tokens(length, opened.windows)
    rounds = -(-agreement.kv_tokens // length)
    text = stream.embed(probe.tokens.repeat(1, rounds)[:, : agreement.kv_tokens])
    own = opened.reader.config["model_type"] == MODEL_TYPE
    with progress.phase("run", stream.num_layers) as advance:
        for start, stop in blocks_of(config) if own else [(i, i + 1) for i in range(stream.num_layers)]:
            with stream.block(start, stop) as layer:
                agreement.loaded_as = type(layer.model).__name__
                inputs = probe.hidden
                decoded = probe.through(layer)
                _in_pieces(agreement, stream, layer, inputs, decoded, probe)
                _in_batches(agreement, layer, inputs, decoded, probe)
                cache = new_cache(layer)
                layer.decode(text, prompt_of(agreement.kv_tokens), cache)
                agreement.kv_bytes += bytes_in(opened.weight_dtype, cache, stream.dtype)
            advance(stop - start)
    if recorded.probe is not None:
        agreement.logits = recorded.probe.difference(probe)
    return agreement


def _in_pieces(
    agreement: Agreement, stream: LayerStream, layer: StreamedLayer, inputs: Tensor, decoded: Tensor, probe: ProbeRun
) -> None:
    """At once, token by token and a few at a time, beside a prompt and single tokens."""
    cache, prompt = probe.cache, probe.prompt
    agreement.quantized = agreement.quantized or reads_ahead(cache)
    if takes_prompt_whole(cache):
        agreement.not_in_pieces = "a prompt's own basis is another in other pieces"
        return
    if reads_ahead(cache):
        # A pass that completes a group of tokens reads it as codes, so pieces are different functions. But what one
        # layer keeps of its inputs does not depend on them: tokens after a prompt read the same.
        if len(cache.layers) > 1:
            agreement.not_in_pieces = "layers that share codes read others in other pieces"
            return
        other = new_cache(layer)
        half = prompt // 2
        layer.decode(inputs[:, :half], half, other)
        got = layer.decode(inputs[:, half:], prompt - half, other)[:, prompt - half :]
        agreement.see(agreement.pieces, "a prompt at once", decoded[:, prompt:], decoded[:, prompt:])
        agreement.see(agreement.pieces, "in two", got, decoded[:, prompt:])
        return
    for way, piece in (("at once", inputs.shape[1]), ("token by token", 1), (f"{PIECE} at a time", PIECE)):
        got = run_through_cache(stream, layer, inputs.clone(), 1, piece, partial(new_cache, layer))
        agreement.see(agreement.pieces, way, got, decoded)


def _in_batches(agreement: Agreement, layer: StreamedLayer, inputs: Tensor, decoded: Tensor, probe: ProbeRun) -> None:
    """Alone, beside another text of the same length, and behind padding beside a longer one."""
    tokens, prompt = inputs.shape[1], probe.prompt
    agreement.see(agreement.batches, ALONE, decoded, decoded)
    both = torch.cat([inputs, inputs.flip(1)])
    agreement.see(agreement.batches, BESIDE, layer.decode(both, prompt, new_cache(layer))[:1], decoded)
    if counts_slots(probe.cache):
        agreement.not_in_batches = "padding moves the edges of what is kept together"
        return
    short = prompt // 2
    alone = layer.decode(inputs[:, prompt - short :], short, new_cache(layer))
    padding = prompt - short
    rows = torch.cat([inputs, torch.cat([inputs[:, :1].expand(-1, padding, -1), inputs[:, padding:]], dim=1)])
    mask = torch.ones(2, tokens, dtype=torch.long, device=inputs.device)
    mask[1, :padding] = 0
    got = _masked(layer, rows, mask, prompt)
    agreement.see(agreement.batches, PADDED, got[:1], decoded)
    agreement.see(agreement.batches, PADDED, got[1:, padding:], alone)


def _masked(layer: StreamedLayer, rows: Tensor, mask: Tensor, prompt: int) -> Tensor:
    """The outputs [B, T, D] of rows whose mask [B, T] is 0 before their texts, through a live cache."""
    cache, positions, outputs = new_cache(layer), (mask.cumsum(-1) - 1).clamp(min=0), []
    ends = [prompt, *range(prompt + 1, rows.shape[1] + 1)]
    for start, stop in zip([0, *ends], ends, strict=False):
        outputs.append(
            layer.model(
                inputs_embeds=rows[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
        )
    return torch.cat(outputs, dim=1)
