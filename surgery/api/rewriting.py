"""Python functions of ``surgery convert``, ``slice`` and ``heal``.

Settings have the names of YAML files (``surgery config NAME``). torch is imported when a function is called, not with
this module. Without ``out`` the checkpoint is in a temporary folder that is removed with the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.api.model_arguments import Model, on_disk, output_path
from surgery.api.results import Checkpoint, Converted, Healed, ScoredHeads
from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.checkpoint.location import find_local
from surgery.checkpoint.output_path import settle_output
from surgery.common.file_settings import read_mapping
from surgery.common.human import seconds_of
from surgery.common.progress import Progress
from surgery.common.shipped import find_shipped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surgery.structures.registry import Target


def convert(
    model: Model,
    to: str = "mla",
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
    keep_code: bool = False,
    heal: str | float | None = None,
    progress: bool = True,
    **settings: Any,
) -> Converted:
    """Convert a model's attention to a smaller KV cache, as ``surgery convert`` does.

    Args:
        model: see :mod:`surgery.api.model_arguments`.
        to: mla, gqa, mqa, lowrank, crosslayer, hybrid or quantized.
        out: output folder; None for a temporary one (:meth:`surgery.api.results.Checkpoint.save` keeps it).
        tokenizer: tokenizer of a model in memory.
        config: YAML file of settings, or the name of a shipped one; ``settings`` override it.
        overwrite: replace an existing checkpoint in ``out``.
        keep_code: copy code files of the source, too.
        heal: time for distilling the result from the source, in seconds or as "5m".
        progress: show progress bars on standard error.
        **settings: settings of the target, such as ``kv_ratio``, ``method``, ``calibration``, ``device``; ``heads`` of
            a hybrid also takes the result of :func:`score_heads`.

    Returns:
        Losses and KV bytes before and after, the report, and the lazily loaded model.

    Raises:
        SurgeryError: a setting is unknown or impossible, or the model or ``out`` cannot be used; nothing is written.

    Example:
        >>> smaller = surgery.convert("builtin", to="gqa", kv_heads=2)
        >>> smaller.kv_ratio
        0.5
    """
    from surgery.structures.registry import find_target

    if isinstance(settings.get("heads"), ScoredHeads):
        settings["heads"] = str(settings["heads"].path)
    target = find_target(to)
    target_settings = target.settings(settings, None if config is None else find_shipped(config, "configs"))
    further = {"keep_code": keep_code, "command": f"surgery.convert(to={to!r})"}
    further |= {} if heal is None else {"heal": seconds_of(heal, "heal")}
    return _convert(target, target_settings, model, out, tokenizer, overwrite=overwrite, progress=progress, **further)


def slice(
    model: Model,
    kv_ratio: float,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    keep_code: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Converted:
    """Reduce a converted model to a smaller KV cache without calibration, as ``surgery slice`` does.

    Args:
        model: result of a conversion to lowrank or mla; see :mod:`surgery.api.model_arguments`.
        kv_ratio: share of the KV bytes of the model that it was converted from.
        out, tokenizer, overwrite, keep_code, progress: see :func:`convert`.
        **settings: fields of :class:`surgery.structures.slices.settings.SliceSettings`.

    Raises:
        SurgeryError: see :func:`convert`; or the model's latents are not ordered by importance.

    Example:
        >>> whole = surgery.convert("builtin", to="lowrank", kv_ratio=0.25)
        >>> surgery.slice(whole, 0.125).loss_after
    """
    from surgery.structures.registry import SLICE

    slice_settings = SLICE.settings({"kv_ratio": kv_ratio, **settings})
    further = {"keep_code": keep_code, "command": "surgery.slice()"}
    return _convert(SLICE, slice_settings, model, out, tokenizer, overwrite=overwrite, progress=progress, **further)


def heal(
    model: Model,
    teacher: Model | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    processes: int | None = None,
    launcher: str | Path | None = None,
    measure: bool | Mapping[str, Any] = True,
    overwrite: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Healed:
    """Recover a converted model's accuracy by distillation from its source, as ``surgery heal`` does.

    The training runs in a subprocess. With ``out``, the same call resumes an interrupted training.

    Args:
        model: converted model; see :mod:`surgery.api.model_arguments`.
        teacher: model to distill from; None for the source that the model's report names.
        out: output folder; None for a temporary one.
        tokenizer: tokenizer of models in memory.
        config: YAML file of settings, or the name of a shipped one; ``settings`` override it.
        processes: number of training processes.
        launcher: accelerate config: a file, or cpu-2, gpu-1, fsdp2.
        measure: whether to measure loss and recall of source, model and result, or a mapping of evaluation settings.
        overwrite: replace an existing checkpoint in ``out``.
        progress: show progress bars on standard error.
        **settings: fields of :class:`surgery.training.settings.HealSettings`, such as ``max_tokens``, ``data``,
            ``train``.

    Raises:
        SurgeryError: a setting is unknown or impossible, the training failed, or its result does not pass verification.

    Example:
        >>> smaller = surgery.convert("builtin", to="mqa")
        >>> surgery.heal(smaller, max_seconds=180).gap_closed
    """
    from surgery.healing.launchers import check_processes, find_launcher
    from surgery.training.settings import LEARNED_FROM, HealSettings

    check_processes(processes)
    launcher = None if launcher is None else find_launcher(launcher)
    config = None if config is None else find_shipped(config, "configs")
    all_settings = {**({} if config is None else read_mapping(config)), **settings}
    HealSettings.from_mapping({"teacher": "its source", **all_settings}, "heal" if config is None else str(config))
    if teacher is None and isinstance(model, Checkpoint) and not any(all_settings.get(name) for name in LEARNED_FROM):
        teacher = _first_source(model)
    with ExitStack() as opened:
        student = opened.enter_context(on_disk(model, tokenizer))
        if teacher is not None:
            settings["teacher"] = opened.enter_context(on_disk(teacher, tokenizer)).path
        output, temporary = opened.enter_context(output_path(out, f"{student.name}-healed"))
        settle_output(student.path, find_local(student.path), output, "healed", overwrite=overwrite)
        from surgery.healing.heal import HealRequest, heal_checkpoint

        request = HealRequest(
            student.path,
            output,
            config,
            settings,
            processes=processes,
            launcher=launcher,
            measure=dict(measure) if isinstance(measure, Mapping) else {} if measure else None,
            overwrite=overwrite,
            command="surgery.heal()",
        )
        healed = heal_checkpoint(request, Progress(silent=not progress))
        origin = {"source": student.source, "_device": student.device, "_kept": temporary}
        return Healed.of(healed.path, healed.healing, **origin)


def _convert(
    target: Target,
    settings: ConversionSettings,
    model: Model,
    out: str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    overwrite: bool,
    progress: bool,
    heal: float | None = None,
    **further: Any,
) -> Converted:
    """Convert a model and heal it for ``heal`` seconds, if not None; ``further`` are fields of the request."""
    with (
        on_disk(model, tokenizer, tokenized=settings.calibration != NO_CALIBRATION) as source,
        output_path(out, f"{source.name}-{target.name}") as (output, temporary),
    ):
        target.check_paths(source.path, output, settings, overwrite=overwrite)
        from surgery.structures.converter import convert
        from surgery.structures.request import ConversionRequest

        request = ConversionRequest(source.path, output, settings, overwrite=overwrite, **further)
        bars = Progress(silent=not progress)
        if heal is None:
            conversion = convert(request, progress=bars)
        else:
            from surgery.healing.convert_and_heal import convert_and_heal

            conversion = convert_and_heal(request, {"max_seconds": heal}, measure={}, progress=bars)
        origin = {"source": source.source, "_device": source.device, "_kept": temporary}
        return Converted.of(conversion.path, conversion.report.to_dict(), **origin)


def _first_source(model: Checkpoint) -> Checkpoint | str | None:
    """Return the original source of a result, as far back as it is known."""
    source = model.source
    while isinstance(source, Checkpoint) and source.source is not None:
        source = source.source
    return source
