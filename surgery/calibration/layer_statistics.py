"""Collection of the statistics of all layers for a conversion, from text or from weights alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from surgery.calibration.library import StatisticsLibrary, prior_lags, weight_statistics
from surgery.calibration.sequences import token_hash
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.statistics import LayerStatistics, lag_statistics, pair_norm
from surgery.calibration.sweep import BoundaryStore, backward_sweep, forward_sweep
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.snapshots import Snapshots
from surgery.common.progress import Progress
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.latent_anatomy import LatentAnatomy
from surgery.running.source import Source
from surgery.version import __version__

if TYPE_CHECKING:
    from surgery.calibration.texts import Texts
    from surgery.transforms.key_basis import KeyBasis

# Lag statistics need the whole attention matrix of a sequence. Four sequences choose nearly as eight do: of the 14 to
# 32 rotary components in three layers of SmolLM2-135M at most one differed, by 0.4% in energy.
LAG_SEQUENCES = 4

BasisOf = Callable[[AttentionAnatomy, LayerStatistics], "KeyBasis"]
"""Function of a layer's anatomy and statistics that returns the key basis for lag statistics."""


class Calibrated(Protocol):
    """Context of a conversion's calibration: source, text, and the library for the statistics.

    Attributes:
        texts: with calibration tokens [N, T], or None for statistics from weights alone.
        store: receives the inputs of each layer in the forward sweep.
        snapshots: state to resume from after an interruption; library and store then hold the finished work.
    """

    opened: Source
    settings: ConversionSettings
    texts: Texts
    library: StatisticsLibrary
    store: BoundaryStore
    progress: Progress
    snapshots: Snapshots


def gather(
    work: Calibrated, *, gradients: bool = True, basis_of: BasisOf | None = None, first_tokens: Sequence[int] = (0,)
) -> None:
    """Fill the library by a forward and a backward sweep over calibration tokens, or from weights alone.

    ``basis_of`` computes the key basis for lag statistics, stored with the first of ``first_tokens``: numbers of first
    tokens per sequence to exclude from moments, since caches keep them in full precision.
    """
    opened, settings, tokens, library = work.opened, work.settings, work.texts.calibration, work.library
    store, progress, snapshots = work.store, work.progress, work.snapshots
    if tokens is None:
        _from_weights(opened, library, progress, basis_of, first_tokens)
        return
    stream, caches = opened.stream, []

    def forward(snapshots: Snapshots | None = None) -> Tensor:
        with progress.phase("calibrate: forward", stream.num_layers) as advance:
            return forward_sweep(stream, tokens, store, settings.batch_size, advance, snapshots)

    if state := snapshots.last("statistics"):
        store.filled = state["boundaries"]
        if not store.filled:
            store.fill_on_load(forward)
        return

    if settings.keep_statistics:
        for first in first_tokens:
            lags_of = basis_of if first == first_tokens[0] else None
            facts = _facts(opened, tokens, settings, gradients, lags_of, first)
            caches.append(KeptStatistics(settings.keep_statistics, facts))
        if all(each.read_into(library) for each in caches):
            progress.note(f"statistics: loaded from {settings.keep_statistics}")
            store.fill_on_load(forward)
            return
    final = None if snapshots.has_state("backward") else forward(snapshots)
    with progress.phase("calibrate: backward", stream.num_layers) as advance:
        how = {"gradients": gradients, "seed": settings.seed, "snapshots": snapshots, "first_tokens": first_tokens}
        reached = stream.num_layers
        for layer in backward_sweep(opened, store, final, settings.batch_size, **how):
            lags = None
            if basis_of is not None:
                # Evenly spread, to include text with and without planted recalls.
                indices = torch.linspace(0, len(tokens) - 1, min(LAG_SEQUENCES, len(tokens))).long().tolist()
                basis = basis_of(layer.anatomy, layer.statistics[0])
                lags = lag_statistics(layer.anatomy, basis, layer.inputs[indices])
            for first, statistics in zip(first_tokens, layer.statistics, strict=True):
                library.save(layer.index, statistics, lags, first)
                lags = None
            advance(reached - layer.index)
            reached = layer.index
            del layer  # free it before the next one is loaded
        advance(reached)
    for each in caches:
        each.keep(library)
    snapshots.take("statistics", lambda: {"boundaries": store.filled})


def _facts(
    opened: Source, tokens: Tensor, settings: ConversionSettings, gradients: bool, basis_of: BasisOf | None, first: int
) -> dict[str, Any]:
    """Return everything that determines the statistics; ``lags_of`` is the method, which chooses the key basis."""
    return {
        "source": opened.reader.fingerprint(),
        "tokens": token_hash(tokens),
        "gradients": gradients,
        "lags_of": basis_of and getattr(settings, "method", WITH_LAGS),
        **({"first_tokens": first} if first else {}),
        **{name: getattr(settings, name) for name in ("seed", "dtype", "batch_size")},
    }


