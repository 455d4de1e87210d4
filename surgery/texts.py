"""The token sequences of a conversion: calibration, held-out text and recall prompts, all from one text source."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.held_out import HeldOut
from surgery.progress import Progress
from surgery.settings import NO_CALIBRATION, ConversionSettings

# Random tokens that stand in for held-out text where there is none, to compare logits on.
RANDOM_SEQUENCES, RANDOM_LENGTH = 2, 64
RECALL_PROMPTS_PER_TEXT = 1


@dataclass(frozen=True)
class Texts:
    """Token sequences and where they came from."""

    calibration: Tensor | None  # [N, T]; None for a conversion from weights alone
    held_out: HeldOut
    description: dict


def load_texts(opened, settings: ConversionSettings, progress: Progress) -> Texts:
    """Tokenises what the settings name.

    Raises:
        SurgeryError: there is no tokenizer, or the text cannot be read or is too short.
    """
    if settings.calibration == NO_CALIBRATION:
        held_out = HeldOut.random(opened.config.vocab_size, RANDOM_SEQUENCES, RANDOM_LENGTH, settings.seed)
        return Texts(None, held_out, {"source": NO_CALIBRATION})
    from surgery.calibration.sequences import build_calibration
    from surgery.calibration.text import SELF
    from surgery.eval.recall import recall_prompts

    tokenizer = load_tokenizer(opened.reader.path)
    limit = opened.config.max_position_embeddings
    source = settings.calibration
    if source == SELF:
        progress.note("sampling calibration text from the model itself")
        source = _own_samples(opened, tokenizer, settings)

    def build(recall: float):
        return build_calibration(
            tokenizer,
            source,
            tokens=settings.calibration_tokens,
            length=settings.calibration_length,
            recall=recall,
            seed=settings.seed,
            held_out=settings.held_out,
            max_positions=limit,
            text_field=settings.text_field,
        )

    built = build(settings.recall)
    # The prompts plant facts of their own: the text between them must hold no others.
    filler = built.held_out if settings.recall == 0 else build(0.0).held_out
    held_out, note = HeldOut.of_text(built.held_out), "recall prompts in held-out text"
    length = built.held_out.shape[1]
    try:
        prompts = recall_prompts(
            tokenizer,
            filler.flatten().tolist(),
            RECALL_PROMPTS_PER_TEXT * len(built.held_out),
            length,
            settings.seed,
        )
        held_out = held_out.with_recall(prompts.tokens, prompts.answer_mask)
    except SurgeryError as error:
        # Short sequences and some tokenizers have no room for the task; the loss is still worth having.
        note = f"no recall prompts: {error}"
        progress.note(note)
    return Texts(built.tokens, held_out, {**built.description, "recall_prompts": note})


def load_tokenizer(path):
    """The tokenizer of a checkpoint folder.

    Raises:
        SurgeryError: there is none that transformers can read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise SurgeryError(f"{path}: no usable tokenizer ({reason}); use --calibration none") from None


def _own_samples(opened, tokenizer, settings: ConversionSettings) -> Tensor:
    """Samples of the model itself, [N, T]; needs the whole model in memory, in its own dtype."""
    from transformers import AutoModelForCausalLM

    from surgery.calibration.self_samples import sample_from_model

    model = AutoModelForCausalLM.from_pretrained(opened.reader.model_folder(), dtype="auto", local_files_only=True)
    model = model.to(opened.stream.device)
    # The pool has to hold calibration and held-out windows, with room to draw them at random.
    tokens = 2 * (settings.calibration_tokens + settings.held_out * settings.calibration_length)
    length = min(settings.calibration_length, opened.config.max_position_embeddings)
    with torch.no_grad():
        return sample_from_model(model, tokenizer, tokens, length, settings.batch_size, seed=settings.seed)
