"""Output of ``surgery heads``: tables, or with ``as_json`` one JSON object."""

from __future__ import annotations

from surgery.common.human import duration
from surgery.common.machine import seconds_since_start
from surgery.console.page import make_table, new_page, plain, print_json, typed
from surgery.console.verdicts import show_next

BEST = 6
"""Number of top-scored heads that are listed."""


def show_pattern(scored, called: str, *, as_json: bool = False) -> None:
    """Print head scores (:class:`surgery.heads.scoring.ScoredHeads`); ``called`` names the checkpoint in commands."""
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
    out.print(f"highest scores: {best}")
    out.print(
        f"for {pattern.sinks} sinks and {pattern.recent} recent tokens; {duration(seconds_since_start())}, "
        f"{len(pattern.seeds)} seed{'s' if len(pattern.seeds) > 1 else ''}"
    )
    out.print(f"[bold]{plain(scored.path)}[/bold]", soft_wrap=True)
    out.print(f"heat map: {plain(scored.heat_map)}", soft_wrap=True)
    show_next(out, [f"surgery convert --to hybrid {typed(called)} --heads {typed(scored.path)} --kv-ratio 0.5"])
