"""Gathers what an MLA conversion needs to know of every layer, from text or from weights alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surgery.anatomy import AttentionAnatomy
from surgery.calibration.library import StatisticsLibrary, prior_lags, weight_statistics
from surgery.calibration.statistics import lag_statistics
from surgery.calibration.sweep import BoundaryStore, backward_sweep, forward_sweep
from surgery.layer_stream import LayerStream
from surgery.progress import Progress
from surgery.settings import ConvertSettings
from surgery.source import Source
from surgery.transforms import mla

# Lag statistics take the whole attention matrix of a sequence; eight sequences of a thousand tokens settle them.
LAG_SEQUENCES = 8


def gather(
    opened: Source,
    library: StatisticsLibrary,
    tokens: Tensor | None,
    store: BoundaryStore,
    settings: ConvertSettings,
    progress: Progress,
) -> None:
    """Fills the library from calibration tokens [N, T], or from the weights alone where there are none."""
    if tokens is None:
        context = opened.config.max_position_embeddings
        from_weights(library, opened.layers, opened.anatomy, opened.input_scale, settings, progress, context)
    else:
        from_text(library, opened.stream, opened.anatomy, tokens, store, settings, progress)


def from_text(
    library: StatisticsLibrary,
    stream: LayerStream,
    anatomy_of: Callable[[int], AttentionAnatomy],
    tokens: Tensor,
    store: BoundaryStore,
    settings: ConvertSettings,
    progress: Progress,
) -> None:
    """Fills the library by one forward and one backward sweep over calibration tokens [N, T].

    The forward sweep leaves what entered each layer in ``store``.
    """
    method = mla.METHODS[settings.method]
    with progress.phase("calibrate: forward", stream.num_layers) as advance:
        final = forward_sweep(stream, tokens, store, settings.batch_size, advance)
    with progress.phase("calibrate: backward", stream.num_layers) as advance:
        layers = backward_sweep(
            stream, anatomy_of, store, final, settings.batch_size, gradients=method.gradients, seed=settings.seed
        )
        for layer in layers:
            lags = None
            if method.lags:
                basis = mla.key_basis(method, layer.anatomy, layer.statistics, None)
                # Evenly spread, so that text with and without planted recalls is in it.
                chosen = torch.linspace(0, len(tokens) - 1, min(LAG_SEQUENCES, len(tokens))).long()
                lags = lag_statistics(layer.anatomy, basis, layer.inputs[chosen])
            library.save(layer.index, layer.statistics, lags)
            advance()


def from_weights(
    library: StatisticsLibrary,
    layers: int,
    anatomy_of: Callable[[int], AttentionAnatomy],
    input_scale: Callable[[int], Tensor],
    settings: ConvertSettings,
    progress: Progress,
    context: int,
) -> None:
    """Fills the library from the weights, layer by layer; ``context`` bounds the lags that are thought of."""
    method = mla.METHODS[settings.method]
    with progress.phase("statistics of weights", layers) as advance:
        for index in range(layers):
            anatomy = anatomy_of(index).to(torch.float64)
            statistics = weight_statistics(anatomy, input_scale(index).double())
            lags = None
            if method.lags:
                lags = prior_lags(anatomy, mla.key_basis(method, anatomy, statistics, None), statistics, context)
            library.save(index, statistics, lags)
            advance()
