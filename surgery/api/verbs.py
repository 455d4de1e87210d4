"""The verbs of the command line as functions, for notebooks and programs. Torch is imported when one is called.

Each takes a model as a folder, a GGUF file, a hub id, a name (``builtin``, ``smollm2``), a model of transformers in
memory with its tokenizer, or the result of another. Settings have the names of YAML files (``surgery config NAME``).
Nothing is written without an ``out``: what is made lies in a temporary folder that goes with the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.api.given_models import Model, OnDisk, on_disk
from surgery.api.results import Checkpoint, Converted, Evaluated, Healed, ScoredHeads
from surgery.calibration.settings import NO_CALIBRATION, ConversionSettings
from surgery.checkpoint.location import find_local
from surgery.checkpoint.output_place import settle_output
from surgery.common.file_settings import read_mapping
from surgery.common.progress import Progress
from surgery.common.shipped import find_shipped
from surgery.common.temporary import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surgery.inspection.checks import Checked
    from surgery.inspection.inspect import Inspection
    from surgery.planning.plan import Plan
    from surgery.structures.registry import Target


def inspect(
    model: Model,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    gpu: str = "h200",
    allow_pickle: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Inspection:
    """What attention a model has, what it caches, and what it can be converted to: ``surgery inspect``.

    Args:
        model: see :mod:`surgery.api.verbs`.
        tokenizer: of a model in memory; needed with ``calibration``.
        gpu: whose decoding speed is predicted: h200, h100, a100, or a file of ``surgery bench kernels``.
        allow_pickle: read pickled weights if there are no others.
        progress: show bars on standard error.
        **settings: of :class:`surgery.structures.mla.settings.ConvertSettings`; with ``calibration`` the result has
            ``spectra`` and a ``plot`` of how compressible every layer is.

    Raises:
        SurgeryError: the model cannot be read, or a setting is unknown or impossible.

    Example:
        >>> surgery.inspect("builtin").kv["bytes_per_token"]
        3072
    """
    from surgery.forecast.speed import find_gpu
    from surgery.structures.mla.settings import ConvertSettings

    asked, ceilings = ConvertSettings.from_mapping(settings, "inspect"), find_gpu(gpu)
    spectra = settings.get("calibration") is not None
    with on_disk(model, tokenizer, tokenized=spectra and asked.calibration != "none") as source:
        from surgery.inspection.inspect import inspect_checkpoint

        return inspect_checkpoint(
            source.path,
            asked,
            spectra=spectra,
            allow_pickle=allow_pickle,
            gpu=ceilings,
            progress=Progress(silent=not progress),
        )


def plan(
    model: Model,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    allow_pickle: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Plan:
    """Chooses a conversion for a budget, by trying what there is on held-out text: ``surgery plan``.

    Args:
        model: see :mod:`surgery.api.verbs`.
        tokenizer: of a model in memory.
        allow_pickle: read pickled weights if there are no others.
        progress: show bars on standard error.
        **settings: of :class:`surgery.planning.settings.PlanSettings`: ``kv_ratio``, ``memory`` with ``context`` and
            ``batch``, or ``max_loss``; ``engine``, ``allow``, ``calibration`` …

    Returns:
        What was measured, and the choice: ``surgery.convert(model, to=plan.chosen.to, **plan.chosen.asked)``.

    Raises:
        SurgeryError: the model cannot be read or converted, a setting is unknown, or nothing meets the budget.

    Example:
        >>> plan = surgery.plan("builtin", kv_ratio=0.25, allow=("lowrank", "quantized", "bits"))
        >>> surgery.convert("builtin", to=plan.chosen.to, **plan.chosen.asked)
    """
    from surgery.planning.settings import PlanSettings

    asked = PlanSettings.from_mapping(settings, "plan")
    with on_disk(model, tokenizer, tokenized=True) as source:
        from surgery.planning.plan import make_plan

        return make_plan(source.path, asked, allow_pickle=allow_pickle, progress=Progress(silent=not progress))


def verify(model: Model, *, device: str = "auto", seed: int = 0, progress: bool = True) -> Checked:
    """Checks a checkpoint as its conversion did, at any time and place: ``surgery verify``.

    Args:
        model: see :mod:`surgery.api.verbs`.
        device: where layers run.
        seed: of the random tokens that are run.
        progress: show bars on standard error.

    Returns:
        ``checks``, each with a name, an outcome (passed, failed, not checked) and what was seen; ``failed`` of them.

    Raises:
        SurgeryError: there is no checkpoint whose files fit together.

    Example:
        >>> surgery.verify("ckpt-mla").failed
        []
    """
    with on_disk(model, None, tokenized=False) as source:
        from surgery.inspection.checks import verify_checkpoint

        return verify_checkpoint(source.path, device=device, seed=seed, progress=Progress(silent=not progress))


def convert(
    model: Model,
    to: str = "mla",
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    processes: int = 1,
    progress: bool = True,
    **settings: Any,
) -> Converted:
    """Converts a model's attention so that its KV cache is smaller: ``surgery convert``.

    Args:
        model: see :mod:`surgery.api.verbs`.
        to: mla, gqa, mqa, lowrank, crosslayer, hybrid or quantized.
        out: folder to write; without it the result is temporary (:meth:`surgery.api.results.Checkpoint.save` keeps it).
        tokenizer: of a model in memory.
        config: YAML file of settings, or the name of one that ships; ``settings`` win over it.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        processes: that share the calibration, this one and others that it starts.
        progress: show bars on standard error.
        **settings: of the target, such as ``kv_ratio``, ``method``, ``calibration``, ``device``; ``heads`` of a hybrid
            also takes what :func:`score_heads` returns.

    Returns:
        Losses and KV bytes before and after, the report, and the model on demand.

    Raises:
        SurgeryError: a setting is unknown or impossible, or the model or ``out`` cannot be used; nothing is left.

    Example:
        >>> smaller = surgery.convert("builtin", to="gqa", kv_heads=2)
        >>> smaller.kv_ratio
        0.5
    """
    from surgery.structures.registry import find_target

    if isinstance(settings.get("heads"), ScoredHeads):
        settings["heads"] = str(settings["heads"].path)
    target = find_target(to)
    asked = target.settings(settings, None if config is None else find_shipped(config, "configs"))
    call = f"convert(to={to!r})"
    return _convert(target, asked, model, out, tokenizer, overwrite, allow_pickle, progress, call, processes)


def slice(
    model: Model,
    kv_ratio: float,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Converted:
    """Makes a smaller model from a converted one, without calibration: ``surgery slice``.

    Args:
        model: what ``to`` lowrank, crosslayer (cascade) or mla made; see :mod:`surgery.api.verbs`.
        kv_ratio: share of the KV bytes of the model that it was converted from.
        out, tokenizer, overwrite, allow_pickle, progress: as for :func:`convert`.
        **settings: of :class:`surgery.structures.slices.settings.SliceSettings`.

    Raises:
        SurgeryError: as :func:`convert`, or the model has no latents in order.

    Example:
        >>> whole = surgery.convert("builtin", to="lowrank", kv_ratio=0.25)
        >>> surgery.slice(whole, 0.125).loss_after
    """
    from surgery.structures.registry import SLICE

    asked = SLICE.settings({"kv_ratio": kv_ratio, **settings})
    return _convert(SLICE, asked, model, out, tokenizer, overwrite, allow_pickle, progress, "slice()")


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
    """Gives a converted model its accuracy back by distillation from its source: ``surgery heal``.

    The training runs in processes of its own. With an ``out`` an interrupted one goes on when it is asked for again.

    Args:
        model: what was converted; see :mod:`surgery.api.verbs`.
        teacher: its source; without it what the model was made from, as its report names it.
        out: folder to write; without it the result is temporary.
        tokenizer: of models in memory.
        config: YAML file of settings, or the name of one that ships; ``settings`` win over it.
        processes: to train in.
        launcher: accelerate configuration: a file, or cpu-2, gpu-1, fsdp2, zero3.
        measure: loss and recall of source, model and result; a mapping has settings of the evaluation.
        overwrite: replace an existing checkpoint in ``out``.
        progress: show bars on standard error.
        **settings: of :class:`surgery.training.settings.HealSettings`, such as ``max_tokens``, ``data``, ``train``.

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
    said = {**({} if config is None else read_mapping(config)), **settings}
    HealSettings.from_mapping({"teacher": "its source", **said}, "heal" if config is None else str(config))
    if teacher is None and isinstance(model, Checkpoint) and not any(said.get(name) for name in LEARNED_FROM):
        teacher = _first_source(model)
    with ExitStack() as opened:
        student = opened.enter_context(on_disk(model, tokenizer))
        if teacher is not None:
            settings["teacher"] = opened.enter_context(on_disk(teacher, tokenizer)).path
        place, kept = opened.enter_context(_place(out, f"{student.name}-healed"))
        settle_output(student.path, find_local(student.path), place, "healed", overwrite=overwrite)
        from surgery.healing.heal import HealRequest, heal_checkpoint

        request = HealRequest(
            student.path,
            place,
            config,
            settings,
            processes=processes,
            launcher=launcher,
            measure=dict(measure) if isinstance(measure, Mapping) else {} if measure else None,
            overwrite=overwrite,
            command="surgery.heal()",
        )
        healed = heal_checkpoint(request, Progress(silent=not progress))
        found = {"source": _lasting(model, student), "_device": student.device, "_kept": kept}
        return Healed.of(healed.path, healed.healing, **found)


