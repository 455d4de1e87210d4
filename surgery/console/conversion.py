"""Output of ``surgery convert`` and ``surgery slice``: tables, or with ``as_json`` one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from surgery.checkpoint.file_kinds import CONFIG
from surgery.common.errors import SurgeryError
from surgery.common.human import duration, origin, share, size, with_perplexity
from surgery.common.machine import seconds_since_start
from surgery.common.tables import terminal
from surgery.common.tables.table import Column
from surgery.console.engines import show_commands
from surgery.console.heal import operations, show_estimate, show_training
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import engines_sentence, kept_bytes, of_conversion, of_healing, show_next, show_ruin
from surgery.engines.facts import OWN_CLASSES
from surgery.engines.table import engine_table, support_lines
from surgery.reporting.quality import before_and_after, stages_table, useless_message

WORTH_HEALING = 0.02
"""Loss increase, in nats per token, above which healing is suggested; SmolLM2-135M in bits at a quarter of the bytes
loses less (docs/smollm2/rows/report.md)."""


def show_conversion(conversion, *, as_json: bool = False) -> None:
    """Print a finished conversion (:class:`surgery.structures.converter.Conversion`) and its healing, if any."""
    report = conversion.report.to_dict()
    if as_json:
        print_json({"path": str(conversion.path), **report})
        return
    page, source, target, kv = new_page(), report["source"], report["target"], report["kv"]
    first = report["ladder"][0]
    display_name = origin(source["path"], source.get("dequantised_from"))
    page.print(f"\n[bold]{plain(display_name)} → {plain(conversion.path.name)}[/bold]")
    kv_bytes = kv["source_bytes_per_token"], kv["measured_bytes_per_token"]
    names = source["model_type"], target["model_type"]
    page.print(terminal.render(before_and_after(kv_bytes, report["ladder"], names, (), kv.get("ratio_at"))))
    if healing := report["healing"]:
        show_training(page, healing)
    else:
        _show_stages(page, report["ladder"])
        _show_layers(page, conversion.report.layers)
    if report["splits"]:
        _show_splits(page, report["splits"])
    # Of the report's commands, which have the folder's name alone, those that run from here.
    config = json.loads((conversion.path / CONFIG).read_text(encoding="utf-8"))
    _show_target(page, {**target, "engines": engine_table(config, folder=conversion.path)}, conversion.path)
    phases = sum(report["seconds"].values())
    page.print(
        f"{f'conversion: {duration(phases)}' if healing else duration(seconds_since_start())}, peak memory "
        f"{size(report['peak_memory_bytes'])}"
    )
    result, source_name = typed(conversion.path), typed(conversion.source)
    page.print(f"[bold]{plain(result)}[/bold]: {plain(of_conversion(report))}", soft_wrap=True)
    if healing:
        page.print(plain(of_healing(healing)), soft_wrap=True)
    show_ruin(page, target.get("ruined_by", ()))
    if useless := target.get("useless_layers"):
        page.print(f"[bold yellow]{plain(useless_message(useless))}[/bold yellow]", soft_wrap=True)
    increase = None if first["loss"] is None else report["ladder"][-1]["loss"] - first["loss"]
    heal = [f"surgery heal {result} --teacher {source_name} --max-time 1800"]
    after = heal if increase is not None and increase > WORTH_HEALING and not healing else []
    show_next(page, [f"surgery eval {result} --baseline {source_name}", *after, f"surgery doctor {result}"])


def show_plan(plan, called: str, healing=None, *, as_json: bool = False) -> None:
    """Print the dry run of a conversion of the source ``called`` so, and of its healing, if any.

    Raises SurgeryError: the conversion would fail with this error; raised after printing.
    """
    if as_json:
        print_json({**plan.to_dict(), **({"healing": asdict(healing)} if healing else {})})
    else:
        _show_plan(plan, called, healing)
    if plan.refusal:
        raise SurgeryError(plan.refusal)


def _show_plan(plan, called: str, healing) -> None:
    page, source, kv, disk, work = new_page(), plan.source, plan.kv, plan.disk, plan.work
    source_name = origin(called, source["dequantised_from"])
    page.print(f"\n[bold]dry run: {plain(source_name)} → {plain(plan.out)}[/bold] (nothing is written)")
    kv_bytes = kv["source_bytes_per_token"], kv["bytes_per_token"]
    names = source["model_type"], plan.target["model_type"]
    weights = ("weights on disk", size(source["weight_bytes"]), size(disk["output_bytes"]))
    page.print(terminal.render(before_and_after(kv_bytes, (), names, [weights], kv.get("ratio_at"))))
    _show_target(page, plan.target, plan.out)
    memory, device = plan.memory, plan.memory["device_bytes"]
    rows = [
        ("output", size(disk["output_bytes"]), f"{size(disk['free_bytes'])} free"),
        ("temporary files", size(disk["temporary_bytes"]), disk["temporary_folder"]),
        ("memory", size(memory["host_bytes"]), ""),
        *([("accelerator memory", size(device), "")] if device else []),
        ("time", *_time(work, plan.settings["device"])),
    ]
    page.print(make_table(["estimate", Column("", align="right"), Column("", align="left")], rows))
    tokens = plan.tokens
    page.print(
        f"calibration: {tokens['calibration']} sequences of {tokens['length']} tokens; held out: {tokens['held_out']}"
        f" sequences and {tokens['recall_prompts']} recall prompts. Memory and time are estimates."
    )
    if healing:
        page.print("\nhealing: ", end="")
        show_estimate(page, healing)
    where = engines_sentence(plan.target["engines"])
    page.print(f"[bold]{plain(plan.out)}[/bold] would keep {kept_bytes(kv)}; {plain(where)}", soft_wrap=True)
    if not plan.refusal:
        where = "" if work["estimated_seconds"] else f", on a machine with {plan.settings['device']}"
        show_next(page, [f"the same command without --dry-run{where}"])


def _time(work: dict, device: str) -> tuple[str, str]:
    """Format the estimated time and the FLOPs that it follows from."""
    if work["estimated_seconds"] is None:
        return "?", f"{operations(work)}; no time estimate, as this machine has no {device}"
    return duration(work["estimated_seconds"]), operations(work)


def _show_stages(page: Console, stages: list[dict]) -> None:
    if stages[0]["loss"] is None:
        page.print("loss and recall were not measured: no calibration text\n")
        return
    page.print("where the loss comes from")
    page.print(terminal.render(stages_table(stages)))


def _show_layers(page: Console, layers: list) -> None:
    page.print("relative error of each layer: predicted from statistics, and measured on its output")
    stages = list(dict.fromkeys(stage for layer in layers for stage in layer.measured))  # kept layers have none
    rows = [(layer.layer, *layer.cells(), *(share(layer.measured.get(stage)) for stage in stages)) for layer in layers]
    page.print(make_table(["layer", *layers[0].columns(), *stages], rows))


def _show_splits(page: Console, splits: list[dict]) -> None:
    """Print the budget splits that were tried, with their losses."""
    if len(splits) == 1:
        return
    folds = any(split.get("fold", 1) > 1 for split in splits)
    spread = any("rotation_weight" in split for split in splits)
    best = min((split["held_out_loss"] for split in splits if split["held_out_loss"] is not None), default=None)
    rows = []
    for split in splits:
        loss = split["held_out_loss"]
        more = (split.get("fold", 1),) if folds else (split["rotation_weight"],) if spread else ()
        sizes = (f"{split[name]:.4g}" for name in ("rope_dim", "rank"))
        rows.append((*sizes, *more, with_perplexity(loss), "chosen" if loss == best else ""))
    page.print("splits of the budget, as tried")
    mean = ", mean" * spread
    names = [f"rotary dims{mean}", f"latent rank{mean}", *["rotation weight"] * spread, *["fold"] * folds]
    page.print(make_table([*names, "held-out loss (perplexity)", ""], rows))


def _show_target(page: Console, target: dict, result: str | Path) -> None:
    page.print(class_and_why(target["model_type"], target["reasons"]), soft_wrap=True)
    page.print(make_table(["engine", "support"], support_lines(target["engines"]).items()))
    show_commands(page, target["engines"], result)


def class_and_why(model_type: str, reasons: list[str]) -> str:
    """Describe the model class of a result and the reasons for it."""
    why = "; ".join(reasons)
    return plain(f"custom model class: {why}" if model_type in OWN_CLASSES else f"model class {model_type}: {why}")
