"""Every figure of tables of reports in the README, docs/results.md and docs/healing.md is the report's."""

import json
import math
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from command_line import run_main
from project_tools import tool
from tiny_models import random_model
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.named_models import asset
from surgery.engines.trials import VLLM_CHECKED
from surgery.engines.verdict import LOADS, LOADS_WITH, REFUSED
from surgery.eval.report import markdown
from surgery.eval.report.document import read_report
from surgery.eval.report.figures import PLOTS
from surgery.eval.report.tables import columns
from surgery.heads.pattern import HeadPattern
from surgery.reporting.healing_table import LEAST_GAP

ROOT = Path(__file__).resolve().parent.parent


REPORTS = ["testbed", "testbed/heads-128", "smollm2"]
REPORTS += [f"smollm2/{name}" for name in ("rows", "rows-code", "rows-8k", "rows-recall", "healing", "structures")]


def table_of_the_report(name: str, output: tuple[str, ...]) -> dict[str, list[str]]:
    report = read_report(ROOT / "docs" / name)
    selection = {column.key: column for column in columns(report)}
    return {row["name"]: [selection[key].text(row, report) for key in output] for row in report["rows"]}


def rows_of(text: str, heading: str) -> dict[str, list[str]]:
    """Cells of the first table after a heading, by the first of a line; the head is under ""."""
    lines = text[text.index(heading) :].partition("\n|")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|--")]
    return {name: rest for name, *rest in cells}


def test_the_table_of_results_is_the_report():
    page = rows_of((ROOT / "docs" / "results.md").read_text(encoding="utf-8"), "# What it costs")
    output = ("kv_bytes_per_token", "kv_ratio", "loss_change", "cached_loss", "recall", "needle")
    report, (_, *result) = table_of_the_report("testbed", output), page.items()
    assert len(result) >= 10
    for name, cells in result:
        assert cells == report[name], name


def test_other_structures_of_the_real_model_are_the_reports():
    page = rows_of((ROOT / "docs" / "results.md").read_text(encoding="utf-8"), "### Other structures")
    report = table_of_the_report("smollm2/structures", ("kv_ratio", "loss_change", "perplexity", "recall"))
    assert len(page) > 10
    assert page == {"": ["KV share", "Δ loss", "perplexity", "recall"]} | {name: report[name] for name in page if name}


ENGINE_CACHES = {"oscar_int2", "kvarn_k4v2_g128", "turboquant_3bit_nc", "int4_per_token_head", "q4_0"}


def test_the_table_of_the_readme_is_the_reports():
    page = rows_of((ROOT / "README.md").read_text(encoding="utf-8"), "## A real model")
    output = tool("readme").SHOWN
    index = list(output).index("loss_change") + 1
    long = {"": "Δ loss, 8k"} | {
        row: cell for row, (cell,) in table_of_the_report("smollm2/rows-8k", ("loss_change",)).items() if row in page
    }
    assert len(long) > 5
    assert {name: cells.pop(index) for name, cells in page.items()} == dict.fromkeys(page, "not measured") | long
    # Every conversion has a speed, and no cache of an engine.
    assert {name for name, cells in page.items() if cells.pop() == "-"} == ENGINE_CACHES
    assert page == {"": list(output.values())} | table_of_the_report("smollm2/rows", tuple(output))


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("file", ["report.json", "report.md"])
def test_the_report_is_whole(name, file):
    assert (ROOT / "docs" / name / file).stat().st_size > 1000
    assert not read_report(ROOT / "docs" / name)["settings"]["limit"]


@pytest.mark.parametrize("name", REPORTS)
def test_the_text_of_the_report_is_current(name):
    folder = ROOT / "docs" / name
    written, plots = (
        (folder / "report.md").read_text(encoding="utf-8"),
        [key for key in PLOTS if (folder / f"{key}.svg").exists()],
    )
    assert plots and written == markdown.render(read_report(folder), plots), "run python tools/readme.py"


