"""Loss and recall along a conversion and its healing: the tables of screens and of the model card."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from surgery.common.human import loss_of_stage, with_perplexity
from surgery.common.tables.table import Column, Table

RECALL = Column("recall", "Share of planted keys that the model finds again", lambda value: f"{value:.2f}")


def ladder_table(ladder: Iterable[dict[str, Any]]) -> Table:
    """After each stage of a conversion."""
    rows = [(row["stage"], loss_of_stage(row), row["recall"]) for row in ladder]
    return Table.of(["stage", Column("loss (perplexity)", "Nats per token", align="right"), RECALL], rows)


def healed_table(quality: Sequence[dict[str, Any]]) -> Table:
    """Before and after a healing, of :func:`surgery.reporting.healing_table.quality_table`."""
    loss = Column("held-out loss (perplexity)", "Nats per token", with_perplexity)
    return Table.of(["", loss, RECALL], [(row["name"], row["loss"], row["recall"]) for row in quality])
