"""The command line in tests: in this process, or in one of its own."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import typer.main

from surgery.cli import program as cli

ROOT = Path(__file__).resolve().parents[2]

# A call of the program builds all of its commands, which are the same in every test.
COMMAND = cache(typer.main.get_command)

# Stands for the console script.
LAUNCH = "import sys; sys.argv[0] = 'surgery'; from surgery.cli.program import main; main()"


def launch(*arguments, code: str = LAUNCH, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`surgery ARGUMENTS` in its own process."""
    # Wide enough that rich does not break the lines that are looked for.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


def listing(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def run_main(monkeypatch, capsys, *arguments) -> tuple[int, str, str]:
    """`surgery ARGUMENTS` in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["surgery", *map(str, arguments)])
    monkeypatch.setattr(typer.main, "get_command", COMMAND)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err
