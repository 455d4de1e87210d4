"""Context of a running conversion, and the passes over the layers that structures share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from surgery.calibration import layer_statistics
from surgery.calibration.layer_statistics import BasisOf
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.sweep import BoundaryStore
from surgery.calibration.texts import Texts
from surgery.checkpoint.snapshots import Snapshots
from surgery.common.progress import Progress
from surgery.running.layer_stream import StreamedLayer
from surgery.running.source import OwnSource, Source
from surgery.structures.converted_layers import ConvertedLayers
from surgery.structures.stages import StageTracker

Opened = TypeVar("Opened", bound="Source | OwnSource")
Settings = TypeVar("Settings", bound=ConversionSettings)


@dataclass(frozen=True)
class ConversionContext(Generic[Opened, Settings]):
    """Context of a running conversion.

    Attributes:
        library: statistics of every layer, after :meth:`gather`.
        store: inputs of every layer from the forward sweep over the calibration text.
        converted: new tensors of every layer.
        snapshots: snapshots from which an interrupted conversion resumes.
        refit_sequences: number of calibration sequences to which output projections are refitted; None for all.
    """

    opened: Opened
    settings: Settings
    texts: Texts
    library: StatisticsLibrary
    store: BoundaryStore
    converted: ConvertedLayers
    progress: Progress
    snapshots: Snapshots = field(default_factory=Snapshots)
    refit_sequences: int | None = None

    @classmethod
    def in_folder(
        cls,
        snapshots: Snapshots,
        opened: Opened,
        settings: Settings,
        texts: Texts,
        progress: Progress,
    ) -> ConversionContext[Opened, Settings]:
        """Create a context with files next to its snapshots, or in a temporary folder if these have no folder."""
        folder = snapshots.folder
        library, store = StatisticsLibrary(folder), BoundaryStore(folder)
        return cls(opened, settings, texts, library, store, ConvertedLayers(folder), progress, snapshots)

    def gather(
        self, *, gradients: bool = True, basis_of: BasisOf | None = None, first_tokens: Sequence[int] = (0,)
    ) -> None:
        """Fill the library by :func:`surgery.calibration.layer_statistics.gather`."""
        layer_statistics.gather(self, gradients=gradients, basis_of=basis_of, first_tokens=first_tokens)

    @torch.no_grad()
    def attention_inputs(self, index: int, layer: StreamedLayer) -> Tensor:
        """Return the inputs [N, T, D] of a layer's attention in the source model on the calibration text."""
        stream, rows = self.opened.stream, self.store.load(index).split(self.settings.batch_size)
        return torch.cat([layer.attention_inputs(part.to(stream.device, stream.dtype)) for part in rows])

    def stage_runs(
        self, stages: tuple[str, ...], *, exact: Collection[str] = (), steps: Collection[str] = ()
    ) -> StageTracker:
        """Create the tracker of the conversion's stages over its held-out text."""
        held_out, size = self.texts.held_out, self.settings.batch_size
        return StageTracker(self.opened.stream, held_out, size, stages, exact=exact, steps=steps)

    def pass_layers(
        self,
        convert: Callable[[int], Any],
        runs: StageTracker,
        *types: type,
        settled: Callable[[int], bool] = lambda layer: True,
    ) -> list[Any]:
        """Convert every layer in order and return the results; resume after the last layer with a snapshot.

        Args:
            convert: converts a layer, runs the stages through it, and keeps all other state on disk.
            types: classes in its results, for snapshots.
            settled: whether the next layer needs only the stages from a layer, so that a snapshot can be taken.
        """
        results = []
        if state := self.snapshots.last("layers", *types):
            results, runs.hidden = state["results"], state["ladder"]
        with self.progress.phase("convert", self.opened.layers) as advance:
            advance(len(results))
            for layer in range(len(results), self.opened.layers):
                results.append(convert(layer))
                if settled(layer):
                    snapshot = {"results": results, "ladder": runs.hidden}
                    self.snapshots.take("layers", lambda snapshot=snapshot: snapshot)
                advance()
        return results

    def layers(self, phase: str = "convert") -> Iterator[int]:
        """Yield every layer in order, with a progress bar."""
        with self.progress.phase(phase, self.opened.layers) as advance:
            for layer in range(self.opened.layers):
                yield layer
                advance()
