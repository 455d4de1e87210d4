"""The whole command in two processes gives what it gives in one."""

import json

import torch
from command_line import run_main
from processes import two_forks
from tiny_models import make_checkpoint

ARGUMENTS = "--tasks loss,needle --variants none --windows 3 --length 32 --batch-size 1 --seed 3 --device cpu"
NEEDLE = "--needle-lengths 128 --needle-depths 0,100 --needle-trials 1"


def test_two_processes_give_the_results_of_one(tmp_path, monkeypatch, capsys):
    source, other = (make_checkpoint(tmp_path / name, "llama", torch.float32, seed) for seed, name in enumerate("ab"))
    (tmp_path / "eval.yaml").write_text("decoded: 4\n")
    arguments = [*ARGUMENTS.split(), *NEEDLE.split(), "--config", tmp_path / "eval.yaml", "--out"]
    verb = ["eval", other, "--baseline", source, *arguments]
    code, alone, errors = run_main(monkeypatch, capsys, *verb, tmp_path / "one")
    assert code == 0, errors[-2000:]
    together = two_forks(*verb, tmp_path / "two")
    # One table, not one from each process.
    assert [text.count("KV B/token") for text in (alone, *(fork.stdout for fork in together))] == [1, 1, 0]
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert (one["environment"]["processes"], two["environment"]["processes"]) == (1, 2)
    assert [row["results"] for row in one["rows"]] == [row["results"] for row in two["rows"]]
    assert [row["comparison"] for row in one["rows"]] == [row["comparison"] for row in two["rows"]]
