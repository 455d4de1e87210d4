"""What the verb ``heads`` prints: tables for people, or with ``as_json`` one JSON object and nothing else."""

from __future__ import annotations

from surgery.common.human import decimal, duration, share, with_perplexity
from surgery.console.page import make_table, new_page, plain, print_json
from surgery.console.verdicts import show_next

BEST = 6
"""Heads that are named."""


def show_pattern(scored, called: str, *, as_json: bool = False) -> None:
    """Prints a scoring (:class:`surgery.heads.scoring.ScoredHeads`) of a checkpoint as it was called."""
    pattern = scored.pattern
    if as_json:
        print_json(
            {
                "path": str(scored.path),
                "heat_map": str(scored.heat_map),
                "scores": pattern.scores.tolist(),
                "ranking": [list(head) for head in pattern.ranking()],
                **pattern.identity(),
            }
        )
        return
    out = new_page()
    out.print(f"\n[bold]{plain(pattern.model.get('name', ''))}: scores of KV heads, method {pattern.method}[/bold]")
    columns = ["layer", *(f"head {head}" for head in range(pattern.kv_heads))]
    rows = [(layer, *(f"{score:.4g}" for score in scores.tolist())) for layer, scores in enumerate(pattern.scores)]
    if pattern.kv_heads <= 16 and pattern.layers <= 40:
        out.print(make_table(columns, rows))
    best = ", ".join(f"layer {layer} head {head}" for layer, head in pattern.ranking()[:BEST])
    out.print(f"highest: {best}")
    out.print(
        f"for {pattern.sinks} sinks and {pattern.recent} recent tokens; {duration(pattern.seconds)}, "
        f"{len(pattern.seeds)} seed{'s' if len(pattern.seeds) > 1 else ''}"
    )
    out.print(f"[bold]{plain(scored.path)}[/bold]", soft_wrap=True)
    out.print(f"drawn in {plain(scored.heat_map)}", soft_wrap=True)
    show_next(out, [f"surgery convert --to hybrid {called} --heads {scored.path} --kv-ratio 0.5"])


def show_comparison(comparison, *, as_json: bool = False) -> None:
    """Prints a comparison (:class:`surgery.heads.compare.Comparison`)."""
    from surgery.heads.comparison_report import curve_table

    content = comparison.content
    if as_json:
        print_json(content)
        return
    out, agreement = new_page(), content["agreement"]
    out.print(f"\n[bold]{plain(content['title'])}[/bold]")
    if agreement["pairs"]:
        shares = agreement["shares"]
        columns = ["", "rank correlation", *(f"best {100 * part:g}%" for part in shares)]
        rows = [
            (
                f"{pair['a']}, {pair['b']}",
                decimal(pair["spearman"], 2),
                *(share(entry["overlap"]) for entry in pair["overlaps"]),
            )
            for pair in agreement["pairs"]
        ]
        rows.append(("chance", "0.00", *(share(entry["chance"]) for entry in agreement["pairs"][0]["overlaps"])))
        out.print("agreement: rank correlation, and overlap of the best heads")
        out.print(make_table(columns, rows))
    rows = [
        (name, entry["distinct"], *(t["near"]["float32"] for t in entry["thresholds"]))
        for name, entry in agreement["patterns"].items()
    ]
    columns = ["", "different scores", *(f"best {100 * part:g}%" for part in agreement["shares"])]
    out.print("ties: heads at the threshold of a share; 1 is none")
    out.print(make_table(columns, rows))
    if measured := content["measured"]:
        source = measured["source"]
        for quantity, title, form in (("recall", "recall", share), ("loss", "loss increase", with_perplexity)):
            header, lines = curve_table(measured, quantity)
            out.print(f"{title} by the share of heads that stream; source {form(source[quantity])}")
            out.print(make_table(header, lines))
    for path in comparison.written:
        out.print(plain(path), soft_wrap=True)
