"""Token sequences of a conversion: calibration text, held-out text and recall prompts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surgery.calibration.held_out import HeldOut
from surgery.calibration.sequences import token_hash
from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
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
    """Tokenize the texts of the settings.

    Args:
        run_source: if False, prose replaces the source's conversations, which it would have to write.
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
        parts = built.description.get("parts", {})
        shares = ", ".join(f"{part['share']:.0%} {name}" for name, part in parts.items()) or settings.calibration
        progress.note(f"calibration: {built.tokens.numel():,} tokens: {shares}")
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
