"""Results of the Python functions: metrics, reports, and lazily loaded models."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.common.pictures import Svg
from surgery.common.temporary import TemporaryFolder

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from surgery.heads.pattern import HeadPattern


@dataclass(frozen=True)
class Checkpoint:
    """Written checkpoint with its lazily loaded model.

    Attributes:
        path: folder of the checkpoint. Without ``out`` it is temporary, and removed with this object.
        source: the model argument: a path, hub id or result; None for a model in memory.
    """

    path: Path
    source: Checkpoint | str | None = field(default=None, repr=False, kw_only=True)
    _device: str | None = field(default=None, repr=False, kw_only=True)
    _kept: TemporaryFolder | None = field(default=None, repr=False, compare=False, kw_only=True)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model, loaded at first access in its own dtype, on the device of the model argument (CPU for files).

        Raises:
            SurgeryError: transformers cannot load it.
        """
        from surgery.running.models import whole_model

        return whole_model(self.path).to(self._device or "cpu")

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The checkpoint's tokenizer.

        Raises:
            SurgeryError: the checkpoint has none.
        """
        from surgery.running.loading import load_tokenizer

        return load_tokenizer(self.path)

    def save(self, out: str | Path, *, overwrite: bool = False) -> Path:
        """Copy the checkpoint to a folder atomically.

        Raises:
            SurgeryError: the folder exists without ``overwrite``, or cannot be written.
        """
        from surgery.checkpoint.disk import disk_errors, tree_bytes
        from surgery.checkpoint.staging import Staging, check_output

        check_output(self.path, Path(out))
        staging = Staging(Path(out), overwrite=overwrite)
        staging.check_space(tree_bytes(self.path))
        staging.create()
        try:
            with disk_errors(staging.partial):
                shutil.copytree(self.path, staging.partial, dirs_exist_ok=True)
            staging.commit()
        except BaseException:
            staging.discard()
            raise
        return staging.out


@dataclass(frozen=True)
class Converted(Checkpoint):
    """Result of :func:`surgery.convert` and :func:`surgery.slice`.

    Attributes:
        loss_before, loss_after: nats per token on held-out text, of the source and of the written checkpoint; None
            without calibration. With ``heal`` both are from the evaluation of the healing.
        recall_before, recall_after: share of planted facts that are found; None without calibration.
        kv_bytes_before, kv_bytes_after: KV bytes per token over all layers; the second is counted in the live cache.
        report: the full report: settings, stages, layers, hashes, versions, engines.
    """

    loss_before: float | None
    loss_after: float | None
    recall_before: float | None
    recall_after: float | None
    kv_bytes_before: float
    kv_bytes_after: float
    report: dict[str, Any] = field(repr=False)

    @property
    def kv_ratio(self) -> float:
        """KV bytes per token as a share of the source's, at ``report["kv"]["measured_at_tokens"]`` tokens.

        Caches with sinks or a window have a smaller share of longer texts: ``report["kv"]["ratio_at"]``.
        """
        return self.kv_bytes_after / self.kv_bytes_before

    @classmethod
    def of(cls, path: Path, report: dict[str, Any], **others: Any) -> Converted:
        """Build the result from a conversion's report."""
        stages, kv = (report.get("healing") or {}).get("quality") or report["ladder"], report["kv"]
        first, last = stages[0], stages[-1]
        return cls(
            path,
            first["loss"],
            last["loss"],
            first["recall"],
            last["recall"],
            kv["source_bytes_per_token"],
            kv["measured_bytes_per_token"],
            report,
            **others,
        )


