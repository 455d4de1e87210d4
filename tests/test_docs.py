"""The documentation: links lead somewhere, the reference is current, tutorials and notebooks run, the site builds."""

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from project_tools import tool
from typer.main import get_command

from surgery.cli import program
from surgery.common.removed import removal

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEAVY = re.compile(r"surgery (run |bench )")


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and repositories make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def test_links_lead_somewhere():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            linked = (page.parent / path) if path else page
            assert linked.exists(), (page, target)
            assert not anchor or anchor in anchors(linked.resolve()), (page, target)


def test_the_reference_is_current():
    result = tool("reference")
    assert result.PAGE.read_text(encoding="utf-8") == result.page(), "run python tools/reference.py"


def test_pictures_of_caches_are_current():
    made = tool("cache_pictures")
    drawn = {f"{name}.svg": made.drawn(rows) for name, rows in made.pictures().items()}
    stored = {path.name: path.read_text(encoding="utf-8") for path in made.FOLDER.glob("*.svg")}
    assert stored == drawn, "run python tools/cache_pictures.py"


def test_links_out_of_the_site_are_text_there():
    site = tool("site")
    text = "[The rules](../CONTRIBUTING.md#rules), [mla](mla.md), [x](https://example.org)\n```\n[a](../nowhere)\n```\n"
    message = site.without_outside_links(text, "page.md")
    assert message.startswith(
        "The rules (`CONTRIBUTING.md`), [mla](mla.md), [x](https://example.org)\n```\n[a](../nowhere)"
    )
    with pytest.raises(ValueError, match="links to nowhere"):
        site.without_outside_links("[a](../nowhere)", "page.md")


def test_troubleshooting_quotes_what_is_printed():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    folders = [ROOT / name for name in ("surgery", "training", "eval")]
    code = "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # literals over several lines
    assert len(quoted) >= 12
    assert [text for text in quoted if text not in code] == []


def test_every_page_is_in_the_navigation():
    def pages(entry):
        if isinstance(entry, str):
            return {entry}
        return set().union(*map(pages, entry.values() if isinstance(entry, dict) else entry))

    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert pages(navigation) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("material", reason='pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    silent = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # which is about mkdocs, not about the site
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=silent)
    assert process.returncode == 0 and "WARNING" not in process.stderr, process.stderr[-3000:]
    assert (tmp_path / "tutorials" / "vllm" / "index.html").is_file()


@pytest.fixture
def surgery_here(tmp_path):
    """An environment in which `surgery` is this one."""
    command = tmp_path / "bin" / "surgery"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m surgery "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.slow
def test_tutorials_run_as_printed(page, surgery_here, tmp_path):
    """Shell blocks one after the other, and the Python of a page as one program, in one folder."""
    here, blocks = tmp_path / "work", BLOCK.findall(page.read_text(encoding="utf-8"))
    here.mkdir()
    assert blocks
    shell = "\n".join(body for language, body in blocks if language == "bash")
    program = "\n".join(body for language, body in blocks if language == "python")
    for command in (["bash", "-e", "-c", shell], [sys.executable, "-c", program]):
        process = subprocess.run(command, cwd=here, env=surgery_here, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr[-3000:]


def test_tutorials_show_no_long_work_as_runnable():
    for page in TUTORIALS:
        assert not any(HEAVY.search(body) for _, body in BLOCK.findall(page.read_text(encoding="utf-8"))), page


def test_every_command_has_its_line_on_the_page_of_commands():
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    commands = whole_program().commands
    shown = {name for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {name for name, command in commands.items() if not command.hidden} <= shown


@cache
def whole_program() -> Any:
    return get_command(program.app)


def read_as_the_verb_does(words: list[str]) -> None:
    """Parses a command without running it; raises for a command or an option that there is not."""
    command = whole_program()
    words = [program.MOVED.get(words[0], words[0]), *words[1:]]
    while hasattr(command, "commands"):
        verb = words[0] if words[0] in command.commands else getattr(command, "default", None)
        words = words[verb == words[0] :]
        command = command.get_command(command.context_class(command), verb)
    command.make_parser(command.context_class(command)).parse_args(words)


def test_commands_have_verbs_and_options_that_there_are():
    blocks = [block for page in PAGES for block in FENCE.findall(page.read_text(encoding="utf-8"))]
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    for line in lines:
        if command := re.match(r"(?:.*&& )?surgery (.*)", line):
            read_as_the_verb_does(shlex.split(command[1], comments=True))


def test_command_lines_of_earlier_docs_still_parse():
    """Replay the command lines of README.md and docs/ of 2026-11-26, which people have in scripts."""
    for line in (ROOT / "tests" / "command_lines.txt").read_text(encoding="utf-8").splitlines():
        words = shlex.split(line)
        if not any(removal(word.removeprefix("--").replace("-", "_")) for word in words if word.startswith("--")):
            read_as_the_verb_does(words)


@pytest.mark.parametrize("name", ["convert", "heads"])
@pytest.mark.slow
def test_notebooks_run(name, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    book = nbformat.read(DOCS / "notebooks" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    items = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/svg+xml" in output.get("data", {}) for output in items)


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
