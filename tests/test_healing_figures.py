"""The figures of docs/healing.md are those of the reports of healed models."""

import json
import re
from pathlib import Path

from surgery.reporting.healing_table import LEAST_GAP

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs" / "testbed" / "healing" / "report.json"
NAMES = {"mla-4", "mla-8", "gqa-2", "mqa", "lowrank-8", "hybrid-12"}
NUMBER, SHARE = r" ([\d.]+) \|", r" (\d+%|-) \|"
PERCENT = r" ([\d.]+)% \|"


def report() -> dict:
    return json.loads(REPORT.read_text(encoding="utf-8"))


def results() -> dict[str, dict]:
    return {row["name"]: row["results"] for row in report()["rows"]}


def losses_and_recall(*each: dict) -> tuple[list[str], list[str]]:
    return [f"{one['loss']['loss']:.4f}" for one in each], [f"{100 * one['recall']['accuracy']:.1f}" for one in each]


def test_the_page_is_the_report():
    result = results()
    source, trained = (result[name]["loss"]["loss"] for name in ("source", "source-trained"))
    text = (ROOT / "docs" / "healing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|" + 2 * NUMBER + 2 * SHARE + 2 * NUMBER + 2 * PERCENT, text, re.M)
    assert {row[0] for row in rows} == NAMES
    for name, *entry in rows:
        both = result[name], result[f"{name}-healed"]
        losses, recall = losses_and_recall(*both)
        before, after = (each["loss"]["loss"] for each in both)
        gaps = [before - least for least in (source, trained)]
        closed = [f"{100 * (before - after) / gap:.0f}%" if gap >= LEAST_GAP else "-" for gap in gaps]
        assert entry == [*losses, *closed, *(f"{each['loss']['divergence']['kl']:.4f}" for each in both), *recall]


def test_a_real_model_is_its_report():
    report = json.loads((ROOT / "docs" / "smollm2" / "healing" / "report.json").read_text(encoding="utf-8"))
    expected = []
    for row in report["rows"]:
        loss, accuracy, entries = row["results"]["loss"], row["results"]["recall"]["accuracy"], row["kv"]["ratio"]
        change = row["comparison"]["loss"] if row["comparison"] else None
        increase = f"{change['difference']:+.4f} [{change['low']:.4f}, {change['high']:.4f}]" if change else ""
        kl = f"{loss['divergence']['kl']:.4f}" if loss.get("divergence") else ""
        message = (f"{100 * entries:.1f}%", f"{loss['loss']:.4f} ({loss['perplexity']:.2f})", increase, kl)
        expected.append((row["name"], *message, f"{100 * accuracy:.1f}%"))
    page = (ROOT / "docs" / "healing.md").read_text(encoding="utf-8").split("## A real model")[1]
    rows = re.findall(
        r"^\| `?([\w -]+?)`? \| ([^|]*?) \| ([^|]*?) \| ([^|]*?) ?\| ([^|]*?) ?\| ([^|]*?) \|$", page, re.M
    )
    assert rows == expected
    minutes = [round(row["conversion"]["healing"]["seconds"] / 60) for row in report["rows"][2::2]]
    assert "for {} and {} minutes.".format(*minutes) in page
    apart = [row["conversion"]["healing"]["held_out"] for row in report["rows"][2::2]]
    divergences = [[float(entry[end]["kl"]) for end in ("first", "last")] for entry in apart]
    (first, last), quarters = divergences
    assert "from {:.3f} to {:.3f} at the quarter and from {:.4f} to {:.4f} at".format(*quarters, first, last) in page