def test_recall_by_heads_that_stream_is_the_reports():
    rows = {row["name"]: row for row in read_report(ROOT / "docs" / "testbed")["rows"]}
    page = rows_of((ROOT / "docs" / "heads.md").read_text(encoding="utf-8"), "## On the testbed")
    items = {
        "duo": ("hybrid-12", "hybrid-6", "hybrid-3"),
        "a window in all heads": ("window 575", "window 351", "window 239"),
    }
    assert page["KV bytes"] == [f"{rows[name]['kv']['ratio']:.1%}" for name in items["duo"]]
    for name, measured in items.items():
        assert page[name] == [f"{rows[each]['results']['recall']['accuracy']:.2f}" for each in measured]


def test_table_and_picture_of_the_readme_are_current():
    readme = tool("readme")
    report, text = read_report(readme.REPORT), (ROOT / "README.md").read_text(encoding="utf-8")
    recall, long = read_report(readme.RECALL_REPORT), read_report(readme.LONG_REPORT)
    parts = readme.hook(report, recall), readme.table(report, long)
    assert readme.with_parts(text, *parts) == text and all(part in text for part in parts), "run python tools/readme.py"
    drawn = xml.etree.ElementTree.parse(readme.REPORT / "pareto-loss.svg")
    texts = {each.text for each in drawn.iter() if each.tag.endswith("text")}
    assert {row["name"] for row in report["rows"]} <= texts, "run python tools/readme.py"


def test_steps_on_a_cpu_are_medians_of_the_records():
    medians = tool("readme").median_steps()
    models = {"MLA in bits": "mla-4", "MLA in bits, an eighth, which predicts values": "mla-8"}
    models |= {"source": "source", "heads in bits": "quantized-4", "cascade in bits": "cascade-8"}
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    lines = text[text.index("| model | code | bfloat16, 1k tokens") :].partition("\n\n")[0].splitlines()[2:]
    assert len(lines) == 8
    for line in lines:
        label, code, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for context, cell in zip((1024, 8000), cells, strict=False):
            step = medians[models[label], code == "C++", context]
            times_source = medians["source", False, context] / step
            assert cell == (f"{1000 * step:.1f} ms" + (f" ({times_source:.2f})" if label != "source" else ""))


