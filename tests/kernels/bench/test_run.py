"""A run over cases and its record. Speeds are a GPU's; see `-m gpu`."""

import json

import pytest
import torch

from surgery.kernels.bench import run
from surgery.kernels.bench.registry import cases
from surgery.kernels.bench.run import Bench

CPU = torch.device("cpu")


def row(operation, seconds, batch=1, **more):
    case = {"operation": operation, "model": "m", "variant": "v", "batch": batch, "context": 8, "dtype": "bfloat16"}
    work = {"bytes": 1000, "flops": 5000}
    rates = {"bytes_per_second": 1000 / seconds, "flops_per_second": 5000 / seconds}
    return {**case, **work, "seconds": seconds, **rates, **more}


def test_without_a_gpu_results_are_looked_at_and_nothing_is_timed(tmp_path):
    out, message = tmp_path / "kernels.json", []
    expected = cases(["mla_decode", "sdpa"], ["tiny"], [40], [2], [torch.float32])
    record = Bench(CPU, out, say=message.append).run(expected, "command")
    assert json.loads(out.read_text()) == record
    assert [each["gate"]["passed"] for each in record["rows"]] == [True, True]
    assert not any("seconds" in each for each in record["rows"])
    assert record["ceilings"] is None and "not timed on the cpu device" in record["note"]
    assert message[0].startswith("mla_decode tiny 48+16 batch 2 context 40: correct")


def test_time_that_is_over_and_inputs_that_do_not_fit(tmp_path, monkeypatch):
    expected = cases(["mla_decode"], ["tiny"], [40], [2], [torch.float32])
    late = Bench(CPU, seconds=-1.0, say=lambda line: None).run(expected)
    assert late["rows"] == [] and "stopped" in late["note"]
    monkeypatch.setattr(run, "_free_memory", lambda device: 1000.0)
    (skipped,) = Bench(CPU, say=lambda line: None).run(expected)["rows"]
    assert "inputs need" in skipped["skipped"]


def test_shares_of_ceilings_by_hand():
    limits = {"bytes_per_second": 2000.0, "flops_per_second": 5000.0}
    shares = run._shares(row("mla_decode", 2.0), limits)
    assert shares == {"share_of_copy": 0.25, "share_of_matmul": 0.5, "share_of_bound": 0.5}


def test_decoding_is_held_against_the_fastest_attention_of_the_source():
    libraries = {"SDPA cuDNN": {"seconds": 6.0}, "SDPA Flash": {"refused": "no GPU"}}
    decode = [row("sdpa", 7.0, baselines=libraries), row("mla_decode", 2.0), row("mla_decode", 2.0, batch=8)]
    rows = [*decode, row("pack_rows", 1.0)]
    run._against_source(rows)
    assert [each.get("speedup_over_source") for each in rows] == [None, 3.0, None, None]
    alone = [row("sdpa", 7.0), row("mla_decode", 2.0)]  # as with --no-baselines
    run._against_source(alone)
    assert alone[1]["speedup_over_source"] == 3.5


@pytest.mark.gpu
def test_a_measured_case_on_a_gpu(tmp_path):
    expected = cases(["mla_decode", "sdpa"], ["llama3-8b"], [8192], [4], [torch.bfloat16])[:2]
    record = Bench(torch.device("cuda"), tmp_path / "kernels.json").run(expected)
    for each in record["rows"]:
        assert each["gate"]["passed"], each["gate"]["reasons"]
        assert 0 < each["share_of_bound"] < 1.5 and each["graph"]
