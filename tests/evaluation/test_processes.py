"""The whole verb in two processes gives what it gives in one."""

import json

import pytest
import torch
from command_line import run_main
from processes import Fork, two_forks
from safetensors.torch import load_file
from tiny_models import make_checkpoint

ARGUMENTS = ["--tasks", "loss,needle", "--variants", "none", "--windows", "3", "--length", "64", "--batch-size", "1"]
NEEDLE = [
    "--needle-lengths",
    "128",
    "--needle-depths",
    "0,100",
    "--needle-trials",
    "1",
    "--seed",
    "3",
    "--device",
    "cpu",
]


def test_two_processes_give_the_results_of_one(tmp_path, monkeypatch, capsys):
    source, other = (make_checkpoint(tmp_path / name, "llama", torch.float32, seed) for seed, name in enumerate("ab"))
    (tmp_path / "eval.yaml").write_text("decoded: 4\n")
    verb = ["eval", other, "--baseline", source, *ARGUMENTS, *NEEDLE, "--config", tmp_path / "eval.yaml", "--out"]
    code, alone, errors = run_main(monkeypatch, capsys, *verb, tmp_path / "one")
    assert code == 0, errors[-2000:]
    together = two_forks(*verb, tmp_path / "two")
    # One table, not one from each process.
    assert [shown.count("KV B/token") for shown in (alone, *(fork.stdout for fork in together))] == [1, 1, 0]
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert (one["environment"]["processes"], two["environment"]["processes"]) == (1, 2)
    assert [row["results"] for row in one["rows"]] == [row["results"] for row in two["rows"]]
    assert [row["comparison"] for row in one["rows"]] == [row["comparison"] for row in two["rows"]]


@pytest.mark.slow
def test_started_by_the_verbs(tmp_path):
    """`--processes 2` of evaluations and of scores."""
    source = make_checkpoint(tmp_path / "a", "llama", torch.float32, 0)
    asked = ["--tasks", "loss", "--variants", "none", "--windows", "3", "--length", "64", "--device", "cpu"]
    scored = ["--method", "kvzip", "--length", "64", "--sinks", "4", "--window", "8", "--samples", "4"]
    for count in (1, 2):
        several = ["--processes", count]
        for verb in (
            ["eval", source, *asked, "--out", tmp_path / f"eval-{count}"],
            ["heads", source, *scored, "--out", tmp_path / f"{count}.safetensors"],
        ):
            fork = Fork(*verb, *several, module="surgery")
            assert fork.wait() == 0, fork.stderr[-2000:]
    one, two = (json.loads((tmp_path / f"eval-{count}" / "report.json").read_text()) for count in (1, 2))
    assert two["environment"]["processes"] == 2
    assert [row["results"] for row in one["rows"]] == [row["results"] for row in two["rows"]]
    patterns = [load_file(tmp_path / f"{count}.safetensors") for count in (1, 2)]
    assert patterns[0].keys() == patterns[1].keys()
    assert all(torch.equal(patterns[0][name], patterns[1][name]) for name in patterns[0])