def test_sizes_and_versions_in_the_readme_are_those_of_reports():
    text, report = (ROOT / "README.md").read_text(encoding="utf-8"), read_report(ROOT / "docs" / "smollm2")
    rows = [*report["rows"], *read_report(ROOT / "docs" / "smollm2" / "rows")["rows"]]
    ratios = [row["kv"]["ratio"] for row in rows if row["role"] == "checkpoint"]
    match = re.search(r"becomes (\d+) to (\d+) times smaller", text).groups()
    assert match == (f"{1 / max(ratios):.0f}", str(math.floor(1 / min(ratios))))
    assert f"torch=={report['environment']['torch'].partition('+')[0]}" in text
    assert f"| vLLM {VLLM_CHECKED.rpartition('.')[0]} |" in text
    demo = CheckpointReader.open(asset("demo-model"))
    numbers = sum(demo.info(name).nbytes // demo.info(name).dtype.itemsize for name in demo.names())
    assert f"({numbers / 1e6:.1f}M parameters," in text


def test_figures_of_what_it_costs_are_on_the_pages_that_they_name():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it costs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| \[\w+\]\((docs/[\w-]+\.md)[^|]* \|$", text, re.M)
    assert len(rows) == len([line for line in text.splitlines() if line.startswith("|")]) - 2
    for what, figures, page in rows:
        reference = re.findall(r"\d[\d,.]*", (ROOT / page).read_text(encoding="utf-8"))
        matches = re.findall(r"(?<![\w-])\d[\d,.]*(?![\w-]*B)", f"{what} {figures}")
        assert matches and not {each.rstrip(",.") for each in matches} - {each.rstrip(",.") for each in reference}, what


def test_the_method_of_ones_own_is_forty_lines():
    tutorial = (ROOT / "docs" / "tutorials" / "own-method.md").read_text(encoding="utf-8")
    assert "[forty lines]" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.search(r"```python\n(.*?)```", tutorial, re.DOTALL)[1].splitlines()) <= 40


def test_the_readme_is_two_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


WIDE = {"hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 64}
WIDE |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
MODELS = {"Llama": LlamaConfig, "Qwen2": Qwen2Config, "Qwen3": Qwen3Config}


@pytest.mark.parametrize("model", MODELS)
def test_models_and_engines_are_what_conversions_say(model, tmp_path, monkeypatch, capsys):
    """A mark of a run is one of the table of engines; what is not run is at least not refused there."""
    random_model(MODELS[model](**WIDE)).save_pretrained(tmp_path / "ckpt")
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| | Llama 1-3"))
    column = next(index for index, cell in enumerate(lines[start].split("|")) if cell.strip().startswith(model))
    rows = [[cell.strip() for cell in line.split("|")] for line in lines[start + 3 : start + 7]]
    assert [row[1].split()[0] for row in rows] == ["vLLM", "SGLang", "llama.cpp", "mlx-lm"]
    matches = [(row[1], *result) for row in rows for result in re.findall(r"`(--to .*?)` ([✓○])", row[column])]
    assert matches
    for head, options, mark in matches:
        budget = [] if "gqa" in options else ["--kv-ratio", "0.5"]
        if "hybrid" in options:
            HeadPattern(torch.rand(2, 8), "needle", 4, 60).save(tmp_path / "heads")
            budget = ["--heads", tmp_path / "heads", "--streaming", "0.5"]
        if options in ("--to mla", "--to crosslayer"):  # their bits need text, their engines do not
            code, output, err = run_main(monkeypatch, capsys, "inspect", tmp_path / "ckpt", "--json")
            targets = {target["command"]: target for target in json.loads(output)["targets"]}
            engines = targets[f"surgery convert {options}"]["engines"]
        else:
            call = [*options.replace("N", "4").split(), *budget, "--calibration", "none", "--dry-run", "--json"]
            code, output, err = run_main(monkeypatch, capsys, "convert", tmp_path / "ckpt", *call)
            engines = json.loads(output)["target"]["engines"] if output else {}
        assert code == 0, err
        statuses = {entry["status"] for name, entry in engines.items() if name.startswith(head.split()[0])}
        assert statuses - {REFUSED}, (head, options)
        assert mark != "✓" or statuses & {LOADS, LOADS_WITH}, (head, options)


HEALED = ("mla-4", "mla-8", "gqa-2", "mqa", "lowrank-8", "hybrid-12")


def test_healings_of_the_demo_model_are_the_reports():
    page = rows_of((ROOT / "docs" / "healing.md").read_text(encoding="utf-8"), "## Results on the demo model")
    report = table_of_the_report("testbed/healing", ("loss", "kl", "recall"))
    losses = {row["name"]: row["results"]["loss"]["loss"] for row in read_report(ROOT / "docs/testbed/healing")["rows"]}
    assert page.keys() == {"", *HEALED}
    for name in HEALED:
        (loss, kl, recall), (healed_loss, healed_kl, healed_recall) = report[name], report[f"{name}-healed"]
        gaps = [losses[name] - losses[source] for source in ("source", "source-trained")]
        change = losses[name] - losses[f"{name}-healed"]
        closed = [f"{100 * change / gap:.0f}%" if gap >= LEAST_GAP else "-" for gap in gaps]
        assert page[name][:-1] == [loss, healed_loss, *closed, kl, healed_kl, recall, healed_recall]


def test_healings_of_the_real_model_are_the_reports():
    page = (ROOT / "docs" / "healing.md").read_text(encoding="utf-8").partition("## A real model")[2]
    report = table_of_the_report("smollm2/healing", ("kv_ratio", "loss", "perplexity", "kl", "recall"))
    rows = read_report(ROOT / "docs/smollm2/healing")["rows"]
    for row, cells in zip(rows, list(rows_of(page, "").values())[1:], strict=True):
        ratio, loss, perplexity, kl, recall = report[row["name"]]
        change = row["comparison"]["loss"] if row["comparison"] else None
        increase = f"{change['difference']:+.4f} [{change['low']:.4f}, {change['high']:.4f}]" if change else ""
        assert cells == [ratio, f"{loss} ({perplexity})", increase, kl if change else "", recall]
    healings = [row["conversion"]["healing"] for row in rows[2::2]]
    assert "for {} and {} minutes.".format(*(round(each["seconds"] / 60) for each in healings)) in page
    (first, last), quarters = [[float(each["held_out"][end]["kl"]) for end in ("first", "last")] for each in healings]
    assert "from {:.3f} to {:.3f} at the quarter and from {:.4f} to {:.4f} at".format(*quarters, first, last) in page
