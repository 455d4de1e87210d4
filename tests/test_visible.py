"""Names of strangers on terminals, pages, in Markdown, tables and logs: nothing of them commands or hides."""

import io
import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_report import sample_report

from surgery.common.errors import SurgeryError
from surgery.common.human import in_code, in_markdown
from surgery.common.progress import Progress
from surgery.common.tables import markdown
from surgery.common.tables.table import Table
from surgery.common.visible import visible
from surgery.console.evaluation import show_evaluation
from surgery.console.page import make_table, new_page, plain, print_json
from surgery.eval.report import markdown as report_markdown

DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
COMMANDS = ["\x1b[2J", "\x1b]0;x\x07", "\x9b31m", "\r", "\x08", "\u202e", "\u2066", "\u2028", "\udcff", "\U000e0041"]
NAMES = st.lists(st.sampled_from(COMMANDS) | st.text(max_size=4), min_size=1, max_size=5).map("".join)


def check(text):
    """No character of a text is a control character but line ends and tabs, changes direction, or is half of one."""
    hidden = [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t"]
    hidden += [c for c in text if unicodedata.bidirectional(c) in DIRECTIONS]
    assert not hidden, hidden


@given(NAMES)
def test_every_output(name):
    """The funnels: text, errors, Markdown, tables of each kind, screens and JSON."""
    for text in (visible(name), str(SurgeryError(name)), in_markdown(name), in_code(name)):
        check(text)
    assert "\n" not in str(SurgeryError(name)) and "\n" not in in_code(name)
    table = Table.of(["name"], [[name]])
    check(markdown.render(table))
    console, console.file = new_page(), io.StringIO()
    console.print(f"[bold]{plain(name)}[/bold]")
    console.print(make_table(["name", "value"], [(name, 1)]))
    console.print(name, markup=False)
    check(console.file.getvalue())


@given(NAMES)
def test_json_keeps_values(name):
    text = visible(json.dumps({name: name}, ensure_ascii=False))
    check(text)
    assert json.loads(text) == {name: name}


@pytest.mark.parametrize("text", ["naïve", "日本語", "שלום", "👩\u200d🔬", "می\u200cخواهم", "a\u00a0b", "1\t2\n"])
def test_letters_stay(text):
    assert visible(text) == text


def test_evaluations(tmp_path, capsys):
    """Names of rows and folders of an evaluation, in all forms of its report and on the screen."""
    report, name = sample_report(rows=2), "x".join(COMMANDS)
    report["rows"][1] |= {"name": f"a{name}b", "path": f"c{name}d"}
    report["title"] = report["command"] = f"e{name}f"
    show_evaluation(report, [tmp_path / f"x{name}".replace("\udcff", "")], as_json=False)
    output = capsys.readouterr().out
    for text in (report_markdown.render(report), output):
        check(text)
    print_json(report)
    printed = capsys.readouterr().out
    check(printed)
    assert json.loads(printed) == json.loads(json.dumps(report))


@pytest.mark.parametrize("name", COMMANDS)
def test_progress(name, capsys):
    progress = Progress()
    progress.note(f"model {name}")
    with progress.at(name), progress.phase(name, 1) as advance:
        advance()
    check(capsys.readouterr().err.replace("\r", ""))
