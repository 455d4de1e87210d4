"""The figures of docs/research/calibration-tokens.md are those of the conversions that were measured."""

import csv

from command_line import ROOT

TOKENS = (6_144, 12_288, 24_576, 49_152)


def test_the_table_is_what_was_measured():
    curves = {}
    for line in csv.DictReader((ROOT / "docs" / "research" / "calibration-tokens.csv").read_text().splitlines()):
        increase, low, high = (float(line[name]) for name in ("increase", "low", "high"))
        curve = curves.setdefault((line["model"], f"{line['to']} {float(line['kv_ratio']):g}"), {})
        curve[int(line["tokens"])] = f"{increase:+.4f} ± {(high - low) / 2:.4f}"
    page = (ROOT / "docs" / "research" / "calibration-tokens.md").read_text(encoding="utf-8")
    for curve, cells in curves.items():
        assert f"| {' | '.join((*curve, *(cells.get(tokens, '') for tokens in TOKENS)))} |" in page
