"""The whole verb in two processes gives what it gives in one."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import make_checkpoint

ARGUMENTS = ["--tasks", "loss,needle", "--variants", "int8", "--windows", "5", "--length", "64", "--batch-size", "2"]
NEEDLE = ["--needle-lengths", "128", "--seed", "3", "--device", "cpu"]


def test_two_processes_give_the_results_of_one(tmp_path):
    pytest.importorskip("accelerate")
    source, other = (make_checkpoint(tmp_path / name, "llama", torch.float32, seed) for seed, name in enumerate("ab"))
    verb = ["-m", "surgery", "eval", str(other), "--baseline", str(source), *ARGUMENTS, *NEEDLE, "--config"]
    (tmp_path / "eval.yaml").write_text("decoded: 8\n")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    reports = []
    for name, start in (("one", []), ("two", launcher)):
        done = subprocess.run(
            [sys.executable, *start, *verb, str(tmp_path / "eval.yaml"), "--out", str(tmp_path / name)],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        # One table, not one from each process.
        assert done.stdout.count("KV B/token") == 1
        reports.append(json.loads((tmp_path / name / "report.json").read_text()))
    one, two = reports
    assert (one["environment"]["processes"], two["environment"]["processes"]) == (1, 2)
    assert [row["results"] for row in one["rows"]] == [row["results"] for row in two["rows"]]
    assert [row["comparison"] for row in one["rows"]] == [row["comparison"] for row in two["rows"]]
