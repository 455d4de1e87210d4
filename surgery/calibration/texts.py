"""Token sequences of a conversion: calibration text, held-out text and recall prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.calibration.sequences import token_hash
from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.human import perplexity, perplexity_text, with_perplexity
from surgery.common.progress import Progress
from surgery.eval.tasks.loss import MEMORIZED
from surgery.running.layer_stream import LayerStream, blocks_of
from surgery.running.models import tokenizer_of

if TYPE_CHECKING:
    from surgery.calibration.mixture import Conversations
    from surgery.calibration.sequences import CalibrationSet

# Random tokens to compare logits on, in place of held-out text.
RANDOM_SEQUENCES, RANDOM_LENGTH = 2, 64
RECALL_PROMPTS_PER_TEXT = 1
NO_TOKENIZER = f"use a checkpoint with a tokenizer, or convert with --calibration {NO_CALIBRATION}"


@dataclass(frozen=True)
class Texts:
    """Token sequences of a conversion and their description."""

    calibration: Tensor | None  # [N, T]; None for a conversion from weights alone
    held_out: HeldOut
    description: dict

    def hashes(self) -> dict[str, str | None]:
        """Return the SHA-256 of calibration and held-out tokens."""
        calibration = None if self.calibration is None else token_hash(self.calibration)
        return {"calibration": calibration, "held_out": token_hash(self.held_out.tokens)}

    def counts(self) -> dict[str, int]:
        """Return the tokens per sequence and the number of sequences of each kind."""
        calibration = 0 if self.calibration is None else len(self.calibration)
        texts, prompts = self.held_out.texts, len(self.held_out.answers)
        length = (self.held_out.tokens if self.calibration is None else self.calibration).shape[1]
        return {"length": length, "calibration": calibration, "held_out": texts, "recall_prompts": prompts}


def load_texts(
    opened,
    settings: ConversionSettings,
    progress: Progress,
    *,
    run_source: bool = True,
    planted: bool = True,
    held_out_length: int | None = None,
) -> Texts:
    """Tokenize the texts of the settings and measure the source's loss on them.

    Args:
        run_source: if False, nothing is measured, and prose replaces the source's conversations.
        planted: whether held-out text has planted facts, as calibration text does. Evaluations measure the loss without
            them, and recall prompts measure recall of facts.
        held_out_length: truncates held-out sequences to this many tokens; None for the length of calibration.

    Raises:
        SurgeryError: there is no tokenizer, or the text cannot be read or is too short.
    """
    if settings.calibration == NO_CALIBRATION:
        held_out = HeldOut.random(opened.config.vocab_size, RANDOM_SEQUENCES, RANDOM_LENGTH, settings.seed)
        return Texts(None, held_out, {"source": NO_CALIBRATION})
    from surgery.eval.recall import recall_prompts

    tokenizer = tokenizer_of(opened.reader, remedy=NO_TOKENIZER)
    build = _builder(opened, tokenizer, settings, progress, run_source)
    if settings.held_out_text is not None:
        build = _with_held_out(build, tokenizer, settings)
    built = build(settings.recall)
    # Recall prompts have their own facts: the text around them must have no others.
    plain = built if settings.recall == 0 else build(0.0)
    if not planted:
        facts = {**built.description, "held_out_sha256": plain.description["held_out_sha256"]}
        built = replace(built, held_out=plain.held_out, description=facts)
    if held_out_length is not None and held_out_length < built.held_out.shape[1]:
        shorter = built.held_out[:, :held_out_length]
        facts = {**built.description, "held_out_length": held_out_length, "held_out_sha256": token_hash(shorter)}
        built = replace(built, held_out=shorter, description=facts)
    held_out, note = HeldOut.of_text(built.held_out), "recall prompts in held-out text"
    length = built.held_out.shape[1]
    try:
        prompts = recall_prompts(
            tokenizer,
            plain.held_out.flatten().tolist(),
            RECALL_PROMPTS_PER_TEXT * len(built.held_out),
            length,
            settings.seed,
        )
        held_out = held_out.with_recall(prompts.tokens, prompts.answer_mask)
    except SurgeryError as error:
        # Short sequences and some tokenizers have no room for recall prompts; the loss can be measured all the same.
        note = f"no recall prompts: {error}"
        progress.note(note)
    # The source's path: the tokenizer of a GGUF file is in a temporary folder.
    description = {**built.description, "tokenizer": str(opened.reader.source), "recall_prompts": note}
    if run_source:
        description["fit"] = _measure(opened, tokenizer, built, settings, progress)
    return Texts(built.tokens, held_out, description)


def _builder(
    opened, tokenizer, settings: ConversionSettings, progress: Progress, run_source: bool
) -> Callable[[float], CalibrationSet]:
    """Return a function that builds sequences from the share with planted recalls; conversations are sampled once."""
    from surgery.calibration.mixture import CHAT, build_mixture, shares_of, without_chat
    from surgery.calibration.sequences import SequenceRequest, build_calibration
    from surgery.calibration.text import BUILTIN

    request = SequenceRequest.of(settings, opened.config.max_position_embeddings)
    shares = shares_of(settings.calibration, tokenizer)
    if shares is None:
        return lambda recall: build_calibration(tokenizer, settings.calibration, replace(request, recall=recall))
    if CHAT in shares and not run_source:
        shares = without_chat(shares)
    elif CHAT in shares and settings.calibration == BUILTIN and (reason := _too_large_to_load(opened)):
        progress.note(f"calibration without conversations: {reason}")
        shares = without_chat(shares)
    conversations = _conversation_sampler(opened, tokenizer, settings, progress)
    return lambda recall: build_mixture(tokenizer, shares, conversations, replace(request, recall=recall))


def _with_held_out(
    build: Callable[[float], CalibrationSet], tokenizer, settings: ConversionSettings
) -> Callable[[float], CalibrationSet]:
    """Replace a builder's held-out sequences by those of the user's text."""
    from surgery.calibration.sequences import CalibrationSet, SequenceRequest, build_calibration, token_hash

    def replaced(recall: float) -> CalibrationSet:
        built = build(recall)
        length = built.tokens.shape[1]
        request = SequenceRequest(settings.held_out * length, length, recall, settings.seed, 0, settings.text_field)
        tokens = build_calibration(tokenizer, settings.held_out_text, request).tokens
        order = built.description.get("order")
        description = {"held_out_source": settings.held_out_text, "held_out_sha256": token_hash(tokens)}
        if order:
            description["order"] = {**order, "held_out": ["text"] * len(tokens)}
        return CalibrationSet(built.tokens, tokens, {**built.description, **description})

    return replaced


def _measure(opened, tokenizer, built: CalibrationSet, settings: ConversionSettings, progress: Progress) -> dict:
    """Measure the text's fit, and report it and its misfits as progress notes."""
    order = built.description.get("order", {"calibration": None, "held_out": None})
    texts = {"calibration": built.tokens, "held_out": built.held_out}
    fit = measure_fit(opened.stream, texts, order, settings.batch_size, progress)
    parts = built.description.get("parts")
    shares = ", ".join(f"{part['share']:.0%} {name}" for name, part in (parts or {}).items()) or settings.calibration
    losses = ", ".join(f"{with_perplexity(entry['loss'])} on {kind}" for kind, entry in fit["calibration"].items())
    progress.note(f"calibration: {built.tokens.numel():,} tokens: {shares}; source's loss (perplexity) {losses}")
    chats = bool(getattr(tokenizer, "chat_template", None)) and "chat" not in (parts or {"chat": None})
    for line in misfits(fit["calibration"], chats=chats):
        progress.note(f"warning: {line}")
    return fit


