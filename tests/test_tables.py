"""One description of a table, and what each form makes of it."""

import math

import pytest
from rich.console import Console

from surgery.common.human import perplexity, share, with_perplexity
from surgery.common.tables import markdown, terminal
from surgery.common.tables.table import Cell, Column, Table

TABLE = Table.of(
    [
        "",
        Column("loss", "Nats a token", lambda value: f"{value:.2f}", key="loss"),
        Column("of", align="left"),
        "why",
    ],
    [("a|b", Cell(1 / 3, ("+0.10", "[0, 1]")), 12, "[red]"), ("c", None, 3, "<b>")],
)


def test_alignment_follows_from_values_unless_a_column_says_it():
    assert TABLE.alignments() == ["left", "right", "left", "left"]
    assert Table.of(["", "a", "b"], [("x", "-0.5", None), ("y", "+1", ">99%")]).alignments() == ["left", *["right"] * 2]
    assert len(Table.of(["a", "b"], []).alignments()) == 2


def test_markdown():
    assert markdown.render(TABLE).splitlines() == [
        "| | loss | of | why |",
        "|---|---:|---|---|",
        "| a\\|b | 0.33 <br>+0.10 [0, 1] | 12 | [red] |",
        "| c | - | 3 | &lt;b&gt; |",
    ]
    assert markdown.explanations(TABLE) == "- loss: Nats a token."


def test_a_terminal_shows_what_looks_like_markup():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(terminal.render(TABLE))
    assert "0.33" in capture.get() and "[0, 1]" in capture.get() and "[red]" in capture.get()


def test_perplexity_is_the_exponential_of_a_loss():
    assert perplexity(math.log(8)) == pytest.approx(8) and perplexity(None) is None and perplexity(1e9) == math.inf
    shares = {None: "-", 0.0: "0.0%", 0.5: "50.0%", 0.00099: "0.099%", 1e-5: "0.001%"}
    assert {value: share(value) for value in shares} == shares
    assert with_perplexity(2.2785) == "2.2785 (9.762)" and with_perplexity(None) == "-"
