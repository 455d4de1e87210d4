"""``surgery eval``, ``surgery compare`` and ``surgery run``. Torch is imported inside the commands only."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.generated import OptionValues
from surgery.cli.options import (
    ADVANCED,
    OUTPUT,
    ConfigOption,
    DryRunOption,
    JsonOption,
    RestartOption,
    check_launcher,
    command_line,
    flag,
    option,
)
from surgery.cli.shipped import show_shipped
from surgery.common.errors import SurgeryError
from surgery.evaluation.settings import EvalSettings


def evaluate(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CKPT...", help="Checkpoint folders or hub ids, or NAME=CKPT.")
    ],
    options: OptionValues,
    baseline: Annotated[
        str | None,
        option(
            "--baseline", "SRC|builtin|smollm2", "Model to compare with, usually the source; builtin is the demo model."
        ),
    ] = None,
    out: Annotated[Path | None, option("--out", "DIR", "Folder of results and report. [CKPT-eval]", OUTPUT)] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace a report of other models or tasks.", OUTPUT)] = False,
    config: ConfigOption = None,
    trust_remote_code: Annotated[
        bool, flag("--trust-remote-code", "Run the code stored next to the weights."), ADVANCED
    ] = False,
    restart: RestartOption = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Evaluate models next to their source and cheap baselines, and write a report.

    Run again with the same --out, it resumes an interrupted evaluation. Processes of `torchrun -m surgery eval ...` or
    `accelerate launch` share the work; results do not depend on their number.

    Examples:

        surgery eval ckpt-mla/ --baseline ckpt/

        surgery eval ckpt-mla/ --baseline ckpt/ --tasks all --dry-run

        surgery eval quarter=a/ eighth=b/ --baseline ckpt/ --tasks loss,recall,needle,speed --out report/

        surgery eval ckpt-mla/ --baseline ckpt/ --tasks lm-eval:hellaswag --limit 100
    """
    from surgery.checkpoint.location import find_local
    from surgery.checkpoint.named_models import model_named
    from surgery.evaluation.names import name_and_path

    def row_of(row: str) -> str:
        name, sign, checkpoint = row.rpartition("=")
        row = name + sign + model_named(checkpoint)
        find_local(name_and_path(row)[1])  # raises for missing checkpoints before torch is imported
        return row

    from_options = options.of(EvalSettings)
    settings = EvalSettings.from_file(config, **from_options) if config else EvalSettings(**from_options)
    models, compared = tuple(map(row_of, checkpoints)), None if baseline is None else row_of(baseline)

    from surgery.common.progress import Progress
    from surgery.console.evaluation import show_evaluation
    from surgery.evaluation.output import track
    from surgery.evaluation.run import EvaluationRequest, evaluate

    request = EvaluationRequest(
        models,
        compared,
        out,
        settings,
        command=command_line(),
        writes=True,
        restart=restart,
        overwrite=overwrite,
        trust_remote_code=trust_remote_code,
    )
    if dry_run:
        from surgery.console.evaluation import show_plan
        from surgery.evaluation.dry_run import plan_evaluation

        show_plan(plan_evaluation(request, Progress()), as_json=as_json)
        return
    evaluation = evaluate(request, Progress())
    if not evaluation.is_main:
        return
    show_evaluation(evaluation.report, evaluation.written, as_json=as_json)
    if settings.wandb:
        track(evaluation.report, evaluation.folder, settings.wandb, settings.wandb_mode)


def compare(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="report.json files, or their folders.")],
    out: Annotated[Path | None, option("--out", "DIR", "Folder for the merged report.")] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace an earlier report.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Merge reports of several evaluations, if they measured the same data with the same settings.

    Example:

        surgery compare monday-eval/ tuesday-eval/report.json --out both/
    """
    from surgery.checkpoint.output_path import output_lock
    from surgery.console.evaluation import show_evaluation
    from surgery.eval.report.document import merge, read_report, undamaged
    from surgery.evaluation.output import DOCUMENT, write_report
    from surgery.evaluation.store import ResultStore

    names = [str(path) for path in reports]
    with undamaged(names):
        merged = merge([read_report(path) for path in reports], names)
        paths = []
        if out is not None:
            if (out / DOCUMENT).exists() and not overwrite:
                raise SurgeryError(f"{out / DOCUMENT}: exists; choose another --out or pass --overwrite")
            ResultStore.open(out)
            with output_lock(out):
                paths = write_report(merged, out)
        show_evaluation(merged, paths, as_json=as_json)


def run(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE", help="YAML file of steps, or the name of a shipped recipe. [lists these]"),
    ] = None,
    work: Annotated[
        Path | None, option("--work", "DIR", "Folder for the outputs of the steps. [RECIPE's name]")
    ] = None,
    restart: RestartOption = False,
    dry_run: Annotated[
        bool, flag("--dry-run", "Check all settings and names, estimate every step; write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the steps of a recipe: conversions, healing, evaluations.

    A step is skipped if its output exists and was made from the same source with the same settings.
    Without a recipe: list the shipped recipes.

    Examples:

        surgery run

        surgery run testbed-mla --dry-run

        surgery run testbed-mla --work mla/
    """
    if recipe is None:
        if work is not None or restart or dry_run:
            raise SurgeryError("RECIPE is missing: pass a YAML file of steps, or a name that surgery run lists")
        show_shipped("recipes", as_json=as_json)
        return
    check_launcher()

    from surgery.common.progress import Progress
    from surgery.common.shipped import find_shipped
    from surgery.console.evaluation import show_evaluation
    from surgery.console.recipe import show_made, show_plan
    from surgery.workflow.recipe import checked_recipe, run_recipe

    path = find_shipped(recipe, "recipes")
    if dry_run:
        from surgery.workflow.dry_run import plan_recipe

        checked, actions = checked_recipe(path)
        show_plan(plan_recipe(checked, actions, work or Path(checked.name), Progress()), as_json=as_json)
        return
    finished = run_recipe(path, work, Progress(), restart=restart)
    if not as_json:
        show_made(finished)
    if finished.report is not None:
        show_evaluation(finished.report, finished.written, as_json=as_json)
