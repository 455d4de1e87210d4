"""Makes what the README shows of SmolLM2, the table in it and docs/smollm2/quality.svg, and the pages of all reports.

From docs/smollm2/report.json; MLA before and after healing, and how fast it decodes, from the report in healing/ there.

python tools/readme.py            # writes them; tests hold that they are current
"""

from __future__ import annotations

import math
import re
import textwrap
from html import escape
from pathlib import Path
from typing import Any

from surgery.eval.report import page
from surgery.eval.report.document import read_report
from surgery.eval.report.tables import columns

ROOT = Path(__file__).resolve().parent.parent
REPORT, README = ROOT / "docs" / "smollm2", ROOT / "README.md"
HEALED = REPORT / "healing"
PICTURE = REPORT / "quality.svg"
SHOWN = {
    "kv_bytes_per_token": "KV B/token",
    "kv_ratio": "KV share",
    "loss_change": "Δ loss",
    "perplexity": "perplexity",
    "recall": "recall",
}
SHOWN_FIRST, LEFT_OUT = "bits-4", ("mla-2", "mla-4", "transmla-2", "transmla-4")
"""What is told beneath the picture; of the first report and the picture, not of the table: MLA is the other's there."""
BEGIN, END = "<!-- made by tools/readme.py -->\n", "<!-- end -->"

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 64, 24, 40, 52
TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
COLOURS = {"checkpoint": "#0b6bcb", "variant": "#b35900", "baseline": "#333333"}
MEANINGS = {
    "baseline": "source",
    "variant": "plain quantised cache of the source",
    "checkpoint": "converted, no training",
}


def hook(report: dict[str, Any]) -> str:
    """What stands beneath the picture."""
    chosen = {column.key: column for column in columns(report)}
    source, best = (next(row for row in report["rows"] if row["name"] == name) for name in ("source", SHOWN_FIRST))
    share, source_perplexity, perplexity, recall = (
        chosen[key].text(row, report)
        for key, row in (("kv_ratio", best), ("perplexity", source), ("perplexity", best), ("recall", best))
    )
    return (
        f"Nothing was trained here. `{SHOWN_FIRST}` (`--to lowrank --kv-ratio 0.25 --bits auto --sinks 4`) keeps "
        f"{share} of the KV bytes: perplexity\n{source_perplexity} → {perplexity}, {recall} of planted keys found.\n"
    )


def caption(report: dict[str, Any], healed: dict[str, Any]) -> str:
    """How it was measured."""
    settings, timed = report["settings"], healed["rows"][0]["results"]["speed"]
    seconds = [row["conversion"]["healing"]["seconds"] for row in healed["rows"] if row["name"].endswith("-healed")]
    contexts = " and ".join(f"{each:,}" for each in _rates(healed["rows"][0]))
    told = (
        f"How: loss in nats per token, and perplexity, on {settings['windows']} x {settings['length']:,} tokens that "
        f"no calibration saw; recall of {settings['recall_prompts']} numbers that are planted in text and asked for at "
        f"its end; bytes of the live cache ({report['created'][:10]}). Tokens/s: decoded, of one sequence behind "
        f"{contexts} tokens, by transformers in {timed['dtype']} on {timed['device'].upper()}, threads: "
        f"{timed['threads']}. The `-healed` were trained for {' and '.join(f'{each / 60:.0f}' for each in seconds)} "
        "minutes on two cores. `bits-N` asks for an N-th of the bytes; first tokens and groups that are not full yet "
        "are exact and come on top. Intervals: [conversions](docs/smollm2/report.md), "
        "[healing](docs/smollm2/healing/report.md)."
    )
    return textwrap.fill(told, 130, break_long_words=False, break_on_hyphens=False)


