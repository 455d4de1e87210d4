"""The verbs ``eval``, ``compare`` and ``run``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import MACHINE, OUTPUT, ConfigOption, JsonOption, PickleOption

TASKS = "Tasks"
DATA = "Data"


def _option(*flags: str, metavar: str, help: str, panel: str):
    return typer.Option(*flags, metavar=metavar, help=help, rich_help_panel=panel)


def evaluate(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CKPT...", help="Checkpoint folders or hub ids, or NAME=CKPT.")
    ],
    baseline: Annotated[
        str | None,
        _option(
            "--baseline",
            metavar="SRC|builtin|smollm2",
            help="What the others are compared with: their source; builtin is the model that ships.",
            panel=TASKS,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        _option(
            "--tasks",
            metavar="A,B",
            help="loss, recall, needle, ruler, generate, memory, speed, or all of these; repeat, match, kernels; "
            "lm-eval:TASK [loss,recall]. KV bytes are always measured.",
            panel=TASKS,
        ),
    ] = None,
    variants: Annotated[
        str | None,
        _option(
            "--variants",
            metavar="A,B|none",
            help="Cheaper forms of the baseline to measure beside it: int8, fp8, int4, int2, mean-pool, window "
            "[int8,int4,mean-pool,window].",
            panel=TASKS,
        ),
    ] = None,
    limit: Annotated[
        int | None, _option("--limit", metavar="N", help="Samples a task at most; marks the report.", panel=TASKS)
    ] = None,
    data: Annotated[
        list[str] | None,
        _option(
            "--data",
            metavar="FILE|DATASET|prose|code|chat|builtin",
            help="Held-out text, more than once for several [builtin, standard-library source that ships].",
            panel=DATA,
        ),
    ] = None,
    text_field: Annotated[
        str | None, _option("--text-field", metavar="NAME", help="Column that holds the text [text].", panel=DATA)
    ] = None,
    windows: Annotated[int | None, _option("--windows", metavar="N", help="Held-out windows [24].", panel=DATA)] = None,
    length: Annotated[
        int | None, _option("--length", metavar="N", help="Tokens in each, and in recall prompts [1024].", panel=DATA)
    ] = None,
    domain: Annotated[
        str | None,
        _option("--domain", metavar="code|text", help="Of needle and ruler [code for builtin data].", panel=DATA),
    ] = None,
    needle_lengths: Annotated[
        str | None,
        _option("--needle-lengths", metavar="N,M", help="[1/4, 1/2, 1 and 1.5 times the model's limit]", panel=DATA),
    ] = None,
    ruler_lengths: Annotated[
        str | None, _option("--ruler-lengths", metavar="N,M", help="Tokens of ruler prompts [--length].", panel=DATA)
    ] = None,
    contexts: Annotated[
        str | None, _option("--contexts", metavar="N,M", help="Of memory and speed [up to the limit].", panel=DATA)
    ] = None,
    batches: Annotated[str | None, _option("--batches", metavar="N,M", help="Of speed [1,4].", panel=DATA)] = None,
    prompt: Annotated[
        list[str] | None,
        _option("--prompt", metavar="TEXT", help="To complete, more than once for several.", panel=DATA),
    ] = None,
    lm_eval_include: Annotated[
        str | None,
        _option("--lm-eval-include", metavar="DIR", help="Folder of your own lm-eval tasks.", panel=DATA),
    ] = None,
    num_fewshot: Annotated[
        int | None, _option("--num-fewshot", metavar="N", help="Of lm-eval tasks [the task's].", panel=DATA)
    ] = None,
    seed: Annotated[int | None, _option("--seed", metavar="N", help="Of every random choice [0].", panel=DATA)] = None,
    device: Annotated[
        str | None,
        _option("--device", metavar="NAME", help="cpu, cuda, cuda:1 … [cuda if there is one].", panel=MACHINE),
    ] = None,
    dtype: Annotated[
        str | None,
        _option(
            "--dtype",
            metavar="NAME",
            help="What quality is measured in [the checkpoint's; float32 on a CPU]. Bytes and speed are the "
            "checkpoint's own.",
            panel=MACHINE,
        ),
    ] = None,
    batch_size: Annotated[
        int | None, _option("--batch-size", metavar="N", help="Sequences at a time [8].", panel=MACHINE)
    ] = None,
    out: Annotated[
        Path | None, _option("--out", metavar="DIR", help="Folder of results and report [CKPT-eval].", panel=OUTPUT)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a report of other models or tasks.", rich_help_panel=OUTPUT)
    ] = False,
    wandb: Annotated[
        str | None, _option("--wandb", metavar="PROJECT", help="Log to wandb, one run a model.", panel=OUTPUT)
    ] = None,
    wandb_mode: Annotated[
        str | None, _option("--wandb-mode", metavar="online|offline", help="[online]", panel=OUTPUT)
    ] = None,
    config: ConfigOption = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that lies beside the weights.")
    ] = False,
    allow_pickle: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure models beside their source and beside cheap baselines, and write a report.

    Started again with the same --out it goes on where it stopped. `accelerate launch -m surgery eval ...` shares the
    work over processes, with the same results.

    Examples:

        surgery eval ckpt-mla/ --baseline ckpt/

        surgery eval quarter=a/ eighth=b/ --baseline ckpt/ --tasks loss,recall,needle,memory,speed --out report/

        surgery eval ckpt-mla/ --baseline ckpt/ --tasks lm-eval:hellaswag --limit 100
    """
    from surgery.checkpoint.location import find_local
    from surgery.checkpoint.named_models import model_named
    from surgery.evaluation.names import name_and_path
    from surgery.evaluation.settings import EvalSettings

    def named(given: str) -> str:
        name, sign, checkpoint = given.rpartition("=")
        given = name + sign + model_named(checkpoint)
        find_local(name_and_path(given)[1])  # refuses what is none before torch is loaded for it
        return given

    given = {
        "tasks": tasks,
        "variants": variants,
        "limit": limit,
        "data": data or None,
        "text_field": text_field,
        "windows": windows,
        "length": length,
        "domain": domain,
        "needle_lengths": needle_lengths,
        "ruler_lengths": ruler_lengths,
        "contexts": contexts,
        "batches": batches,
        "prompts": prompt or None,
        "lm_eval_include": lm_eval_include,
        "num_fewshot": num_fewshot,
        "seed": seed,
        "device": device,
        "dtype": dtype,
        "batch_size": batch_size,
        "wandb": wandb,
        "wandb_mode": wandb_mode,
    }
    given = {name: value for name, value in given.items() if value is not None}
    settings = EvalSettings.from_file(config, **given) if config else EvalSettings(**given)
    models, compared = tuple(map(named, checkpoints)), None if baseline is None else named(baseline)

    from surgery.common.progress import Progress
    from surgery.console.conversion import show_evaluation
    from surgery.evaluation.output import track, write_report
    from surgery.evaluation.run import Request, evaluate

    request = Request(
        models,
        compared,
        out,
        settings,
        command=shlex.join(["surgery", *sys.argv[1:]]),
        overwrite=overwrite,
        allow_pickle=allow_pickle,
        trust_remote_code=trust_remote_code,
    )
    evaluation = evaluate(request, Progress())
    if not evaluation.is_main:
        return
    written = write_report(evaluation.report, evaluation.folder)
    if settings.wandb:
        track(evaluation.report, evaluation.folder, settings.wandb, settings.wandb_mode)
    show_evaluation(evaluation.report, written, as_json=as_json)


