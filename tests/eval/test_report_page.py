import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from command_line import ROOT
from sample_report import HOSTILE, sample_report

from surgery.eval.report.document import read_report
from surgery.eval.report.page import render
from surgery.eval.report.tables import by_bytes

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0"]


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        self.inside.append(name)

    def handle_endtag(self, name):
        while self.inside and self.inside.pop() != name:
            pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside):
            self.text += data


@pytest.fixture(scope="module")
def text():
    return render(sample_report())


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def sections(page):
    return [attributes["id"] for name, attributes in page.tags if name == "section"]


def test_all_sections(page):
    tasks = ["loss", "recall", "needles", "lm-eval", "throughput"]
    assert sections(page) == ["summary", "pareto", *tasks, "conversions", "generations", "settings"]
    links = [attributes["href"] for name, attributes in page.tags if name == "a"]
    assert links == [f"#{key}" for key in sections(page)]


def test_nothing_comes_from_outside(text, page):
    for name, attributes in page.tags:
        assert name not in {"link", "iframe", "object", "embed", "base", "form", "img"}
        for key, value in attributes.items():
            if not key.startswith("xmlns"):
                assert "//" not in (value or "") or key in {"data-value", "title"}, (name, key, value)
            if key in {"href", "src"}:
                assert value.startswith("#"), (name, key, value)
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}
    policy = next(attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'")


def test_ids_are_of_one_element_and_references_are_met(text, page):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)) > 100
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {
        attributes["href"][1:] for _, attributes in page.tags if "href" in attributes
    }
    assert used and used <= set(ids)


def test_what_a_model_wrote_is_text(text, page):
    assert HOSTILE in page.text
    assert HOSTILE not in text and "<img" not in text
    assert [name for name, _ in page.tags].count("script") == 1


def test_no_text_of_a_report_becomes_markup():
    evil = "</style></script></title><img src=x onerror=alert(1)>\"'"
    report = sample_report(rows=2)
    row = report["rows"][1]
    report |= {"title": evil, "command": evil, "created": evil, "baseline": evil}
    report["settings"]["dtype"] = evil
    report["environment"]["platform"] = evil
    report["tasks"][evil] = {evil: [evil]}
    row |= {"name": evil, "path": evil, "class": evil, "dtype": evil, "sha256": evil, "seconds": {evil: 1.0}}
    row["variant"] = {"kind": evil, evil: evil}
    row["conversion"] |= {"to": evil, "method": evil, "command": evil}
    row["conversion"]["healing"] = {"wandb": {"entity": evil, "project": evil, "run_id": evil}}
    row["conversion"]["layers"][0]["measured"] = {evil: 0.5}
    results = row["results"]
    results["loss"]["by_source"] = {evil: {"loss": 1.0}}
    results[f"lm-eval:{evil}"] = {"metrics": {evil: {"value": evil, "stderr": evil}}, "lm_eval": evil}
    results["generate"]["completions"] = [{"prompt": evil, "text": evil}]
    results["speed"]["points"][0]["note"] = evil
    text = render(report)
    page = Page(text)
    assert page.text.count(evil) > 30
    assert "<img" not in text
    assert [name for name, _ in page.tags].count("script") == 1
    assert not [attributes for _, attributes in page.tags if any(key.startswith("on") for key in attributes)]


def test_quick_looks_say_so(page):
    assert "Quick look" not in page.text
    queries = Page(render({**sample_report(limit=16, rows=1), "rows": [{"name": "one", "results": {}}]}))
    assert "Quick look: first 16 samples of each task only" in queries.text


def test_reports_of_little():
    bare = {"schema": 1, "rows": [{"name": "one", "role": "checkpoint", "results": {}}], "baseline": None}
    assert sections(Page(render(bare))) == ["summary", "settings"]
    for task in sample_report(rows=1)["rows"][0]["results"]:
        report = sample_report(rows=1)
        for row in report["rows"]:
            row |= {"results": {task: row["results"][task]}, "comparison": None, "conversion": None, "kv": None}
        assert {"summary", "settings"} < set(sections(Page(render(report)))), task


def test_many_sources_go_down_instead_of_across():
    report = sample_report(rows=2)
    for row in report["rows"]:
        row["results"] = {"loss": {"loss": 2.0, "by_source": {f"source{n}": {"loss": n + 0.125} for n in range(20)}}}
    text = render(report)
    heads = re.findall('<th scope="col".*?</th>', text)
    assert heads and not [head for head in heads if "source19" in head]
    assert text.count('data-value="source19">source19</th>') == 1 and text.count(">19.1250 (202,") == 2


def test_headline_numbers_and_short_parts_are_there(page, text):
    for part in ("2.3655", "+0.0870", "[+0.0759, +0.0981]", "25.0%", "0.0290", "88.5%", "68.8%", "lab/healing/abc123"):
        assert part in page.text, part
    assert '<span class="whole">top-1</span>' in text
    inside = text.partition('id="generations"')[2].partition("</section>")[0]
    assert inside.count("<details>") == 2 and "class Queue" in inside