@dataclass(frozen=True)
class Healed(Checkpoint):
    """Result of :func:`surgery.heal`.

    Attributes:
        loss_source, loss_before, loss_after: nats per token on held-out text, of the teacher, the student and the
            healed checkpoint; None if not measured.
        recall_source, recall_before, recall_after: share of planted facts that are found; None if not measured.
        gap_closed: recovered share of the loss increase; None if the conversion had increased the loss by less than
            0.005 nats.
        report: the section ``healing`` of the checkpoint's report.
    """

    loss_source: float | None
    loss_before: float | None
    loss_after: float | None
    recall_source: float | None
    recall_before: float | None
    recall_after: float | None
    gap_closed: float | None
    report: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, path: Path, healing: dict[str, Any], **others: Any) -> Healed:
        """Build the result from the record of a healing."""
        measured = {row["name"]: row for row in healing["quality"]}
        stages = [measured.get(name) or {} for name in ("source", "converted", "healed")]
        losses, recalls = ([stage.get(name) for stage in stages] for name in ("loss", "recall"))
        return cls(path, *losses, *recalls, healing["gap_closed"], healing, **others)


@dataclass(frozen=True)
class Row:
    """Results of one model of an evaluation.

    Attributes:
        role: "baseline", "checkpoint", or "variant" for a cheap baseline, a variant of the baseline.
        loss: nats per token on held-out text; None if not measured.
        recall: share of planted facts that are found; None if not measured.
        kv_bytes: KV bytes per token over all layers, counted in the live cache.
        kv_ratio: KV bytes as a share of the baseline's; None without a baseline.
    """

    name: str
    role: str
    loss: float | None
    recall: float | None
    kv_bytes: float
    kv_ratio: float | None


@dataclass(frozen=True)
class Evaluated:
    """Result of :func:`surgery.evaluate`; notebooks display its text.

    Attributes:
        rows: results by model, the baseline first, cheap baselines last.
        report: all results, as in report.json.
        folder: folder of the report's files; None without ``out``.
    """

    rows: tuple[Row, ...]
    report: dict[str, Any] = field(repr=False)
    folder: Path | None = None

    def __getitem__(self, name: str) -> Row:
        """Return the row of a model by name."""
        return next(row for row in self.rows if row.name == name)

    @cached_property
    def text(self) -> str:
        """The report in Markdown, without its plots: verdict and tables."""
        from surgery.eval.report import markdown

        return markdown.render(self.report)

    def plot(self, name: str = "pareto-loss") -> Svg | None:
        """Return one plot; None if the report has no data for it.

        Args:
            name: pareto-loss, pareto-recall, loss-by-position, needle, speed or layer-errors.

        Raises:
            SurgeryError: the name is unknown.
        """
        from surgery.common.file_settings import did_you_mean
        from surgery.eval.report.figures import PLOTS
        from surgery.eval.report.style import to_svg

        if name not in PLOTS:
            raise SurgeryError(f"plot {name!r}: choose {', '.join(PLOTS)}{did_you_mean(name, list(PLOTS))}")
        figure = PLOTS[name].draw(self.report)
        return None if figure is None else Svg(to_svg(figure))

    def _repr_markdown_(self) -> str:
        return self.text

    @classmethod
    def of(cls, report: dict[str, Any], folder: Path | None) -> Evaluated:
        """Build the result from the report of an evaluation."""
        rows = tuple(
            Row(
                row["name"],
                row["role"],
                (row["results"].get("loss") or {}).get("loss"),
                (row["results"].get("recall") or {}).get("accuracy"),
                row["kv"]["bytes_per_token"],
                row["kv"]["ratio"],
            )
            for row in report["rows"]
        )
        return cls(rows, report, folder)


@dataclass(frozen=True)
class ScoredHeads:
    """Result of :func:`surgery.score_heads`, an argument ``heads`` of a hybrid conversion.

    Attributes:
        path: pattern file. Without ``out`` it is temporary, and removed with this object.
        pattern: the scores with their metadata.
    """

    path: Path
    pattern: HeadPattern = field(repr=False)
    _kept: TemporaryFolder | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def scores(self) -> Tensor:
        """Scores [layers, KV heads] in float32, higher for heads that need their whole context."""
        return self.pattern.scores

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings with which the heads were scored."""
        return self.pattern.settings

    @cached_property
    def plot(self) -> Svg:
        """Heat map of the scores."""
        from surgery.eval.report.style import to_svg
        from surgery.heads.heat_map import head_map

        return Svg(to_svg(head_map(self.pattern)))

    def _repr_svg_(self) -> str:
        return str(self.plot)