def compare(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT...", help="report.json files, or their folders.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the merged report there, in all its forms.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Merge reports that were made at different times, if they measured the same data with the same settings.

    Example:

        surgery compare monday-eval/ tuesday-eval/report.json --out both/
    """
    from surgery.console.conversion import show_evaluation
    from surgery.eval.report.document import merge, read_report
    from surgery.evaluation.output import write_report
    from surgery.evaluation.store import ResultStore

    merged = merge([read_report(path) for path in reports], [str(path) for path in reports])
    written = []
    if out is not None:
        ResultStore.open(out)
        written = write_report(merged, out)
    show_evaluation(merged, written, as_json=as_json)


def run(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help="YAML file of steps, or the name of one of `surgery recipes`."),
    ],
    work: Annotated[
        Path | None, typer.Option("--work", metavar="DIR", help="Where the steps' outputs go [RECIPE's name].")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Do everything that a recipe says, step by step: conversions, healing, evaluations.

    A step whose output is there already, made from the same source with the same settings, is not done again.

    Example:

        surgery run testbed-mla --work mla/
    """
    from surgery.common.progress import Progress
    from surgery.common.shipped import find_shipped
    from surgery.console.conversion import show_evaluation
    from surgery.workflow.recipe import run_recipe

    finished = run_recipe(find_shipped(recipe, "recipes"), work, Progress())
    if finished.report is not None:
        show_evaluation(finished.report, finished.written, as_json=as_json)


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command("eval")(evaluate)
    app.command("compare")(compare)
    app.command("run")(run)