def test_size_and_determinism(text, tmp_path):
    assert len(text.encode()) < 1_500_000 * 8 / 12  # at most 1.5 MB for twelve rows
    report = sample_report(rows=1)
    results = report["rows"][0]["results"]
    results["generate"]["completions"][0]["text"] = "\ud800"  # a lone surrogate, which no file can hold
    report["rows"][0]["results"] = {name: results[name] for name in ("generate", "recall")}
    page = render(report)
    assert render(report) == page
    (tmp_path / "page.html").write_text(page, encoding="utf-8")


def test_tables_can_be_read_aloud_and_scrolled_by_keyboard(text, page):
    tables = [name for name, _ in page.tags if name == "table"]
    captions = re.findall("<caption>(.*?)</caption>", text)
    assert len(captions) == len(tables) > 7 and all(captions)
    heads = [attributes for name, attributes in page.tags if name == "th"]
    assert heads and all(attributes["scope"] in ("col", "row") for attributes in heads)
    regions = [attributes for _, attributes in page.tags if attributes.get("class") == "scroll"]
    assert all(each["role"] == "region" and each["tabindex"] == "0" and each["aria-label"] for each in regions)
    assert all(attributes.get("title") for name, attributes in page.tags if name == "abbr")
    assert "exp of the mean loss" in page.text
    inputs = {attributes["id"] for name, attributes in page.tags if name == "input"}
    assert inputs and inputs == {attributes["for"] for name, attributes in page.tags if name == "label"}


def test_the_page_begins_with_what_the_best_checkpoint_costs(page):
    message = page.text.partition("Summary")[0]
    assert "Loses least of 3 checkpoints: mla-1/2, 50.0% of the KV bytes (1,536 a token), perplexity +2.1%" in message
    assert "recall 89.6% → 85.4%" in message and "no larger, gqa int4 KV, 31.2%: +0.0310" in message
    assert "mla-1/4 healed, 25.0%: perplexity +2.8%" in message


PAGES = sorted(path.parent for path in (ROOT / "docs").rglob("report.html"))


@pytest.mark.slow
@pytest.mark.parametrize("folder", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_pages_in_the_docs_are_what_their_reports_give(folder):
    """But for pictures, whose strokes may differ between versions of what draws them."""

    def words(page: str) -> str:
        return re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL)

    page = (folder / "report.html").read_text(encoding="utf-8")
    assert words(page) == words(render(read_report(folder))), "run python tools/readme.py"


def test_rows_that_others_beat_can_be_turned_on(text):
    plot = text.partition('aria-label="Loss against KV bytes">')[2].partition("</svg>")[0]
    rest = re.findall('<g id="[^"]*" class="rest">.*?</g>', plot, re.DOTALL)
    assert any("mean-pool" in group for group in rest) and not any("mla-1/2" in group for group in rest)
    assert "mla-1/2" in plot


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on PATH")
def test_a_browser_opens_it_without_network_or_errors(text, tmp_path):
    path = tmp_path / "page.html"
    # What a click on a title does is tried by a script of the test's own, run after the page's.
    probe = """<script>
      const table = document.querySelector("table.sortable"), heads = [...table.tHead.rows[0].cells];
      const at = heads.findIndex(head => head.textContent.startsWith("recall"));
      const names = () => [...table.tBodies[0].rows].map(row => row.cells[0].dataset.value).join("|");
      const report = [names()];
      for (let i = 0; i < 3; i++) {
        heads[at].querySelector("button").click();
        report.push((heads[at].getAttribute("aria-sort") ?? "none") + ":" + names());
      }
      document.documentElement.dataset.probe = JSON.stringify(report);
    </script>"""
    path.write_text(text.replace("</body>", probe + "</body>"), encoding="utf-8")
    command = [BROWSER, *QUIET, f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
    process = subprocess.run([*command, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr[-2000:]
    assert not [line for line in process.stderr.splitlines() if "CONSOLE" in line]
    root = next(attributes for name, attributes in Page(process.stdout).tags if name == "html")
    assert root["data-script"] == "ready"
    assert "<title>demo model" in process.stdout  # the hostile completion has not changed it
    rows = by_bytes(sample_report())["rows"]
    recall = {row["name"]: row["results"]["recall"]["accuracy"] for row in rows}
    original, best_first, worst_first, again = re.findall(r'"([^"]*)"', root["data-probe"])
    assert original == "|".join(recall) and again == f"none:{original}"
    assert best_first == "descending:" + "|".join(sorted(recall, key=recall.get, reverse=True))
    assert worst_first == "ascending:" + "|".join(sorted(recall, key=recall.get))
