"""A comparison of patterns for people: Markdown tables, and recall and loss against the share of streaming heads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from surgery.common.human import with_perplexity
from surgery.common.tables.markdown import render
from surgery.common.tables.table import Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANDOM = "random"


def markdown(content: dict[str, Any]) -> str:
    """comparison.md of the content of a comparison.json."""
    parts = [f"# {content['title']}", _scored(content["scoring"])]
    if content["measured"]:
        parts.append(_measured(content["measured"]))
    parts += [_agreement(content["agreement"]), _ties(content["agreement"])]
    if content["command"]:
        parts.append(f"`{content['command']}`, model-surgery {content['surgery_version']}.")
    return "\n\n".join(parts) + "\n"


def curve_table(measured: dict[str, Any], quantity: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a quantity ("recall", or "loss" as increase) of every pattern by the share that streams.

    Random patterns are one row, with their least and greatest.
    """
    shares = sorted({point["share"] for point in measured["points"]})
    names = list(dict.fromkeys(point["name"] for point in measured["points"]))
    drawn = [name for name in names if name.startswith(RANDOM + " ")]
    rows = [
        [name, *(_value(measured, [name], share, quantity) for share in shares)] for name in names if name not in drawn
    ]
    if drawn:
        rows.append([f"random ({len(drawn)})", *(_value(measured, drawn, share, quantity) for share in shares)])
    return ["", *(f"{100 * share:.3g}%" for share in shares)], rows


def curve_figure(content: dict[str, Any]) -> Figure:
    """Recall and loss increase against the share of heads that stream; random patterns as a band."""
    from surgery.eval.report.style import styled

    return styled(_draw)(content["measured"])


def _draw(measured: dict[str, Any]) -> Figure:
    from matplotlib.figure import Figure

    from surgery.eval.report.plots import WIDTH
    from surgery.eval.report.style import BASELINE_COLOUR, DASHES, MUTED, PALETTE, label

    figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
    axes = figure.subplots(1, 2)
    names = list(dict.fromkeys(point["name"] for point in measured["points"]))
    drawn = [name for name in names if name.startswith(RANDOM + " ")]
    shares = sorted({point["share"] for point in measured["points"]})
    source = measured["source"]
    for ax, quantity in zip(axes, ("recall", "loss"), strict=True):
        for index, name in enumerate(name for name in names if name not in drawn):
            values = [_raw(measured, name, share, quantity) for share in shares]
            dashes = DASHES[index // len(PALETTE) % len(DASHES)]
            style = {"color": PALETTE[index % len(PALETTE)], "linestyle": dashes, "marker": "o", "markersize": 3}
            ax.plot([100 * share for share in shares], values, label=label(name), **style)
        if drawn:
            columns = [[_raw(measured, name, share, quantity) for name in drawn] for share in shares]
            low, high = [min(column) for column in columns], [max(column) for column in columns]
            across = [100 * share for share in shares]
            ax.fill_between(across, low, high, color=MUTED, alpha=0.25, linewidth=0, label=f"random ({len(drawn)})")
        level = source["recall"] if quantity == "recall" else 0.0
        ax.axhline(level, color=BASELINE_COLOUR, linewidth=0.9, label="source")
        ax.set_xlabel("KV heads that stream, %")
    axes[0].set_title("recall of planted keys")
    axes[0].set_ylim(-0.02, 1.02)
    axes[1].set_title("loss increase, nats per token")
    axes[1].set_ylim(bottom=min(0.0, axes[1].get_ylim()[0]))  # it may fall, too
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    return figure


def _raw(measured: dict[str, Any], name: str, share: float, quantity: str) -> float:
    point = next(p for p in measured["points"] if p["name"] == name and p["share"] == share)
    return point["recall"] if quantity == "recall" else point["loss"] - measured["source"]["loss"]


def _value(measured: dict[str, Any], names: list[str], share: float, quantity: str) -> str:
    values = sorted(
        {f"{_raw(measured, name, share, quantity):{'.2f' if quantity == 'recall' else '+.4f'}}" for name in names},
        key=float,
    )
    return values[0] if len(values) == 1 else f"{values[0]} to {values[-1]}"


def _scored(scoring: dict[str, Any]) -> str:
    columns = (
        "pattern",
        "method",
        Column("scoring time", form="{:,.1f} s".format),
        "seeds",
        Column("mean spread", form="{:.2g}".format),
        Column("best heads (layer.head)", form=lambda best: ", ".join(f"{layer}.{head}" for layer, head in best)),
    )
    rows = (
        (name, entry["method"], entry["seconds"], len(entry["seeds"]) or None, entry["mean_spread"], entry["best"])
        for name, entry in scoring.items()
    )
    return render(Table.of(columns, rows))


def _measured(measured: dict[str, Any]) -> str:
    first = measured["points"][0]["name"]
    ratios = {f"{100 * p['share']:.3g}%": p["kv_ratio"] for p in measured["points"] if p["name"] == first}
    header, recall = curve_table(measured, "recall")
    _, loss = curve_table(measured, "loss")
    kv, source = ["KV bytes", *(f"{100 * ratios[share]:.1f}%" for share in header[1:])], measured["source"]
    about = (
        f"{measured['checkpoint']} with its lowest heads streaming, {measured['sinks']} sinks and {measured['recent']} "
        f"recent tokens, at {measured['length']:,} tokens ({measured['windows']} held-out windows, "
        f"{measured['prompts']} recall prompts). Source: loss {with_perplexity(source['loss'])} nats per token "
        f"(perplexity), recall {source['recall']:.2f}. The KV bytes are those of a hybrid cache at that length."
    )
    return "\n\n".join(
        [
            "## Quality by the share of heads that stream",
            about,
            "![recall and loss by the share of heads that stream](curve.png)",
            "Recall:",
            _table(header, [kv, *recall]),
            "Loss increase, nats per token:",
            _table(header, loss),
        ]
    )


def _agreement(agreement: dict[str, Any]) -> str:
    if not agreement["pairs"]:
        return "![heat map of the pattern](heads.png)"
    shares = agreement["shares"]
    header = ["patterns", "rank correlation", *(f"overlap of best {100 * share:g}%" for share in shares)]
    rows = []
    for pair in agreement["pairs"]:
        rank = "-" if pair["spearman"] is None else f"{pair['spearman']:.2f}"
        rows.append([f"{pair['a']}, {pair['b']}", rank, *(f"{entry['overlap']:.2f}" for entry in pair["overlaps"])])
    chance = [f"{entry['chance']:.2f} ± {entry['chance_sd']:.2f}" for entry in agreement["pairs"][0]["overlaps"]]
    rows.append(["chance", "0.00", *chance])
    return "\n\n".join(["## Agreement", "![heat maps of all patterns](heads.png)", _table(header, rows)])


def _ties(agreement: dict[str, Any]) -> str:
    header = ["pattern", "different scores", *(f"near the threshold at {100 * s:g}%" for s in agreement["shares"])]
    rows = []
    for name, entry in agreement["patterns"].items():
        near = [f"{t['near']['float32']} ({t['near']['bfloat16']})" for t in entry["thresholds"]]
        rows.append([name, f"{entry['distinct']} of {agreement['layers'] * agreement['kv_heads']}", *near])
    about = (
        "Heads within one unit in the last place of the threshold, in float32 (in bfloat16); 1 is the head itself. "
        "More say that which heads stay full is partly a matter of rounding."
    )
    return "\n\n".join(["## Ties", about, _table(header, rows)])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return render(Table.of([header[0], *(Column(title, align="right") for title in header[1:])], rows))