def _load_whole_model(opened):
    """Load the whole source on its device, in float32 on a CPU, which is slow in half precision."""
    from surgery.running.models import causal_model

    device = opened.stream.device
    return causal_model(opened.reader, dtype=torch.float32 if device.type == "cpu" else "auto").to(device)


def _too_large_to_load(opened) -> str | None:
    """Return why the source is too large to load whole by default; None if it is not."""
    import psutil

    weights = sum(opened.reader.info(name).nbytes for name in opened.reader.names())
    device = opened.stream.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if weights <= free // 2:
        return None
    return f"the source needs {weights / 2**30:.0f} GiB, more than half of the free memory; pass chat=SHARE to force it"


def _conversation_sampler(opened, tokenizer, settings: ConversionSettings, progress: Progress) -> Conversations:
    """Return a cached function that samples conversations with the source."""
    from surgery.calibration.conversations import HELD_OUT_PROMPTS, PROMPTS, sample_conversations

    model = functools.cache(lambda: _load_whole_model(opened))

    @functools.cache
    def conversations(unseen: bool, tokens: int) -> list[list[int]]:
        prompts = HELD_OUT_PROMPTS if unseen else PROMPTS
        with progress.phase("sample conversations", tokens, "token") as advance:
            return sample_conversations(model(), tokenizer, tokens, prompts, settings.seed, advance)

    return conversations


