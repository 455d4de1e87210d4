"""Tables of KV bytes, loss and recall before and after a conversion and its healing, for terminal and model card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surgery.common.human import decimal, loss_of_stage, per_token, shares_at, with_perplexity
from surgery.common.tables.table import Column, Table

RECALL = Column("recall", "Share of planted keys that the model repeats correctly", lambda value: f"{value:.2f}")


def before_and_after(
    kv: Sequence[float],
    stages: Sequence[dict[str, Any]] = (),
    classes: Sequence[str] = (),
    others: Iterable[tuple[str, str, str]] = (),
    ratio_at: Mapping[str, float] | None = None,
) -> Table:
    """Build the table that compares the source with the converted checkpoint.

    Args:
        kv: KV bytes per token of source and result.
        stages: loss and recall after each stage; the first entry is the source, the last one the result. Empty if
            not measured.
        classes: model classes of source and result.
        others: additional rows (name, source, result).
        ratio_at: share of the KV bytes by context length, if it depends on the length.
    """
    kv_cell = f"{per_token(kv[1])}, {shares_at(ratio_at, kv[1] / kv[0])}"
    rows = [("class", *classes)] if classes else []
    rows += [("KV cache per token", per_token(kv[0]), kv_cell), *others]
    if stages and stages[0]["loss"] is not None:
        ends = stages[0], stages[-1]
        rows.append(("held-out loss in nats (perplexity)", *(with_perplexity(each["loss"]) for each in ends)))
        rows.append(("recall of planted keys", *(decimal(each["recall"], 2) for each in ends)))
    return Table.of(["", Column("source", align="right"), Column("converted", align="right")], rows)


def stages_table(stages: Iterable[dict[str, Any]]) -> Table:
    """Build the table of loss and recall after each stage of a conversion."""
    rows = [(row["stage"], loss_of_stage(row), row["recall"]) for row in stages]
    return Table.of(["stage", Column("loss (perplexity)", "Nats per token", align="right"), RECALL], rows)


def useless_layers(layers: Iterable[Any]) -> dict[str, float]:
    """Return the layers whose attention output is worse than zeros: those with a relative error above 1 or NaN.

    Args:
        layers: layer reports, of which the last lossy stage counts.
    """
    last = {str(layer.layer): next(reversed(getattr(layer, "measured", {}).values()), 0.0) for layer in layers}
    return {layer: error for layer, error in last.items() if not error <= 1}


def useless_message(layers: dict[str, float]) -> str:
    """Format a warning on the layers of :func:`useless_layers`."""
    errors = ", ".join(f"{layer} ({error:.0%})" for layer, error in layers.items())
    return (
        f"The error of the attention output exceeds 100% in layers {errors}. Choose a larger cache,"
        " or keep these layers unchanged (--keep-layers, where the target has it)."
    )


def healed_table(quality: Sequence[dict[str, Any]]) -> Table:
    """Build the table of a healing from :func:`surgery.reporting.healing_table.quality_table`."""
    loss = Column("held-out loss (perplexity)", "Nats per token", with_perplexity)
    return Table.of(["", loss, RECALL], [(row["name"], row["loss"], row["recall"]) for row in quality])
