"""The end of conversions that :func:`surgery.conversion.finish` does not know: of latents, and to prompts' own bases.

With a basis of each prompt's own the tensors are the source's, and a pass over a whole text reads it exactly. What the
basis costs shows only in tokens that come after a prompt, so these are decoded and compared with the exact pass; no
bound is put on the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import DynamicCache

from surgery.carry_over import CARD, REPORT, copy_sidecars, copy_tensors
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec, verify_files
from surgery.conversion import Outcome
from surgery.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.held_out import HeldOut, logit_difference
from surgery.layer_stream import LayerStream, single_layer_config
from surgery.model import remote_code_files
from surgery.progress import Progress
from surgery.report import Report, SourceShape, build_report
from surgery.settings import ConversionSettings
from surgery.source import Source
from surgery.texts import Texts
from surgery.verification import PROMPT, STEPS, TOLERANCE, Verification, load_config, verify_by_running


def prompt_of(tokens: int) -> int:
    """How many of that many tokens verification takes for the prompt."""
    return max(1, tokens - STEPS)


def complete(
    writer: CheckpointWriter,
    tensors: Mapping[str, TensorSpec],
    opened: Source,
    settings: ConversionSettings,
    texts: Texts,
    outcome: Outcome,
    command: str,
    progress: Progress,
    *,
    dtype: torch.dtype,
    shape: SourceShape | None = None,
    verify: Callable[..., Verification],
) -> Report:
    """Writes what is not attention, checks and runs the result, reports on it, and gives it its final name.

    Args:
        writer: has every new tensor of the attention.
        tensors: what was planned to be written.
        dtype: of the attention's tensors.
        shape: of the source, where it is no checkpoint of a family.
        verify: runs what was written, as :func:`verify_prompt_basis`.

    Raises:
        SurgeryError: the written files are not what was planned, or those of ``verify``.
    """
    kept = [name for name in opened.reader.names() if name not in outcome.replaced]
    copy_tensors(opened.reader, kept, outcome.factors, writer, progress)
    writer.write_json("config.json", outcome.config)
    copy_sidecars(opened.reader, remote_code_files(), writer)
    writer.finish()
    verify_files(writer.partial, tensors)
    verification = verify(writer.partial, dtype, opened.stream, outcome, texts.held_out, settings.batch_size, progress)
    predicted = outcome.kv_bytes(verification.kv_tokens) / verification.kv_tokens
    target = {**outcome.target, "dtype": str(dtype).removeprefix("torch."), "bytes_per_token": predicted}
    scores, layers, splits = outcome.scores, outcome.layers, outcome.splits
    report = build_report(
        opened, settings, command, target, splits, texts, scores, layers, verification, progress, shape=shape
    )
    writer.write_json(REPORT, report.to_dict())
    writer.write_text(CARD, report.card(writer.out.name))
    writer.commit()
    return report


def verify_latents(
    path: Path,
    dtype: torch.dtype,
    source: LayerStream,
    outcome: Outcome,
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> Verification:
    """:func:`surgery.verification.verify_by_running` of groups in which no layer has a window."""
    windows = (None,) * source.num_layers
    return verify_by_running(
        path,
        dtype,
        source,
        outcome.simulated,
        held_out,
        windows,
        outcome.kv_bytes,
        batch_size,
        progress,
        blocks=outcome.groups,
    )


@torch.no_grad()
def verify_prompt_basis(
    path: Path,
    dtype: torch.dtype,
    source: LayerStream,
    outcome: Outcome,
    held_out: HeldOut,
    batch_size: int,
    progress: Progress,
) -> Verification:
    """Runs a checkpoint with a basis of each prompt's own.

    Raises:
        SurgeryError: one pass does not compute what the source does, or the live caches hold other bytes than
            predicted.
    """
    config = load_config(path)
    stream = LayerStream(
        CheckpointReader.open(path), config, single_layer_config, device=source.device, dtype=source.dtype
    )
    hidden = stream.embed(held_out.tokens)
    tokens = min(PROMPT + STEPS, hidden.shape[1])
    worst, measured = 0.0, 0
    with progress.phase("verify: reload and run", stream.num_layers) as advance:
        for start, stop in outcome.groups:
            with stream.block(start, stop) as layers:
                text = hidden[:1, :tokens].to(stream.device, stream.dtype)
                cache = DynamicCache(config=layers.config)
                decoded, exact = layers.decode(text, prompt_of(tokens), cache), layers(text)
                worst = max(worst, float((decoded - exact).abs().max() / exact.abs().max()))
                measured += cache_bytes(cache) // stream.dtype.itemsize * dtype.itemsize
                stream.run_layer(layers, hidden, batch_size)
            advance(stop - start)
    difference = logit_difference(source, outcome.simulated, stream, hidden)
    if not difference <= TOLERANCE[dtype]:
        raise SurgeryError(f"{path}: a pass over a whole text differs from the source's by {difference:.1e} of a logit")
    if measured != outcome.kv_bytes(tokens):
        raise SurgeryError(
            f"the live caches hold {measured} bytes after {tokens} tokens, {outcome.kv_bytes(tokens)} were predicted"
        )
    return Verification(held_out.score(stream, hidden), difference, worst, tokens, measured / tokens)