def _from_weights(
    opened: Source,
    library: StatisticsLibrary,
    progress: Progress,
    basis_of: BasisOf | None,
    first_tokens: Sequence[int],
) -> None:
    """Fill the library from the weights, with lags up to the model's context."""
    context = opened.config.max_position_embeddings
    with progress.phase("statistics of weights", opened.layers) as advance:
        for index in range(opened.layers):
            if index in opened.stateful:
                advance()
                continue
            anatomy = opened.anatomy(index).to(torch.float64)
            of_weights = latent_weight_statistics if isinstance(anatomy, LatentAnatomy) else weight_statistics
            statistics = of_weights(anatomy, opened.input_scale(index).double())
            lags = None
            if basis_of is not None:
                lags = prior_lags(anatomy, basis_of(anatomy, statistics), statistics, context)
            for first in first_tokens:
                library.save(index, statistics, lags, first)
            advance()


def latent_weight_statistics(anatomy: LatentAnatomy, input_scale: Tensor) -> LayerStatistics:
    """Estimate statistics from weights, as :func:`surgery.calibration.library.weight_statistics` for other attention.

    Inputs are white noise times the weight of the norm before the attention; norms divide by their expected RMS. In
    place of moments of loss gradients it uses the queries' second moment for keys and ``W_oᵀ W_o`` for values, both
    mapped to the latent and scaled to equal trace.

    Args:
        anatomy: float64.
        input_scale: [D], the norm's weight.
    """
    scale, rank, unrotated = input_scale.to(anatomy.down), anatomy.rank, anatomy.unrotated_dim
    rows = anatomy.down * scale
    mean = torch.zeros(len(rows), dtype=rows.dtype) if anatomy.down_bias is None else anatomy.down_bias
    moment = rows @ rows.mT + torch.outer(mean, mean)
    factor = torch.ones_like(mean)
    factor[:rank] = (moment.diagonal()[:rank].mean() + anatomy.eps).rsqrt()
    order = torch.cat([torch.arange(rank, len(rows)), torch.arange(rank)])  # the rotary key first
    moment, mean = (moment * torch.outer(factor, factor))[order][:, order], (mean * factor)[order]

    query_moment = anatomy.q @ _query_input_moment(anatomy, scale) @ anatomy.q.mT  # [H, n + ρ, n + ρ]
    content, rotated = query_moment[:, :unrotated, :unrotated], query_moment[:, unrotated:, unrotated:]
    key_up, value_up = anatomy.up[:, :unrotated], anatomy.up[:, unrotated:]
    out = anatomy.o.permute(1, 0, 2)  # [H, D, e]
    grams = [(up.mT @ energy @ up).sum(0) for up, energy in ((key_up, content), (value_up, out.mT @ out))]
    tiny = torch.finfo(rows.dtype).tiny
    gradient = torch.block_diag(rotated.sum(0), sum(part / part.trace().clamp_min(tiny) for part in grams))

    return LayerStatistics(
        moment,
        gradient,
        pair_norm(rotated.diagonal(dim1=-2, dim2=-1)),
        pair_norm(moment.diagonal()[None, : anatomy.head_dim]),
        tokens=0,
        mean=mean,
    )


def _query_input_moment(anatomy: LatentAnatomy, scale: Tensor) -> Tensor:
    """Return the second moment of the queries' inputs [D, D], or of the query latent after its norm [q, q]."""
    if anatomy.q_down is None:
        return torch.diag(scale.square())
    rows = anatomy.q_down * scale
    moment = rows @ rows.mT
    if anatomy.q_down_bias is not None:
        moment = moment + torch.outer(anatomy.q_down_bias, anatomy.q_down_bias)
    weight = anatomy.q_norm.weight
    return moment / (moment.diagonal().mean() + anatomy.q_norm.eps) * torch.outer(weight, weight)


WITH_LAGS = "fisher"
"""Method whose statistics include lag statistics."""


class KeptStatistics:
    """Cache on disk of the moments of one source on one text; inputs of layers are not stored.

    ``facts`` determine the statistics, as JSON; the package's version is added.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]):
        self._parent, self._facts = Path(folder), {**facts, "version": __version__}
        self._folder = self._entry_folder(self._facts)

    def read_into(self, library: StatisticsLibrary) -> bool:
        """Copy cached statistics, with or without extra lag statistics, to the library; return whether any exist."""
        folders = [self._folder]
        if self._facts.get("lags_of") is None:
            folders.append(self._entry_folder({**self._facts, "lags_of": WITH_LAGS}))
        for folder in folders:
            if folder.is_dir():
                self._copy(folder, library.folder)
                return True
        return False

    def _entry_folder(self, facts: dict[str, Any]) -> Path:
        return self._parent / hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def keep(self, library: StatisticsLibrary) -> None:
        """Store the library's files atomically. Raises SurgeryError if the disk is full."""
        with disk_errors(self._folder):
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            staging = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder.parent))
            try:
                self._copy(library.folder, staging)
                (staging / "facts.json").write_text(json.dumps(self._facts, indent=2) + "\n")
                if not self._folder.exists():  # another process may have written it
                    os.replace(staging, self._folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def _copy(self, source: Path, target: Path) -> None:
        for path in source.glob(f"?????{StatisticsLibrary.suffix(self._facts.get('first_tokens', 0))}"):
            shutil.copyfile(path, target / path.name)
