"""``surgery slice``: a smaller checkpoint from a converted one, by keeping the first latents of every block.

Nothing is calibrated or fitted. Conversions leave latents in the order of what they are worth, so the first ones are a
good model of their own. Where ranks may differ between layers, a few ways to spend the budget are tried on held-out
text. What is written is compared with the whole checkpoint run with the other latents set to zero, and gets its name
once it has computed the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from surgery.architectures.sliced import LatentModel, planned_tensors, sliced_tensors
from surgery.calibration.texts import load_texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.checkpoint.output_place import settle_output
from surgery.common.progress import Progress
from surgery.model import remote_code_files
from surgery.reporting.report import SourceShape
from surgery.running.loading import load_config
from surgery.running.source import OwnSource
from surgery.structures.converter import Conversion, Outcome, conclude, write_rest
from surgery.structures.slices.measure import BEFORE, SLICED, measure_slices
from surgery.structures.slices.plan import Origin, plan_slice
from surgery.structures.slices.settings import SliceSettings
from surgery.verify.written import verify_by_running


@dataclass(frozen=True)
class SlicedLayerReport:
    """One layer of the report.

    Attributes:
        rank: latents that are left, ``ranks`` in each block.
        rope_dim: rotated numbers cached beside them.
        rope_error: None, nothing rotated is dropped.
        latent_error, latent_error_share: energy of what this slice dropped, as the conversion's report has it, and its
            share of all that there was before.
        measured: relative error of the attention's output; in a group of layers that read each other's latents, on
            inputs that the earlier layers' slices have changed.
    """

    layer: int
    rank: int
    ranks: tuple[int, ...]
    rope_dim: int
    rope_error: None
    latent_error: float
    latent_error_share: float
    measured: dict[str, float]


def slice_checkpoint(
    source: str | Path,
    out: str | Path | None = None,
    settings: SliceSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Writes a smaller checkpoint from one that ``convert --to lowrank``, ``crosslayer`` (cascade) or ``mla`` made.

    Args:
        source: local folder or hub id.
        out: folder to write; the source's name with "-sliced" behind it by default.
        settings: what to keep.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: the checkpoint has no ordered latents, or the request is impossible; nothing is left behind.
    """
    settings, progress = settings or SliceSettings(), progress or Progress(silent=True)
    reader = CheckpointReader.open(source, allow_pickle=allow_pickle)
    whole = LatentModel.of(reader)
    origin = Origin.of(reader.path)
    out = settle_output(source, reader.source, out, "sliced", overwrite=overwrite)
    opened = OwnSource.open(reader, settings)
    dtype = opened.weight_dtype
    candidates = plan_slice(reader.path, whole, origin, settings.kv_ratio, dtype.itemsize, settings.allocate)
    texts = load_texts(opened, settings, progress)
    measured = measure_slices(opened.stream, whole, candidates, texts.held_out, settings.batch_size, progress)
    ranks = candidates[measured.best]
    smaller = whole.sliced(ranks)

    tensors = planned_tensors(reader, whole, ranks)
    with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
        changed: set[str] = set()
        with progress.phase("slice", whole.layers) as advance:
            for layer in range(whole.layers):
                for name, tensor in sliced_tensors(reader, whole, layer, ranks).items():
                    writer.write(name, tensor)
                    changed.add(name)
                advance()
        kept = [name for name in tensors if name not in changed]
        code = () if whole.stock else remote_code_files()
        write_rest(writer, tensors, reader, smaller.config, kept, progress, code=code)

        kv_bytes = _kv_bytes(smaller, load_config(writer.partial), dtype)
        verification = verify_by_running(
            writer.partial,
            dtype,
            opened.stream,
            measured.hidden,
            texts.held_out,
            opened.windows,
            kv_bytes,
            settings.batch_size,
            progress,
            blocks=whole.groups(),
        )
        at = verification.kv_tokens
        outcome = Outcome(
            config=smaller.config,
            replaced=changed,
            target={**_target(smaller, origin, kv_bytes(at) / at), "allocations": measured.losses},
            kv_bytes=kv_bytes,
            layers=[_layer_report(layer, whole, smaller, origin, e) for layer, e in enumerate(measured.errors)],
            scores={BEFORE: measured.before, SLICED: measured.score},
            simulated=measured.hidden,
            shape=SourceShape.of_config(opened.config, dtype, _kv_bytes(whole, opened.config, dtype)(at) / at),
        )
        report = conclude(writer, opened, settings, texts, outcome, verification, command, progress)
    return Conversion(writer.out, report)


def _kv_bytes(model: LatentModel, config, dtype: torch.dtype) -> Callable[[int], int]:
    """KV bytes of one sequence by its tokens, as predicted from shapes."""
    if not model.stock:
        with torch.device("meta"):
            built = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return lambda tokens: built.kv_cache_bytes(1, tokens)
    width = sum(sum(ranks) + model.fixed(layer) for layer, ranks in enumerate(model.ranks))
    return lambda tokens: width * dtype.itemsize * tokens


def _target(smaller: LatentModel, origin: Origin, bytes_per_token: float) -> dict:
    """What the origin's report says of its target, with the new ranks."""
    ranks = [sum(blocks) for blocks in smaller.ranks]
    target = {**origin.target, "sliced": True, "ratio_to_original": bytes_per_token / origin.source_bytes}
    if "ranks" in target:
        target["ranks"] = ranks
    else:
        target["kv_lora_ranks"] = ranks
        target["kv_lora_rank"] = ranks[0] if len(set(ranks)) == 1 else None
    return target


def _layer_report(
    layer: int, whole: LatentModel, smaller: LatentModel, origin: Origin, errors: dict[str, float]
) -> SlicedLayerReport:
    kept, before = smaller.ranks[layer], whole.ranks[layer]
    energies = origin.energies[layer]
    dropped = sum(float(energy[new:old].sum()) for energy, new, old in zip(energies, kept, before, strict=True))
    total = sum(float(energy[:old].sum()) for energy, old in zip(energies, before, strict=True))
    share = dropped / max(total, 1e-300)
    return SlicedLayerReport(layer, sum(kept), kept, smaller.rope_dim(layer), None, dropped, share, errors)
