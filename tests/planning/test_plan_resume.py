"""A plan that was killed resumes from its statistics and from what it had carried, to the same choice."""

import json
import os
import signal

import pytest
from command_line import run_main
from processes import Fork

KILLED = """
import os, signal, sys
from surgery.checkpoint import snapshots
from surgery.cli.program import main

snapshots.INTERVAL, left, take = 0.0, int(sys.argv.pop(1)), snapshots.Snapshots.take

def killed(self, loop, state):
    global left
    take(self, loop, state)
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

snapshots.Snapshots.take = killed
main()
"""
ASKED = ["--kv-ratio", "0.5", "--allow", "lowrank,quantized", "--calibration-tokens", "512"]
ASKED += ["--calibration-length", "64", "--held-out", "4", "--recall", "0", "--context", "256"]


@pytest.mark.slow
def test_killed_after_every_state(checkpoints, tmp_path, monkeypatch, capsys):
    source = checkpoints("llama")
    code, whole, err = run_main(monkeypatch, capsys, "plan", source, "--out", tmp_path / "whole.yaml", *ASKED, "--json")
    assert code == 0 and os.listdir(tmp_path) == ["whole.yaml"], err
    folder = tmp_path / "again"
    folder.mkdir()
    arguments = ["plan", source, "--out", folder / "plan.yaml", *ASKED]
    # States of a model of two layers, each after what the run before it had left; a run goes on with the last.
    forward, backward, statistics, a_round = 1, 2, 1, 2 + 1
    rounds = {1: 1, 2: 2, 4: 3}[max(len(row["by_text"]) for row in json.loads(whole)["rows"])]
    for states in range(1, forward + backward + statistics + rounds * a_round + 1):
        fork = Fork("1", *arguments, code=KILLED)
        assert fork.wait() == -signal.SIGKILL, fork.stderr
        assert os.listdir(folder) == ["plan.yaml.statistics.partial"]
        assert ("resuming from" in fork.stderr) == (states > 1)
    code, again, err = run_main(monkeypatch, capsys, *arguments, "--json")
    assert code == 0 and "resuming from" in err and "calibrate" not in err and "try " not in err
    assert os.listdir(folder) == ["plan.yaml"]
    assert json.loads(again)["rows"] == json.loads(whole)["rows"]
    # But for the first line, which names the file.
    plans = [file.read_text().split("\n", 1) for file in (folder / "plan.yaml", tmp_path / "whole.yaml")]
    assert plans[0][1] == plans[1][1]
    fork = Fork("1", *arguments[:2], "--out", folder / "other.yaml", *ASKED, code=KILLED)
    assert fork.wait() == -signal.SIGKILL
    code, _, err = run_main(monkeypatch, capsys, *arguments[:2], "--out", folder / "other.yaml", *ASKED, "--restart")
    assert code == 0 and "resuming from" not in err and "calibrate: forward" in err
