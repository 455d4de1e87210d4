import pytest
from sample_report import sample_report

from surgery.eval.report import markdown
from surgery.eval.report.tables import bounds, by_bytes, columns, headline, interval, signed
from surgery.eval.tasks.loss import position_buckets


@pytest.fixture
def report():
    return sample_report()


def column(report, key):
    return next(column for column in columns(report) if column.key == key)


def row(report, name):
    return next(row for row in report["rows"] if row["name"] == name)


def test_headline_columns_and_their_order(report):
    quality = ["loss", "perplexity", "loss_change", "cached_loss", "kl", "top1_agreement"]
    tasks = ["recall", "needle", "lm-eval:python_names.acc"]
    assert [column.key for column in columns(report)] == ["kv_bytes_per_token", "kv_ratio", *quality, *tasks]
    assert all(column.about for column in columns(report))


def test_bytes_and_losses_at_contexts(report):
    for number, each in enumerate(report["rows"]):
        each["kv"]["by_context"] = {"1024": 1000 - 100 * number, "8192": 8000, "32768": 32_000, "131072": 0}
    items = {column.key: column for column in columns(report)}
    assert [key for key in items if key.startswith("kv_ratio_")] == ["kv_ratio_1k", "kv_ratio_8k", "kv_ratio_32k"]
    second = report["rows"][1]
    assert items["kv_ratio_1k"].value(second, report) == 0.9 and items["kv_ratio_8k"].value(second, report) == 1
    assert not any(key.startswith("loss_change_") for key in items)  # windows of 1k: Δ loss says the same
    edges = position_buckets(8192)
    for number, each in enumerate(report["rows"]):
        parts = [{"start": a, "end": b, "loss": 2 + number * (b == 8192), "tokens": 1} for a, b in edges]
        each["results"]["loss"]["by_position"] = parts
    items = {column.key: column for column in columns(report)}
    assert items["loss_change_1k"].value(second, report) == 0 and items["loss_change_8k"].value(second, report) == 1
    assert items["loss_change_8k"].value(report["rows"][0], report) is None and "loss_change_32k" not in items


def test_a_column_is_shown_only_if_a_row_has_it(report):
    for one in report["rows"]:
        one["results"] = {"recall": one["results"]["recall"]}
        one["comparison"] = None
    assert [column.key for column in columns(report)] == ["kv_bytes_per_token", "kv_ratio", "recall"]
    report["rows"][3]["results"]["loss"] = {"loss": 2.0}
    assert "loss" in [column.key for column in columns(report)]
    assert column(report, "loss").text(report["rows"][0], report) == "-"
    assert [column.key for column in columns({"rows": [{"name": "x"}, {"name": "y", "results": {}}]})] == []


def test_numbers_as_people_read_them(report):
    base, worse = row(report, "gqa"), row(report, "mla-1/4")
    texts = {column.key: column.text(worse, report) for column in columns(report)}
    assert texts["kv_bytes_per_token"] == "768" and texts["kv_ratio"] == "25.0%"
    assert texts["loss"] == "2.3655" and texts["loss_change"] == "+0.0870"
    assert column(report, "loss_change").change_texts(worse) == ("[+0.0759, +0.0981]",)
    assert column(report, "recall").change_texts(worse) == ("−19.5", "[−23.5, −15.5]")
    assert column(report, "recall").change_texts(base) == ()
    assert column(report, "kv_ratio").change_texts(worse) == ()
    assert (signed(-0.00001), signed(0.06), signed(-0.06)) == ("0.0000", "+0.0600", "−0.0600")
    assert texts["perplexity"] == "10.65" and texts["cached_loss"] == "2.3655 (10.65)"


def test_one_sample_has_no_interval(report):
    change = {"difference": 0.1, "low": 0.1, "high": 0.1, "samples": 1}
    assert bounds(change) is None and interval(change) == ()
    assert interval({"difference": 0.1, "low": None, "high": None}) == ()
    worse = row(report, "mla-1/4")
    worse["comparison"]["loss"] = change
    assert column(report, "loss_change").change_texts(worse) == ()


def test_rows_go_by_their_bytes(report):
    report["rows"][0]["kv"] = None
    sizes = [each["kv"]["bytes_per_token"] for each in by_bytes(report)["rows"] if each["kv"]]
    assert sizes == sorted(sizes, reverse=True)
    assert by_bytes(report)["rows"][-1]["name"] == "gqa"
    assert report["rows"][0]["name"] == "gqa"


def test_a_terminal_has_fewer_columns_and_intervals(report):
    for each in report["rows"]:
        each["results"]["loss"]["memorised"] = {"share": 0.1, "loss_of_others": 2.5}
    whole, narrow = headline(report), headline(report, narrow=True)
    assert {c.key for c in whole.columns} - {c.key for c in narrow.columns} == {"loss_of_others", "cached_loss"}
    assert "memorized: 10.0% in every row." in whole.notes
    keys = [c.key for c in narrow.columns]
    with_intervals = {key for cells in narrow.cells() for key, cell in zip(keys, cells, strict=True) if cell.below}
    assert with_intervals == {"loss_change"}


def test_markdown_has_a_line_a_row_with_as_many_cells_as_the_head(report):
    report["rows"][1]["name"] = "a|b\nc"
    lines = markdown.render(report).splitlines()
    table = [line for line in lines[: lines.index("## Loss by source, nats per token")] if line.startswith("|")]
    assert len(table) == 2 + len(report["rows"])
    cells = {line.replace("\\|", "").count("|") for line in table}
    assert len(cells) == 1
    assert any(line.startswith("| a\\|b c |") for line in table)
    assert "quick look" not in "\n".join(lines)
    assert "at most 3 samples" in markdown.render(sample_report(limit=3))


def test_text_has_verdict_plots_errors_sources_commands_and_completions(report):
    text = markdown.render(report, ["pareto-loss", "needle"])
    assert "![Loss against KV bytes](pareto-loss.svg)\n\n![Needles found, by length and depth](needle.svg)" in text
    assert "mla-1/2: 50.0% of the KV bytes for +0.0210 nats per token (perplexity +2.1%), recall 0.90 → 0.85" in text
    assert "no larger, gqa int4 KV, 31.2%: +0.0310" in text and "Beaten at bytes and loss: mla-1/4." in text
    assert "0.4100 <br>± 0.0490" in text and "[+0.0759, +0.0981]" in text
    losses = [f"{each['loss']:.4f}" for each in report["rows"][1]["results"]["loss"]["by_source"].values()]
    assert f"| mla-1/2 | {' | '.join(losses)} |" in text
    assert "| mla-1/4 healed | mla fisher, healed | 1 min 53 s | 1.0 GiB | surgery convert gqa" in text
    assert "\n    prompt: class Queue:\n    gqa:     # </script><img src=x" in text
    for each in report["rows"]:
        each |= {"results": {"loss": {"loss": 2.0, "by_source": {"one": {"loss": 2.0}}}}, "conversion": None}
    assert "##" not in markdown.render(report)
