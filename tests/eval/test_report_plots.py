import math
from pathlib import Path

import matplotlib
import pytest
from matplotlib.colors import to_hex
from sample_report import LIMIT, sample_report

from surgery.common.errors import SurgeryError
from surgery.eval.report import heat_maps, pareto, plots
from surgery.eval.report.document import read_report
from surgery.eval.report.figures import PLOTS, save_plots
from surgery.eval.report.style import label, looks, to_svg
from surgery.eval.report.verdict import pareto_front

PNG = b"\x89PNG"
DOCS = Path(__file__).resolve().parents[2] / "docs"
REPORTS = sorted(path.parent for path in DOCS.rglob("report.json"))


@pytest.mark.parametrize("key", PLOTS)
def test_every_plot_is_the_same_wherever_it_is_drawn(key):
    """Draw names that are text and not formulas, and broken numbers, which leave gaps."""
    report = sample_report(rows=3 if key == "pareto-loss" else 2)  # of which one has no loss
    for row in report["rows"]:
        row["name"] = f"$\\frac{{{row['name']}<&$\x00\n"
    report["baseline"] = report["rows"][0]["name"]
    results = report["rows"][-1]["results"]
    results["loss"]["loss"] = results["loss"]["by_position"][0]["loss"] = math.nan
    report["rows"][-1]["comparison"]["loss"] = {"difference": math.nan, "low": math.nan, "high": math.inf}
    results["speed"]["points"][0] |= {"decode_tokens_per_second": None, "note": "out of memory"}
    with matplotlib.rc_context({"lines.linewidth": 9, "svg.hashsalt": "other", "font.size": 30}):
        before = dict(matplotlib.rcParams)
        elsewhere = to_svg(PLOTS[key].draw(report))
        assert dict(matplotlib.rcParams) == before
    assert to_svg(PLOTS[key].draw(report)) == elsewhere
    assert "frac{gqa&lt;&amp;" in elsewhere.replace("mla-1/2", "gqa") and "<dc:date>" not in elsewhere


@pytest.mark.parametrize("key", PLOTS)
def test_nothing_to_draw(key):
    bare = {"rows": [{"name": "x", "role": "checkpoint"}, {"name": "y", "results": {}}], "baseline": None}
    assert PLOTS[key].draw(bare) is None


@pytest.mark.parametrize(
    ("points", "better", "expected"),
    [
        ([(1.0, 0.0), (0.5, 0.1), (0.5, 0.2), (0.25, 0.15), (0.6, 0.12)], "low", [3, 1, 0]),
        ([(1.0, 0.9), (0.5, 0.9), (0.25, 0.1)], "high", [2, 1]),
        ([(0.5, 0.1), (0.5, 0.1)], "low", [0]),
        ([], "low", []),
    ],
)
def test_frontier(points, better, expected):
    assert pareto_front(points, better) == expected


def test_pareto_shows_changes_intervals_and_kinds():
    report = sample_report()
    (ax,) = pareto.loss(report).axes
    marked = {line.get_marker(): line for line in ax.lines if len(line.get_xdata()) == 1}
    assert set(marked) == {"D", "s", "o"}
    assert marked["s"].get_markerfacecolor() == "none" != marked["o"].get_markerfacecolor()
    spots = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in ax.lines if len(line.get_xdata()) == 1
    }
    assert spots == {
        (row["kv"]["ratio"], row["comparison"]["loss"]["difference"] if row["comparison"] else 0.0)
        for row in report["rows"]
    }
    bars = [list(line.get_ydata()) for line in ax.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] != 0]
    change = report["rows"][-1]["comparison"]["loss"]
    assert [change["low"], change["high"]] in bars
    assert {text.get_text() for text in ax.texts} == {row["name"] for row in report["rows"]}
    lines = {line.get_label(): line for line in ax.lines}
    rivals = lines["no cheap baseline is better at both"]
    assert sorted(rivals.get_xdata()) == [0.25, 0.3125, 0.5625] and "no row is better at both" in lines


