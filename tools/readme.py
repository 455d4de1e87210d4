"""Makes what the README shows of SmolLM2, the table in it and docs/smollm2/quality.svg, and the pages of all reports.

From docs/smollm2/report.json; MLA before and after healing, and how fast it decodes, from the report in healing/ there.

python tools/readme.py            # writes them; tests hold that they are current
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from surgery.eval.report import page, pareto
from surgery.eval.report.document import read_report
from surgery.eval.report.style import to_svg
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


def hook(report: dict[str, Any]) -> str:
    """Return the sentence beneath the picture."""
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
    """Return the sentence about the measurement."""
    settings, timed = report["settings"], healed["rows"][0]["results"]["speed"]
    seconds = [row["conversion"]["healing"]["seconds"] for row in healed["rows"] if row["name"].endswith("-healed")]
    contexts = " and ".join(f"{each:,}" for each in _rates(healed["rows"][0]))
    text = (
        f"How: loss in nats per token, and perplexity, on {settings['windows']} x {settings['length']:,} tokens that "
        f"no calibration saw; recall of {settings['recall_prompts']} numbers that are planted in text and asked for at "
        f"its end; bytes of the live cache ({report['created'][:10]}). Tokens/s: decoded, of one sequence after "
        f"{contexts} tokens, by transformers in {timed['dtype']} on {timed['device'].upper()}, threads: "
        f"{timed['threads']}. The `-healed` were trained for {' and '.join(f'{each / 60:.0f}' for each in seconds)} "
        "minutes on two cores. `bits-N` asks for an N-th of the bytes; first tokens and groups that are not full yet "
        "are exact and come on top. Intervals: [conversions](docs/smollm2/report.md), "
        "[healing](docs/smollm2/healing/report.md)."
    )
    return textwrap.fill(text, 130, break_long_words=False, break_on_hyphens=False)


def table(report: dict[str, Any], healed: dict[str, Any]) -> str:
    """Return the Markdown table: the source, then the other rows by their bytes; MLA, its healing and speeds are of the
    second."""
    chosen = {column.key: column for column in columns(report)}
    rows = [(row, report) for row in report["rows"] if row["name"] not in LEFT_OUT]
    rows += [(row, healed) for row in healed["rows"] if row["role"] != "baseline"]
    rows.sort(key=lambda each: (each[0]["role"] != "baseline", -each[0]["kv"]["ratio"]))
    speeds = {row["name"]: _rates(row) for row in healed["rows"]}
    heads = [*SHOWN.values(), *(f"tokens/s, {context:,}" for context in speeds["source"])]
    lines = [f"| | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for row, entry in rows:
        name = row["name"] if row["role"] == "variant" else f"`{row['name']}`"
        rates = speeds.get(row["name"]) or dict.fromkeys(speeds["source"])
        cells = [chosen[key].text(row, entry) for key in SHOWN]
        cells += ["-" if rate is None else f"{rate:.1f}" for rate in rates.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", caption(report, healed), ""])


def with_parts(readme: str, *parts: str) -> str:
    """The README with these between its marks, one after the other."""
    left = iter(parts)
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + next(left) + END, readme, flags=re.DOTALL)


def _rates(row: dict[str, Any]) -> dict[int, float]:
    """Tokens a second of one sequence by the tokens before them; nothing where none were timed."""
    points = row["results"].get("speed", {}).get("points", ())
    return {each["context"]: each["decode_tokens_per_second"] for each in points if each["batch"] == 1}


if __name__ == "__main__":
    found = read_report(REPORT)
    PICTURE.write_text(to_svg(pareto.loss(found)), encoding="utf-8")
    parts = hook(found), table(found, read_report(HEALED))
    README.write_text(with_parts(README.read_text(encoding="utf-8"), *parts), encoding="utf-8")
    for folder in (path.parent for path in (ROOT / "docs").rglob("report.json")):
        (folder / "report.html").write_text(page.render(read_report(folder)), encoding="utf-8")
    print(PICTURE, README, "docs/**/report.html", sep="\n")
