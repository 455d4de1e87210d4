"""Rendering of a report as one self-contained HTML page, without external files or network access.

`page.html` escapes all values of the report. As a second line of defense, a content security policy forbids the page
to load or send anything.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from surgery.common.tables import html
from surgery.common.tables.table import Table
from surgery.eval.report import page_details as details
from surgery.eval.report import page_tables as tables
from surgery.eval.report.figures import PLOTS
from surgery.eval.report.style import FAINT, GRID, INK, MUTED, PAPER, REST, to_svg
from surgery.eval.report.tables import Report, by_bytes, dig
from surgery.eval.report.verdict import verdict

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)


class Drawn(NamedTuple):
    """Plot on the page; `has_rest` tells whether it has rows that can be hidden."""

    title: str
    svg: Markup
    has_rest: bool


class Section(NamedTuple):
    """Section of the page."""

    key: str
    title: str
    about: str
    plots: list[Drawn]
    tables: list[Table]
    folded: list[Table]


def render(report: Report) -> str:
    """Render the page as HTML text for UTF-8; sections of tasks that were not run are omitted."""
    report = by_bytes(report)
    return html.render(
        Path(__file__).with_name("page.html"),
        title=str(report.get("title") or "Evaluation"),
        policy=POLICY,
        origin=_origin(report),
        limit=dig(report, "settings", "limit"),
        verdict=verdict(report),
        headline=tables.headline(report),
        sections=_sections(report),
        completions=details.completions(report),
        command=report.get("command"),
        facts=details.facts(report),
        provenance=[table for table in (details.checkpoints(report), details.times(report)) if table],
    )


# fmt: off
SECTIONS = (
    ("pareto", "Quality against KV bytes", ("pareto-loss", "pareto-recall"), (), (),
     "Each point is a row. Left is smaller; the dashed line joins rows that no other row beats at both."),
    ("loss", "Loss", ("loss-by-position",), (tables.by_source,), (tables.by_many_sources,),
     "Mean cross-entropy of the next token in nats (natural units: 1 nat is 1.44 bits). Perplexity is its exp."),
    ("recall", "Recall of planted keys", (), (tables.recall,), (),
     "Keys are planted in text; the model has to give back all digits of one when it is asked for."),
    ("needles", "Needle in a haystack, % found", ("needle",), (), (),
     "A sentence is hidden at a depth of a text (0%: at its beginning), and the model is asked for it."),
    ("lm-eval", "lm-evaluation-harness", (), (tables.lm_eval,), (),
     "Tasks of that library, by its own rules."),
    ("throughput", "Speed", ("speed",), (), (tables.speed,), "Tokens a second as measured."),
    ("conversions", "Conversions", ("layer-errors",), (details.conversions,), (),
     "Relative error of each converted layer's own output, and how each checkpoint was made."),
)
# fmt: on
"""Sections as (key, title, plots, tables, folded tables that repeat a plot's data, explanation)."""


def _sections(report: Report) -> list[Section]:
    sections = []
    for key, title, plots, open_makers, folded, about in SECTIONS:
        figures = [(name, figure) for name in plots if (figure := PLOTS[name].draw(report)) is not None]
        drawn = [(PLOTS[name].title, inline(figure, name, PLOTS[name].title)) for name, figure in figures]
        tables = [[table for make in makers if (table := make(report))] for makers in (open_makers, folded)]
        if drawn or any(tables):
            sections.append(
                Section(key, title, about, [Drawn(t, svg, 'class="rest"' in svg) for t, svg in drawn], *tables)
            )
    return sections


def _origin(report: Report) -> str:
    parts = [
        str(report.get("created") or "").replace("T", " ").replace("+00:00", " UTC"),
        f"surgery {report['surgery_version']}" if report.get("surgery_version") else None,
        dig(report, "environment", "device_name"),
        f"quality in {dig(report, 'settings', 'dtype')}" if dig(report, "settings", "dtype") else None,
    ]
    return " · ".join(str(part) for part in parts if part)


SVG = "{http://www.w3.org/2000/svg}"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"}
TOGGLED = re.compile(f"({REST}|{FAINT})-[0-9]+")


def inline(figure: Figure, prefix: str, title: str) -> Markup:
    """Convert a figure to inline SVG with a title; elements that can be hidden get the class "rest" or "faint".

    The prefix makes ids and references unique among the figures of a page.
    """
    root = ElementTree.fromstring(to_svg(figure))
    for parent in root.iter():
        for child in list(parent):
            if child.tag == f"{SVG}style" or "metadata" in child.tag:
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        for key, value in list(element.attrib.items()):
            if key == "id":
                if toggled := TOGGLED.fullmatch(value):
                    element.attrib["class"] = toggled[1]
                value = f"{prefix}-{value}"
            elif key == XLINK_HREF:
                del element.attrib[key]
                key, value = "href", re.sub(r"^#", f"#{prefix}-", value)
            element.attrib[key] = _themed(re.sub(r"url\(#", f"url(#{prefix}-", value))
    width = float(root.attrib.pop("width").removesuffix("pt"))
    del root.attrib["height"]
    # 1 pt is 4/3 CSS pixels.
    root.attrib |= {"role": "img", "aria-label": title, "class": "plot", "style": f"max-width: {width * 4 / 3:.0f}px"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _themed(value: str) -> str:
    for color, name in THEME.items():
        value = value.replace(color, name)
    return value
