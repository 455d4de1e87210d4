"""Output of ``surgery heal``: tables, or with ``as_json`` one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from surgery.checkpoint.named_models import name_of
from surgery.common.human import count, duration, per_token, share, size
from surgery.common.tables import terminal
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import of_healing, show_next
from surgery.reporting.quality import healed_table


def show_healed(healed, *, as_json: bool = False) -> None:
    """Print a finished healing (:class:`surgery.healing.heal.Healed`)."""
    healing = healed.healing
    if as_json:
        print_json({"path": str(healed.path), **healing})
        return
    page = new_page()
    page.print(f"\n[bold]{plain(healed.path.name)}: healed[/bold]")
    show_training(page, healing)
    verdict, path = of_healing(healing), typed(healed.path)
    page.print(f"[bold]{plain(path)}[/bold]: {plain(verdict)}", soft_wrap=True)
    measure = [f"surgery eval {path} --baseline {typed(healed.teacher)}"] if healed.teacher else []
    show_next(page, [*measure, f"surgery doctor {path}"])


def show_training(page: Console, healing: dict[str, Any]) -> None:
    """Print the quality table of a healing and its tokens, time and memory."""
    if healing["table"]:
        page.print(terminal.render(healed_table(healing["table"])))
    if healing["gap_closed"] is not None:
        page.print(f"healing recovered {share(healing['gap_closed'])} of the conversion's loss increase")
    speed = healing["tokens_per_second"]
    page.print(
        f"{count(healing['tokens'])} tokens in {healing['steps']:,} step{'s' * (healing['steps'] != 1)}, "
        f"{duration(healing['seconds'])}"
        + (f", {count(speed)} tokens/s" if speed else "")
        + f", peak memory {size(healing['peak_memory_bytes'])}; ended: {plain(healing['ended'])}"
    )
    if healing["tracker_failed"]:
        page.print(f"the tracker failed at {plain(healing['tracker_failed'])}; heal.jsonl has every step")


def show_plan(plan, *, as_json: bool = False) -> None:
    """Print the dry run of a healing (:class:`surgery.healing.dry_run.HealingPlan`)."""
    if as_json:
        print_json(asdict(plan))
        return
    page = new_page()
    page.print(
        f"\n[bold]dry run: {plain(name_of(plan.student))} → {plain(plan.out)}[/bold] (nothing is trained or written)"
    )
    show_estimate(page, plan)
    page.print("All figures are computed from shapes, not measured. docs/healing.md says what they leave out.")
    show_next(page, ["the same command without --dry-run"])


def show_estimate(page: Console, plan) -> None:
    """Print the estimated memory, disk space and time of a healing."""
    estimate, settings = plan.estimate, plan.settings
    parameters, devices = estimate["parameters"], estimate["processes"]
    page.print(
        f"{count(parameters['trained'])} of {count(parameters['student'])} parameters are trained in "
        f"{settings['dtype']}, on {devices} {'device' if devices == 1 else 'devices'}"
        f"{', sharded' if estimate['sharded'] else ''}"
    )
    page.print(f"KV cache: {per_token(plan.kv_bytes_per_token)} per token, unchanged by healing")
    memory = [*estimate["memory"].items(), ("peak", estimate["peak_bytes"])]
    page.print(make_table(["memory per device", Column("", "", size)], memory))
    disk, work = plan.disk, plan.work
    page.print(
        f"disk: {size(disk['output_bytes'])} for the result, {size(disk['checkpoint_bytes'])} for checkpoints of the"
        f" run; {size(disk['free_bytes'])} free"
    )
    budget = (
        f"{estimate['steps']:,} steps, {count(estimate['tokens'])} tokens"
        if estimate["steps"]
        else "until the time limit"
    )
    page.print(f"budget: {budget}; {estimate['tokens_per_step']:,} tokens per step")
    if work["estimated_seconds"] is not None:
        needed = f" for {operations(work)}" if work["total_flops"] else ""
        page.print(f"time: about {duration(work['estimated_seconds'])}{needed}")


def operations(work: dict[str, Any]) -> str:
    """Format the floating point operations of a job, and the measured speed if there is one."""
    speed = (
        f", on this machine at most {work['flops_per_second'] / 1e9:,.0f} GFLOP/s" if work["flops_per_second"] else ""
    )
    return f"{work['total_flops'] / 1e12:,.1f} TFLOP{speed}"