def evaluate(
    models: Model | Sequence[Model] | Mapping[str, Model],
    baseline: Model | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    title: str | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Evaluated:
    """Measures models beside their source and beside cheaper forms of it: ``surgery eval``.

    Args:
        models: one or more, by name if they are a mapping; see :mod:`surgery.api.verbs`.
        baseline: their source, which differences are to.
        out: folder of results and report, from which an interrupted evaluation goes on; without it nothing is kept.
        tokenizer: of models in memory.
        config: YAML file of settings, or the name of one that ships; ``settings`` win over it.
        title: of the report.
        overwrite: replace a report of other models, tasks or settings.
        allow_pickle: read pickled weights if there are no others.
        trust_remote_code: run code that lies beside the weights.
        progress: show bars on standard error.
        **settings: of :class:`surgery.evaluation.settings.EvalSettings`, such as ``tasks``, ``data``, ``windows``.

    Raises:
        SurgeryError: something asked for cannot be measured; mostly found before anything is.

    Example:
        >>> smaller = surgery.convert("builtin", to="mqa")
        >>> surgery.evaluate({"mqa": smaller}, "builtin", tasks=["loss", "recall"])["mqa"].recall
    """
    from surgery.evaluation.settings import EvalSettings

    read = {} if config is None else read_mapping(find_shipped(config, "configs"))
    asked = EvalSettings.from_mapping({**read, **settings}, "evaluate" if config is None else str(config))
    with ExitStack() as opened:
        given = _rows(models, tokenizer, opened)
        compared = None if baseline is None else opened.enter_context(on_disk(baseline, tokenizer))
        folder = Path(opened.enter_context(TemporaryFolder("eval")) if out is None else out)
        from surgery.evaluation.output import track, write_report
        from surgery.evaluation.run import Request
        from surgery.evaluation.run import evaluate as run

        request = Request(
            given,
            None if compared is None else compared.path,
            folder,
            asked,
            command="surgery.evaluate",
            title=title,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            trust_remote_code=trust_remote_code,
        )
        found = run(request, Progress(silent=not progress))
        if out is not None and found.is_main:
            write_report(found.report, folder)
        if asked.wandb and found.is_main:
            track(found.report, folder, asked.wandb, asked.wandb_mode)
        return Evaluated.of(found.report, None if out is None else folder)


def score_heads(
    model: Model,
    method: str = "duo",
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    progress: bool = True,
    **settings: Any,
) -> ScoredHeads:
    """Scores every KV head, the higher the more it needs its whole context: ``surgery heads``.

    Args:
        model: see :mod:`surgery.api.verbs`.
        method: duo, prulong, needle, induction, kvzip, attention-area or ablation.
        out: file to write, NAME.safetensors, with a picture beside it; without it the result is temporary.
        tokenizer: of a model in memory.
        config: YAML file of settings, or the name of one that ships; arguments win over it.
        overwrite: replace existing files.
        allow_pickle: read pickled weights if there are no others.
        progress: show bars on standard error.
        **settings: of :class:`surgery.heads.settings.HeadSettings`, such as ``sinks``, ``recent``, ``length``.

    Raises:
        SurgeryError: a setting is unknown or impossible, or the model's heads cannot be scored.

    Example:
        >>> scored = surgery.score_heads("builtin", "induction", sinks=16, recent=112)
        >>> surgery.convert("builtin", to="hybrid", heads=scored, streaming=0.5).kv_ratio
    """
    from surgery.heads.settings import SUFFIX, HeadSettings

    read = {} if config is None else read_mapping(find_shipped(config, "configs"))
    asked = HeadSettings.from_mapping({**read, "method": method, **settings}, "score_heads")
    with (
        on_disk(model, tokenizer) as source,
        _place(out, f"{source.name}-heads-{method}{SUFFIX}") as (place, kept),
    ):
        from surgery.heads.scoring import score_heads as score

        said = {"overwrite": overwrite, "allow_pickle": allow_pickle, "progress": Progress(silent=not progress)}
        scored = score(source.path, place, asked, **said)
        return ScoredHeads(scored.path, scored.pattern, _kept=kept)


def _convert(
    target: Target,
    settings: ConversionSettings,
    model: Model,
    out: str | Path | None,
    tokenizer: PreTrainedTokenizerBase | None,
    overwrite: bool,
    allow_pickle: bool,
    progress: bool,
    call: str,
    processes: int = 1,
) -> Converted:
    with (
        on_disk(model, tokenizer, tokenized=settings.calibration != NO_CALIBRATION) as source,
        _place(out, f"{source.name}-{target.name}") as (place, kept),
    ):
        target.check_places(source.path, place, settings, overwrite=overwrite)
        from surgery.structures import converter

        conversion = converter.convert(
            source.path,
            place,
            settings,
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            command=f"surgery.{call}",
            processes=processes,
            progress=Progress(silent=not progress),
        )
        found = {"source": _lasting(model, source), "_device": source.device, "_kept": kept}
        return Converted.of(conversion.path, conversion.report.to_dict(), **found)


@contextmanager
def _place(out: str | Path | None, name: str) -> Iterator[tuple[Path, TemporaryFolder | None]]:
    """Where an output goes: as asked for, or in a temporary folder, which is removed at once if the block fails."""
    if out is not None:
        yield Path(out), None
        return
    kept = TemporaryFolder("result")
    try:
        yield kept.path / name, kept
    except BaseException:
        kept.remove()
        raise


def _lasting(model: Model, place: OnDisk) -> Checkpoint | str | None:
    """A model that can be read again later; None for one in memory."""
    return model if isinstance(model, Checkpoint) else place.path if place.lasting else None


def _first_source(model: Checkpoint) -> Checkpoint | str | None:
    """What a result was made from in the first place, as far back as that can be read."""
    source = model.source
    while isinstance(source, Checkpoint) and source.source is not None:
        source = source.source
    return source


def _rows(models: Any, tokenizer: PreTrainedTokenizerBase | None, opened: ExitStack) -> tuple[str, ...]:
    """Rows of an evaluation as the command line has them, ``NAME=PLACE`` or the place alone."""
    if isinstance(models, Mapping):
        return tuple(f"{name}={opened.enter_context(on_disk(each, tokenizer)).path}" for name, each in models.items())
    listed = models if isinstance(models, list | tuple) else [models]
    return tuple(opened.enter_context(on_disk(each, tokenizer)).path for each in listed)
