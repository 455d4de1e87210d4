"""What a running conversion has in hand, and the ways through the layers that structures share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from surgery.calibration import layer_statistics
from surgery.calibration.layer_statistics import BasisOf
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.settings import ConversionSettings
from surgery.calibration.sweep import BoundaryStore
from surgery.calibration.texts import Texts
from surgery.checkpoint.snapshots import Snapshots
from surgery.common.progress import Progress
from surgery.running.processes import ALONE, Processes
from surgery.running.source import OwnSource, Source
from surgery.structures.alternatives import Alternatives
from surgery.structures.fit_trial import FitTrial
from surgery.structures.sequential_fit import SequentialFit
from surgery.structures.shared_fits import SharedFits
from surgery.structures.stages import StageRuns

Opened = TypeVar("Opened", bound="Source | OwnSource")
Settings = TypeVar("Settings", bound=ConversionSettings)


@dataclass(frozen=True)
class Work(Generic[Opened, Settings]):
    """What a conversion has in hand once it runs.

    Attributes:
        library: statistics of every layer, once they are gathered.
        store: what entered every layer in the forward sweep over the calibration text.
        alternatives: new tensors of every layer in more than one form.
        snapshots: what a conversion that was killed goes on from.
        processes: that share the calibration and, on processors, the fits.
    """

    opened: Opened
    settings: Settings
    texts: Texts
    library: StatisticsLibrary
    store: BoundaryStore
    alternatives: Alternatives
    progress: Progress
    snapshots: Snapshots = field(default_factory=Snapshots)
    processes: Processes = ALONE

    @cached_property
    def shared_fits(self) -> SharedFits:
        """Has fits done by all that share them."""
        # Sums reach other processes through the host, which takes longer than an accelerator's products.
        sharing = self.processes if self.opened.stream.device.type == "cpu" else ALONE
        return SharedFits(sharing, self.store, self.opened.layers)

    @classmethod
    def in_folder(
        cls,
        snapshots: Snapshots,
        opened: Opened,
        settings: Settings,
        texts: Texts,
        progress: Progress,
        processes: Processes = ALONE,
    ) -> Work[Opened, Settings]:
        """Work that keeps what it learns in files beside its snapshots; without a folder in temporary ones."""
        folder = snapshots.folder
        library, store = StatisticsLibrary(folder), BoundaryStore(folder, settings.activation_memory)
        return cls(opened, settings, texts, library, store, Alternatives(folder), progress, snapshots, processes)

    def gather(self, *, gradients: bool = True, basis_of: BasisOf | None = None) -> None:
        """Fills the library, by :func:`surgery.calibration.layer_statistics.gather`."""
        layer_statistics.gather(self, gradients=gradients, basis_of=basis_of)

    def fits(self, wanted: bool) -> bool:
        """Whether layers are fitted: the method has a fit, steps are asked for and there is text to fit on."""
        return wanted and self.texts.calibration is not None and self.settings.fit_steps > 0

    def fit(self, runs: StageRuns, closed: str, *fitted: str) -> SequentialFit | None:
        """The layer-wise fit of stages some of which are fitted, held against closed forms where they are one too."""
        stream, texts = self.opened.stream, self.texts
        if fitted[0] not in runs.hidden:
            return None
        worth = self.settings.fit_worth
        trial = FitTrial(stream, texts.held_out, runs, closed, fitted, worth) if closed in runs.hidden else None
        return SequentialFit(stream, self.store, texts.calibration, self.settings.batch_size, trial, self.shared_fits)

    def stage_runs(
        self, stages: tuple[str, ...], *, exact: Collection[str] = (), steps: Collection[str] = ()
    ) -> StageRuns:
        """The stages of the conversion over its held-out text."""
        held_out, size = self.texts.held_out, self.settings.batch_size
        return StageRuns(self.opened.stream, held_out, size, stages, exact=exact, steps=steps)

    def pass_layers(
        self,
        convert: Callable[[int, SequentialFit | None], Any],
        runs: StageRuns,
        fit: SequentialFit | None,
        *types: type,
        settled: Callable[[int], bool] = lambda layer: True,
    ) -> list[Any]:
        """What ``convert`` says of every layer; goes on after the last layer that is surely done.

        Args:
            convert: carries the stages and the fit through a layer; all else that it makes is on disk. It is given
                no fit once that was given up.
            types: classes in what it says.
            settled: whether nothing of a layer is needed for the next but stages and fit.
        """
        said = []
        if state := self.snapshots.last("layers", *types):
            said, runs.hidden, runs.ahead = state["said"], state["ladder"], tuple(state["ahead"])
            if fit:
                fit.restore(state["fit"])
        with self.progress.phase("convert", self.opened.layers) as advance:
            advance(len(said))
            for layer in range(len(said), self.opened.layers):
                said.append(convert(layer, fit if fit and not fit.given_up else None))
                if fit:
                    fit.settle(layer)
                if settled(layer):
                    done = {"said": said, "ladder": runs.hidden, "ahead": runs.ahead}
                    self.snapshots.take("layers", lambda done=done: done | {"fit": fit and fit.state()})
                advance()
        return said

    def layers(self, phase: str = "convert") -> Iterator[int]:
        """Every layer in order, with a bar."""
        with self.progress.phase(phase, self.opened.layers) as advance:
            for layer in range(self.opened.layers):
                yield layer
                advance()