FIT_SEQUENCES = 4
"""Number of first sequences of each use whose loss is measured, to detect a misfit."""
FIT_TOKENS = 256
"""Number of first tokens of each."""
FAR_OFF, BY_HEART = 5.0, 0.3
"""Mean losses above which the source was not trained on such text, and below which it has memorized it."""


@torch.no_grad()
def measure_fit(
    stream: LayerStream,
    texts: Mapping[str, Tensor],
    order: Mapping[str, Sequence[str] | None],
    batch_size: int,
    progress: Progress,
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the source's loss on the start of the first sequences of each text, by kind of text.

    Args:
        texts: sequences [N, T] by use.
        order: kind of each sequence by use; None if all are of one kind, "text".

    Returns:
        By use and kind: "loss" (nats per token), "memorised" (share of tokens with a loss below `MEMORIZED`), "tokens"
        (number of predicted tokens).
    """
    texts = {use: tokens[:FIT_SEQUENCES, :FIT_TOKENS] for use, tokens in texts.items()}
    hidden = {use: stream.embed(tokens) for use, tokens in texts.items()}
    with progress.phase("source's loss on the text", stream.num_layers) as advance:
        for start, stop in blocks_of(stream.config):
            with stream.block(start, stop) as layers:
                for each in hidden.values():
                    stream.run_layer(layers, each, batch_size)
            advance(stop - start)
    return {
        use: _by_kind(stream.token_losses(hidden[use], tokens).view(len(tokens), -1).cpu(), order[use])
        for use, tokens in texts.items()
    }


def _by_kind(losses: Tensor, order: Sequence[str] | None) -> dict[str, dict[str, float]]:
    """Group the losses [N, T - 1] of sequences by kind of text."""
    kinds = list(order or ["text"] * len(losses))[: len(losses)]
    fit = {}
    for kind in dict.fromkeys(kinds):
        own = losses[[index for index, other in enumerate(kinds) if other == kind]]
        memorized = (own < MEMORIZED).double().mean()
        fit[kind] = {"loss": float(own.mean()), "memorised": float(memorized), "tokens": own.numel()}
    return fit


def misfits(fit: dict[str, dict[str, float]], *, chats: bool) -> list[str]:
    """Return warnings about a calibration text, one line each.

    Args:
        chats: whether the source has a chat template but the text has no conversations.
    """
    lines = []
    for kind, measured in fit.items():
        loss = f"{measured['loss']:.2f} nats per token (perplexity {perplexity_text(perplexity(measured['loss']))})"
        loss_text = f"the source's loss on the {kind} is {loss}"
        if measured["loss"] > FAR_OFF:
            lines.append(
                f"{loss_text}: it was not trained on such text; choose --calibration text like its training data"
            )
        elif measured["loss"] < BY_HEART:
            lines.append(
                f"{loss_text}: it has memorized this text, which hides degradation; choose another --calibration text"
            )
    if chats:
        lines.append(
            "the source is a chat model, but the calibration text has no conversations; add chat=0.2 to --calibration"
        )
    return lines