def table(report: dict[str, Any], healed: dict[str, Any]) -> str:
    """In Markdown: the source, then what else is shown by its bytes; MLA, its healing and speeds are of the second."""
    chosen = {column.key: column for column in columns(report)}
    rows = [(row, report) for row in report["rows"] if row["name"] not in LEFT_OUT]
    rows += [(row, healed) for row in healed["rows"] if row["role"] != "baseline"]
    rows.sort(key=lambda each: (each[0]["role"] != "baseline", -each[0]["kv"]["ratio"]))
    speeds = {row["name"]: _rates(row) for row in healed["rows"]}
    heads = [*SHOWN.values(), *(f"tokens/s, {context:,}" for context in speeds["source"])]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for row, found in rows:
        name = row["name"] if row["role"] == "variant" else f"`{row['name']}`"
        rates = speeds.get(row["name"]) or dict.fromkeys(speeds["source"])
        cells = [chosen[key].text(row, found) for key in SHOWN]
        cells += ["-" if rate is None else f"{rate:.1f}" for rate in rates.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", caption(report, healed), ""])


def picture(report: dict[str, Any]) -> str:
    """An SVG: loss increase against the share of the KV bytes, the latter on a log axis, the former on one of roots."""
    points = [(row["kv"]["ratio"], _change(row), row["name"], row["role"]) for row in report["rows"]]
    least, most = min(point[0] for point in points) / 1.25, max(point[1] for point in points) * 1.1
    span_x, span_y = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(share: float) -> float:
        return LEFT + span_x * (math.log(share / least) / math.log(1.25 / least))

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - span_y * math.sqrt(max(loss, 0) / most)

    drawn = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for tick in (tick for tick in TICKS if tick <= most):
        drawn.append(_line(LEFT, y(tick), WIDTH - RIGHT, y(tick)) + _text(LEFT - 8, y(tick) + 4, f"{tick:g}", "end"))
    for tick in (share for share in (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1) if share >= least):
        drawn.append(_line(x(tick), TOP, x(tick), HEIGHT - BOTTOM))
        drawn.append(_text(x(tick), HEIGHT - BOTTOM + 18, f"{100 * tick:g}%", "middle"))
    drawn.append(_text(LEFT + span_x / 2, HEIGHT - 10, "KV bytes a token, of the source's", "middle"))
    drawn.append(_text(LEFT - 44, TOP - 18, "loss increase, nats per token (down is better)", "start"))
    taken: list[tuple[float, float, float, float]] = [(x(r) - 6, y(c) - 6, x(r) + 6, y(c) + 6) for r, c, _, _ in points]
    for share, change, name, role in sorted(points):
        colour = COLOURS[role]
        drawn.append(f'<circle cx="{x(share):.1f}" cy="{y(change):.1f}" r="5" fill="{colour}"/>')
        drawn.append(_label(x(share), y(change), name, colour, taken))
    for number, (role, meaning) in enumerate(MEANINGS.items()):
        if any(point[3] == role for point in points):
            top = TOP + 14 + 18 * number
            drawn.append(f'<circle cx="{WIDTH - 250}" cy="{top - 4}" r="5" fill="{COLOURS[role]}"/>')
            drawn.append(_text(WIDTH - 238, top, meaning, "start"))
    title = escape(report["title"])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
    style = 'font-family="system-ui, sans-serif" font-size="12"'
    return f"{head} {style}>\n<title>{title}</title>\n" + "\n".join(drawn) + "\n</svg>\n"


def with_parts(readme: str, *parts: str) -> str:
    """The README with these between its marks, one after the other."""
    left = iter(parts)
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + next(left) + END, readme, flags=re.DOTALL)


def _rates(row: dict[str, Any]) -> dict[int, float]:
    """Tokens a second of one sequence by the tokens before them; nothing where none were timed."""
    points = row["results"].get("speed", {}).get("points", ())
    return {each["context"]: each["decode_tokens_per_second"] for each in points if each["batch"] == 1}


def _change(row: dict[str, Any]) -> float:
    return (row["comparison"] or {}).get("loss", {}).get("difference", 0.0)


def _label(x: float, y: float, name: str, colour: str, taken: list[tuple[float, float, float, float]]) -> str:
    """A point's name beside it, on the first side where nothing else is."""
    width = 6.6 * len(name)
    sides = ((x + 9, y + 4), (x - 9 - width, y + 4), (x - width / 2, y - 10), (x - width / 2, y + 20), (x + 9, y - 12))
    for left, base in sides:
        box = (left, base - 10, left + width, base + 3)
        inside = box[0] > LEFT and box[2] < WIDTH - 4 and box[3] < HEIGHT - BOTTOM + 4
        if inside and not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
            break
    taken.append(box)
    return _text(left, base, name, "start", colour)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#444444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


if __name__ == "__main__":
    found = read_report(REPORT)
    PICTURE.write_text(picture(found), encoding="utf-8")
    parts = hook(found), table(found, read_report(HEALED))
    README.write_text(with_parts(README.read_text(encoding="utf-8"), *parts), encoding="utf-8")
    for folder in (path.parent for path in (ROOT / "docs").rglob("report.json")):
        (folder / "report.html").write_text(page.render(read_report(folder)), encoding="utf-8")
    print(PICTURE, README, "docs/**/report.html", sep="\n")
