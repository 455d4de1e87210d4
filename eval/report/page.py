"""The report as one HTML page that needs nothing else: no network, no other file.

Everything of the report passes through `markup.tag`, which escapes it. A content security policy forbids the page to
load or send anything, should something slip through.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surgery.eval.report.figures import PLOTS
from surgery.eval.report.markup import Markup, svg, tag
from surgery.eval.report.page_details import completions, conversions, settings
from surgery.eval.report.page_tables import by_source, headline, lm_eval, memory, recall, repeat, ruler, speed
from surgery.eval.report.tables import Report, dig

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)
Section = tuple[str, str, Sequence[Markup | None]]


def render(report: Report) -> str:
    """The page as text, to be written as UTF-8. Sections of tasks that were not run are left out."""
    sections = [(key, title, parts) for key, title, parts in _sections(report) if any(parts)]
    title = str(report.get("title") or "Evaluation")
    page = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("title", title),
            tag("style", _file("page.css")),
        ),
        tag(
            "body",
            tag("h1", title),
            tag("p", _origin(report), class_="note"),
            _banner(report),
            tag("nav", *(tag("a", name, href=f"#{key}") for key, name, _ in sections), aria_label="sections"),
            tag("main", *(_section(*section) for section in sections)),
            tag("script", _file("page.js")),
        ),
        lang="en",
    )
    return f"<!doctype html>\n{page}\n"


def _sections(report: Report) -> list[Section]:
    def plot(key: str) -> Markup | None:
        figure = PLOTS[key].draw(report)
        return None if figure is None else tag("figure", svg(figure, key, PLOTS[key].title))

    return [
        ("summary", "Summary", [headline(report)]),
        ("pareto", "Quality against KV bytes", [plot("pareto-loss"), plot("pareto-recall")]),
        ("loss", "Loss", [plot("loss-by-position"), by_source(report)]),
        ("recall", "Recall of planted keys", [recall(report)]),
        ("repeats", "Spans that come again", [repeat(report)]),
        ("needles", "Needle in a haystack, % found", [plot("needle")]),
        ("ruler-style", "RULER-style tasks", [plot("ruler"), ruler(report)]),
        ("lm-eval", "lm-evaluation-harness", [lm_eval(report)]),
        ("generations", "Completions side by side", [completions(report)]),
        ("bytes", "Memory", [plot("memory"), memory(report)]),
        ("throughput", "Speed and roofline", [plot("speed"), speed(report)]),
        ("conversions", "Conversions", [plot("layer-errors"), conversions(report)]),
        ("settings", "Settings and provenance", [settings(report)]),
    ]


def _section(key: str, title: str, parts: Sequence[Markup | None]) -> Markup:
    return tag("section", tag("h2", title, id=f"{key}-title"), *parts, id=key, aria_labelledby=f"{key}-title")


def _banner(report: Report) -> Markup | None:
    limit = dig(report, "settings", "limit")
    if limit is None:
        return None
    words = f" first {limit} samples of each task only. Too few to decide on; run again without a limit."
    return tag("p", tag("strong", "Quick look:"), words, class_="banner", role="note")


def _origin(report: Report) -> str:
    parts = [
        report.get("created"),
        f"surgery {report['surgery_version']}" if report.get("surgery_version") else None,
        dig(report, "environment", "device_name"),
        f"quality in {dig(report, 'settings', 'dtype')}" if dig(report, "settings", "dtype") else None,
    ]
    return " · ".join(str(part) for part in parts if part)


def _file(name: str) -> Markup:
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))
