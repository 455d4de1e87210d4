"""How compressible a layer's keys and values are: the spectrum of their loss-weighted energy, as numbers and a plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surgery.calibration.statistics import LayerStatistics
from surgery.checkpoint.pictures import save_figure
from surgery.transforms.algebra import damp, reduced_rank_projection
from surgery.transforms.mla import METRIC_DAMPING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Ranks as shares of the full KV width, and shares of the energy whose rank is asked for.
WIDTHS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)
WIDTH_NAMES = ("1/16", "1/8", "1/4", "3/8", "1/2", "3/4")
LEAST_WIDTH = 1 / 32  # where the plot begins
SHARES = (0.9, 0.99, 0.999)
SOURCES = {
    "builtin": "Python's standard library",
    "self": "its own samples",
    "none": "nothing: its weights alone",
}


@dataclass(frozen=True)
class LayerSpectrum:
    """The energy of one layer's [k ; v], keys unrotated, along its best directions.

    With C the second moment of [k ; v], tokens weighted by the gradient that they meet, and M that of its loss
    gradients, the eigenvalues of M^½ C M^½ are what each direction of a latent carries; those left out add up to twice
    the expected loss in nats per token.

    Attributes:
        energy: float64 [n], largest first.
    """

    layer: int
    energy: Tensor

    @classmethod
    def of(cls, layer: int, statistics: LayerStatistics) -> LayerSpectrum:
        """From a layer's statistics, in the metric of the loss."""
        metric = damp(statistics.metric, METRIC_DAMPING)
        _, _, energy = reduced_rank_projection(statistics.met_moment, metric, 0)
        return cls(layer, energy)

    @property
    def width(self) -> int:
        """n, the full KV width."""
        return len(self.energy)

    def kept(self, rank: int) -> float:
        """Share of the energy that fits in a rank."""
        return 1.0 - float(self.lost()[rank])

    def kept_at(self, width: float) -> float:
        """The same for a rank given as a share of the full width."""
        return self.kept(round(width * self.width))

    def rank_for(self, share: float) -> int:
        """The smallest rank that holds a share of the energy."""
        return int((self.lost() > 1 - share).sum())

    def lost(self) -> Tensor:
        """Share of the energy beyond each rank 0 … n, [n + 1]; falls from 1 to 0."""
        # Added up from the smallest on: small tails stay exact.
        tails = self.energy.flip(0).cumsum(0).flip(0)
        tails = torch.cat([tails, tails.new_zeros(1)])
        return tails / tails[0].clamp_min(torch.finfo(tails.dtype).tiny)

    def to_dict(self) -> dict:
        return {
            "layer": self.layer,
            "width": self.width,
            "kept": {name: self.kept_at(width) for name, width in zip(WIDTH_NAMES, WIDTHS, strict=True)},
            "rank_for": {str(share): self.rank_for(share) for share in SHARES},
        }


def draw_spectra(spectra: list[LayerSpectrum], name: str, calibration: str, path: str | Path) -> Path:
    """Writes :func:`spectra_figure`; the format is that of the suffix.

    Raises:
        SurgeryError: the file cannot be written, or its suffix names no format.
    """
    return save_figure(spectra_figure(spectra, name, calibration), Path(path), dpi=150)


def spectra_figure(spectra: list[LayerSpectrum], name: str, calibration: str) -> Figure:
    """Draws the lost share over the rank, one curve a layer, both axes logarithmic."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, Normalize
    from matplotlib.figure import Figure

    layers = len(spectra)
    colours = colormaps["viridis"].resampled(layers) if layers <= 12 else colormaps["viridis"]
    norm = BoundaryNorm([i - 0.5 for i in range(layers + 1)], layers) if layers <= 12 else Normalize(0, layers - 1)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for spectrum in spectra:
        rank = torch.arange(1, spectrum.width)
        # At the full width nothing is lost, which a logarithm cannot show.
        axes.loglog(rank / spectrum.width, spectrum.lost()[1:-1], color=colours(norm(spectrum.layer)), linewidth=1.6)
    for width in WIDTHS:
        axes.axvline(width, color="0.85", linewidth=0.8, zorder=0)
    axes.set_xticks([LEAST_WIDTH, *WIDTHS, 1], ["1/32", *WIDTH_NAMES, "1"])
    axes.set_xticks([], minor=True)
    axes.set_xlim(LEAST_WIDTH, 1)
    axes.set_ylim(_floor(spectra), 1)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel(f"rank, as a share of the KV width ({spectra[0].width} numbers per token and layer)")
    axes.set_ylabel("lost share of the loss-weighted KV energy")
    basis = SOURCES.get(calibration, calibration)
    axes.set_title(f"{name}: how far keys and values can be compressed\ncalibrated on {basis}", fontsize=11)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="layer", pad=0.02)
    if layers <= 12:
        bar.set_ticks(range(layers), labels=[str(layer) for layer in range(layers)])
        bar.ax.minorticks_off()
    return figure


def _floor(spectra: list[LayerSpectrum]) -> float:
    """The lower end of the plot: what the least compressible layer loses at 3/4, in whole decades, 1e-8 at least."""
    most = max(float(spectrum.lost()[round(0.75 * spectrum.width)]) for spectrum in spectra)
    return min(0.1, 10.0 ** math.floor(math.log10(max(most, 1e-8))))