@pytest.mark.parametrize("crowded", [False, True])
def test_names_of_points_do_not_cover_each_other(crowded):
    report = sample_report()
    for index, row in enumerate(report["rows"][1:] if crowded else []):
        row["kv"]["ratio"] = 0.5 + index / 100
        row["comparison"]["loss"] = {"difference": 0.1 + index / 500, "low": 0.1, "high": 0.12}
    figure = pareto.loss(report)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]


def test_needle_panels_have_length_across_depth_down_and_the_limit():
    report = sample_report(rows=3)
    grid = report["rows"][1]["results"]["needle"]["grid"]
    figure = heat_maps.needle(report)
    assert len(figure.axes) == 3
    ax = figure.axes[1]
    output = ax.collections[0].get_array().reshape(5, 4)
    assert output[4][1] == grid[1][4]
    assert ax.yaxis_inverted()
    assert [text.get_text() for text in ax.get_xticklabels()] == ["512", "1,024", "2,048", "3,072"]
    assert [line.get_xdata()[0] for line in ax.lines] == [3]  # between 2,048 and 3,072
    assert f"{LIMIT:,}" in ax.get_title(loc="right")
    for row in report["rows"]:
        row["results"]["needle"]["limit"] = None
    assert not heat_maps.needle(report).axes[0].lines


def test_speed_has_a_panel_a_phase_and_batch():
    report = sample_report(rows=2)
    titles = [f"{phase}, batch {batch}" for phase in ("Decoding", "Prefill") for batch in (1, 8)]
    _, eight, *_ = panels = plots.speed(report).axes
    assert [ax.get_title(loc="left") for ax in panels] == titles
    points = [p for p in report["rows"][1]["results"]["speed"]["points"] if p["batch"] == 8]
    lines = [(line.get_linestyle(), list(line.get_ydata())) for line in eight.lines]
    assert ("-", [p["decode_tokens_per_second"] for p in points]) in lines


def test_change_by_position_is_against_the_baseline():
    report = sample_report(rows=3)
    _, change = plots.loss_by_position(report).axes
    first, last = report["rows"][0], report["rows"][2]
    expected = [
        b["loss"] - a["loss"]
        for a, b in zip(*(row["results"]["loss"]["by_position"] for row in (first, last)), strict=True)
    ]
    assert expected in [list(line.get_ydata()) for line in change.lines]


def test_buckets_that_grow_are_on_a_log_axis():
    report = sample_report(rows=2)
    assert plots.loss_by_position(report).axes[0].get_xscale() == "linear"
    for row in report["rows"]:
        row["results"]["loss"]["by_position"] = [
            {"start": start, "end": 2 * start - 1, "loss": 2.0, "tokens": 9} for start in (32, 64, 128, 256)
        ]
    drawn = plots.loss_by_position(report).axes
    assert {(ax.get_xscale(), ax.get_xlabel()) for ax in drawn} == {
        ("log", "position in the sequence, tokens, log scale")
    }


def test_one_look_a_row():
    report = sample_report()
    report["rows"] += [dict(row) for row in report["rows"][1:6]]
    mine = looks(report)
    assert len(set(mine)) == len(mine) == 13
    assert all(to_hex(look.color) == look.color for look in mine)


@pytest.mark.parametrize("folder", REPORTS, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_rows_that_none_beats_differ_in_color(folder):
    report = read_report(folder)
    colors = [look.color for look in looks(report) if not look.beaten or len(report["rows"]) <= 12]
    assert len(set(colors)) == len(colors) > 1


def test_labels_are_short_and_printable():
    assert label("a\nb\x00\u202e") == "a b"
    assert len(label("x" * 99)) == 40


def test_files_of_what_there_is(tmp_path):
    report = sample_report(rows=2)
    for row in report["rows"]:
        row |= {"results": {"recall": row["results"]["recall"]}, "conversion": None, "comparison": row["comparison"]}
        row["comparison"] = row["comparison"] and {"recall": row["comparison"]["recall"]}
    assert save_plots(report, tmp_path) == {"pareto-recall": tmp_path / "pareto-recall.svg"}
    assert (tmp_path / "pareto-recall.svg").read_text() == to_svg(pareto.recall(report))
    assert save_plots(report, tmp_path, "png")["pareto-recall"].read_bytes().startswith(PNG)
    with pytest.raises(SurgeryError, match="cannot write"):
        save_plots(report, tmp_path / "missing")
