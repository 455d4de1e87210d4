"""`surgery env`: versions and the machine, without torch unless it is asked for GPUs, and without anything private."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from command_line import imports_of, run_main

from surgery.common import environment
from surgery.version import __version__


def test_it_answers_without_torch_and_says_what_it_set(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = imports_of("env")
    assert done.stderr.strip() == "[]", done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert said["surgery"] == __version__ and said["torch"] == version("torch")
    assert said["python"].startswith(sys.version.split()[0]) and "cores" in said["cpu"] and "iB" in said["memory"]
    assert said["OMP_NUM_THREADS"] == "3" and "gpu" not in said
    assert "secret" not in done.stdout and str(Path.home()) not in done.stdout


def test_what_surgery_set_is_said_to_be_its(monkeypatch):
    from surgery.common.threads import wait_passively

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    wait_passively()
    assert environment.machine()["threads"]["OMP_WAIT_POLICY"] == {"value": "PASSIVE", "by_surgery": True}


def test_a_package_that_is_not_there_is_absent():
    assert environment.versions(("no-such-package", "torch")) == {
        "no-such-package": "absent",
        "torch": version("torch"),
    }


@pytest.mark.parametrize(("said", "limit"), [("max\n", None), ("1073741824\n", 2**30), (f"{2**63 - 4096}\n", None)])
def test_the_memory_of_a_container(monkeypatch, tmp_path, said, limit):
    (tmp_path / "memory.max").write_text(said)
    monkeypatch.setattr(environment, "_CGROUP", tmp_path)
    assert environment.machine()["memory"]["limit_bytes"] == limit


def test_gpus_are_what_torch_says(monkeypatch, capsys):
    import torch

    code, shown, _ = run_main(monkeypatch, capsys, "env", "--gpu", "--json")
    found = json.loads(shown)
    assert code == 0 and len(found["gpu"]["devices"]) == torch.cuda.device_count()
    monkeypatch.setitem(sys.modules, "torch", None)
    code, shown, _ = run_main(monkeypatch, capsys, "env", "--gpu")
    assert code == 0 and "gpu: torch cannot tell: " in shown
