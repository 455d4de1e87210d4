"""Output of `surgery plan`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from surgery.common.human import cost, decimal, duration, perplexity, share, size, with_perplexity
from surgery.common.machine import seconds_since_start
from surgery.common.tables.table import Column
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import show_next
from surgery.engines.verdict import loads
from surgery.planning.settings import beyond_positions


def show_plan_of_budget(plan, plan_path: Path | None, plot: Path | None, *, as_json: bool = False) -> None:
    """Print a plan (:class:`surgery.planning.plan.Plan`) and the paths of its files."""
    if as_json:
        print_json(
            {**plan.to_dict(), "plan": str(plan_path) if plan_path else None, "plot": str(plot) if plot else None}
        )
        return
    page, budget, choice = new_page(), plan.budget, plan.chosen
    page.print(f"\n[bold]{plain(plan.source['path'])}[/bold]: {_budget(plan)}")
    rows = [
        (
            "→" if row is choice else "·" if row.best else "",
            row.name,
            row.kv_bytes,
            row.kv_ratio,
            row.loss_increase,
            None if row.low is None else (row.high - row.low) / 2,
            row.loss_increase,
            row.recall,
            ", ".join(_engines(row)) or None,
        )
        for row in plan.rows
    ]
    columns = [
        "",
        "convert --to, or the engine's own",
        Column("KV cache", "", size),
        Column("", "", share),
        Column("Δ loss", "", lambda value: f"{value:+.4f}"),
        Column("±", "", lambda value: f"{value:.4f}"),
        Column("perplexity", "", lambda value: f"{perplexity(value) - 1:+.1%}"),
        Column("recall", "", lambda value: f"{value:.2f}"),
        "other engines",
    ]
    page.print(make_table(columns, rows))
    _show_refused(page, plan.refused)
    texts = " or ".join(map(str, sorted({len(row.by_text) for row in plan.rows})))  # rows may differ
    recall = "" if plan.source["recall"] is None else f"; the source's recall {decimal(plan.source['recall'], 2)}"
    page.print(
        f"[dim]Δ loss in nats per token over the source's {with_perplexity(plan.source['loss'])}, on "
        f"{texts} texts (±: half of the 80% interval for other text){recall}; "
        "· lower loss than all smaller rows; other engines: those that load it, in addition to transformers[/dim]",
        soft_wrap=True,
    )
    if beyond := beyond_positions(budget["context"], plan.source["max_positions"]):
        page.print(f"[yellow]{plain(beyond)}[/yellow]", soft_wrap=True)
    loss_cost = cost(choice.loss_increase)
    label = f"No conversion is needed: {choice.name}" if choice.engine else choice.to
    page.print(
        f"[bold]{plain(label)}[/bold] {_reason(plan)}: {loss_cost}, recall "
        f"{decimal(choice.recall, 2)}, {size(choice.kv_bytes)} at {budget['context']:,} tokens and batch "
        f"{budget['batch']}{_next_best(plan)}.",
        soft_wrap=True,
    )
    if own := _own_format(plan):
        page.print(own, soft_wrap=True)
    page.print(f"{duration(seconds_since_start())}{f'; plot: {plain(plot)}' if plot else ''}", soft_wrap=True)
    command = choice.command
    if plan_path and not choice.engine:
        command = f"surgery convert {typed(plan.source['path'])} --plan {typed(plan_path)}"
    show_next(page, [command])


def show_forecast(forecast, *, as_json: bool = False) -> None:
    """Print the dry run of a plan (:class:`surgery.planning.dry_run.PlanForecast`)."""
    if as_json:
        print_json(forecast.to_dict())
        return
    page, whole = new_page(), size(forecast.source["kv_bytes"])
    sizes = "several KV ratios, for the loss limit" if forecast.kv_ratio is None else share(forecast.kv_ratio)
    page.print(
        f"\n[bold]dry run: {plain(forecast.source['path'])}[/bold], {whole} of KV cache at {forecast.context:,} tokens "
        f"and batch {forecast.batch}; candidates at {sizes}:",
        soft_wrap=True,
    )
    columns = ["convert --to, or the engine's own", Column("KV cache", "", size), Column("", "", share)]
    page.print(make_table(columns, [(row["name"], row["kv_bytes"], row["kv_ratio"]) for row in forecast.candidates]))
    _show_refused(page, forecast.refused)
    time = forecast.work["estimated_seconds"]
    took = (
        "no time estimate, as this machine has no such device"
        if time is None
        else f"about {duration(time)} (rough estimate)"
    )
    memory = size(forecast.memory["host_bytes"] + forecast.memory["device_bytes"])
    page.print(
        f"{took}, {memory} of memory, {size(forecast.temporary_bytes)} of temporary files; the best candidates are "
        "also measured at sizes around the budget",
        soft_wrap=True,
    )
    show_next(page, ["the same command without --dry-run"])


def _show_refused(page: Console, refused: dict[str, str]) -> None:
    for why in dict.fromkeys(refused.values()):
        what = ", ".join(name for name, reason in refused.items() if reason == why)
        page.print(f"[dim]{plain(what)}: {plain(why)}[/dim]", soft_wrap=True)


def _engines(row) -> list[str]:
    if row.engine:
        return [f"{row.engine} alone, {row.status}"]
    return [engine for engine, verdict in row.engines.items() if loads(verdict) and engine != "transformers"]


def _budget(plan) -> str:
    budget, whole = plan.budget, size(plan.source["kv_bytes"])
    at = f"{whole} of KV cache at {budget['context']:,} tokens and batch {budget['batch']}"
    if budget["kv_bytes"] is None:
        return f"{at}; loss limit {cost(budget['max_loss'])}"
    return f"{at}; budget {size(budget['kv_bytes'])} ({share(budget['kv_ratio'])})"


def _own_format(plan) -> str | None:
    """Describe the engine's best cache format without a conversion, if a conversion was chosen."""
    own, engines = plan.own_format, {row.engine for row in plan.rows if row.engine}
    if plan.chosen.engine or not engines:
        return None
    if own is None:
        return f"Without a conversion, no cache format of {plain(engines.pop())} meets the budget."
    loss_cost = cost(own.loss_increase)
    return f"Without a conversion: {plain(own.name)}, {loss_cost}, {size(own.kv_bytes)}: {plain(own.command)}"


def _next_best(plan) -> str:
    other = plan.next_best
    if other is None:
        return ""
    return f"; next best: {plain(other.name)} {cost(other.loss_increase)}, {size(other.kv_bytes)}"


def _reason(plan) -> str:
    if plan.budget["kv_bytes"] is None:
        return "is the smallest within the loss limit"
    if plan.alike == 1:
        return "has the lowest loss within the budget"
    return (
        f"has the lowest KL divergence from the source ({plan.chosen.divergence:.4f} nats) of the {plan.alike} within "
        "the budget whose losses do not differ significantly"
    )
