"""Python functions of ``surgery inspect``, ``plan``, ``verify``, ``eval`` and ``heads``.

Settings have the names of YAML files (``surgery config NAME``). torch is imported when a function is called, not with
this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.api.model_arguments import Model, on_disk, output_path
from surgery.api.results import Evaluated, ScoredHeads
from surgery.common.file_settings import read_mapping
from surgery.common.progress import Progress
from surgery.common.shipped import find_shipped
from surgery.common.temporary import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surgery.inspection.checks import Checked
    from surgery.inspection.inspect import Inspection
    from surgery.planning.plan import Plan


def inspect(model: Model) -> Inspection:
    """Inspect a model's attention, its cache and its possible conversions, as ``surgery inspect`` does.

    Args:
        model: see :mod:`surgery.api.model_arguments`.

    Raises:
        SurgeryError: the model cannot be read.

    Example:
        >>> surgery.inspect("builtin").kv["bytes_per_token"]
        3072
    """
    with on_disk(model, None, tokenized=False) as source:
        from surgery.inspection.inspect import inspect_checkpoint

        return inspect_checkpoint(source.path)


def plan(
    model: Model,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
    **settings: Any,
) -> Plan:
    """Choose a conversion for a budget by simulating candidates on held-out text, as ``surgery plan`` does.

    Args:
        model: see :mod:`surgery.api.model_arguments`.
        tokenizer: tokenizer of a model in memory.
        progress: show progress bars on standard error.
        **settings: fields of :class:`surgery.planning.settings.PlanSettings`: ``kv_ratio``, ``memory`` with ``context``
            and ``batch``, or ``max_loss``; ``engine``, ``allow``, ``calibration`` …

    Returns:
        The measurements and the choice: ``surgery.convert(model, to=plan.chosen.to, **plan.chosen.asked)``. If a cache
        format of the ``engine`` is chosen, no conversion is needed: ``chosen.to`` is None and ``chosen.command`` serves
        the source.

    Raises:
        SurgeryError: the model cannot be read or converted, a setting is unknown, or nothing meets the budget.

    Example:
        >>> plan = surgery.plan("builtin", kv_ratio=0.25, allow=("lowrank", "quantized", "bits"))
        >>> surgery.convert("builtin", to=plan.chosen.to, **plan.chosen.asked)
    """
    from surgery.planning.settings import PlanSettings

    plan_settings = PlanSettings.from_mapping(settings, "plan")
    with on_disk(model, tokenizer, tokenized=True) as source:
        from surgery.planning.plan import make_plan

        return make_plan(source.path, plan_settings, progress=Progress(silent=not progress))


def verify(model: Model, *, device: str = "auto", seed: int = 0, progress: bool = True) -> Checked:
    """Repeat the checks of a conversion on its checkpoint, as ``surgery verify`` does.

    Args:
        model: see :mod:`surgery.api.model_arguments`.
        device: device on which layers run.
        seed: seed of the random tokens.
        progress: show progress bars on standard error.

    Returns:
        ``checks``, each with a name, an outcome (passed, failed, not checked) and details; ``failed``, the failed ones.

    Raises:
        SurgeryError: there is no checkpoint, or its files are inconsistent.

    Example:
        >>> surgery.verify("ckpt-mla").failed
        []
    """
    with on_disk(model, None, tokenized=False) as source:
        from surgery.inspection.checks import verify_checkpoint

        return verify_checkpoint(source.path, device=device, seed=seed, progress=Progress(silent=not progress))


def evaluate(
    models: Model | Sequence[Model] | Mapping[str, Model],
    baseline: Model | None = None,
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    title: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    progress: bool = True,
    **settings: Any,
) -> Evaluated:
    """Evaluate models next to their source and cheap baselines, as ``surgery eval`` does.

    Args:
        models: one or more models, or a mapping from names to models; see :mod:`surgery.api.model_arguments`.
        baseline: the source, to which differences are reported.
        out: folder of results and report, from which an interrupted evaluation resumes; None writes nothing.
        tokenizer: tokenizer of models in memory.
        config: YAML file of settings, or the name of a shipped one; ``settings`` override it.
        title: title of the report.
        overwrite: replace a report of other models, tasks or settings.
        trust_remote_code: run model code that comes with the weights.
        progress: show progress bars on standard error.
        **settings: fields of :class:`surgery.evaluation.settings.EvalSettings`, such as ``tasks``, ``data``,
            ``windows``.

    Raises:
        SurgeryError: a task cannot run on a model; mostly found before the first measurement.

    Example:
        >>> smaller = surgery.convert("builtin", to="mqa")
        >>> surgery.evaluate({"mqa": smaller}, "builtin", tasks=["loss", "recall"])["mqa"].recall
    """
    from surgery.evaluation.settings import EvalSettings

    read = {} if config is None else read_mapping(find_shipped(config, "configs"))
    eval_settings = EvalSettings.from_mapping({**read, **settings}, "evaluate" if config is None else str(config))
    with ExitStack() as opened:
        rows = _rows(models, tokenizer, opened)
        compared = None if baseline is None else opened.enter_context(on_disk(baseline, tokenizer))
        folder = Path(opened.enter_context(TemporaryFolder("eval")) if out is None else out)
        from surgery.evaluation.output import track
        from surgery.evaluation.run import EvaluationRequest
        from surgery.evaluation.run import evaluate as run

        request = EvaluationRequest(
            rows,
            None if compared is None else compared.path,
            folder,
            eval_settings,
            command="surgery.evaluate",
            title=title,
            writes=out is not None,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
        )
        result = run(request, Progress(silent=not progress))
        if eval_settings.wandb and result.is_main:
            track(result.report, folder, eval_settings.wandb, eval_settings.wandb_mode)
        return Evaluated.of(result.report, None if out is None else folder)


def score_heads(
    model: Model,
    method: str = "duo",
    *,
    out: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    **settings: Any,
) -> ScoredHeads:
    """Score every KV head by its need for the whole context, as ``surgery heads`` does.

    Args:
        model: see :mod:`surgery.api.model_arguments`.
        method: duo, needle or induction.
        out: output file NAME.safetensors, with a heat map next to it; None for a temporary file.
        tokenizer: tokenizer of a model in memory.
        config: YAML file of settings, or the name of a shipped one; arguments override it.
        overwrite: replace existing files.
        progress: show progress bars on standard error.
        **settings: fields of :class:`surgery.heads.settings.HeadSettings`, such as ``sinks``, ``recent``, ``length``.

    Raises:
        SurgeryError: a setting is unknown or impossible, or the model's heads cannot be scored.

    Example:
        >>> scored = surgery.score_heads("builtin", "induction", sinks=16, recent=112)
        >>> surgery.convert("builtin", to="hybrid", heads=scored, streaming=0.5).kv_ratio
    """
    from surgery.heads.settings import SUFFIX, HeadSettings

    read = {} if config is None else read_mapping(find_shipped(config, "configs"))
    head_settings = HeadSettings.from_mapping({**read, "method": method, **settings}, "score_heads")
    with (
        on_disk(model, tokenizer) as source,
        output_path(out, f"{source.name}-heads-{method}{SUFFIX}") as (output, temporary),
    ):
        from surgery.heads.scoring import score_heads as score

        options = {"overwrite": overwrite, "progress": Progress(silent=not progress)}
        scored = score(source.path, output, head_settings, **options)
        return ScoredHeads(scored.path, scored.pattern, _kept=temporary)


def _rows(models: Any, tokenizer: PreTrainedTokenizerBase | None, opened: ExitStack) -> tuple[str, ...]:
    """Return the rows of an evaluation as on the command line: ``NAME=PATH``, or the path alone."""
    if isinstance(models, Mapping):
        return tuple(f"{name}={opened.enter_context(on_disk(each, tokenizer)).path}" for name, each in models.items())
    listed = models if isinstance(models, list | tuple) else [models]
    return tuple(opened.enter_context(on_disk(each, tokenizer)).path for each in listed)
