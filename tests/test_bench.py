"""`surgery bench`: verbs from the outside, decoding of tiny models, and the order of events of `bench all`."""

import json
import sys

import pytest
import torch
from command_line import run_main

from surgery.acceleration.accelerate import Acceleration
from surgery.bench import convert as bench_convert
from surgery.bench import models as bench_models
from surgery.bench.cache import held_bytes, steady_cache
from surgery.bench.decode import DecodeSettings, _against_source, measure_decoding
from surgery.bench.everything import Part, chosen_parts, need_gpu, run_all
from surgery.bench.kernels import KernelRequest, measure_kernels
from surgery.common.errors import SurgeryError
from surgery.console.bench import show_decoding, show_kernels, show_parts

pytestmark = pytest.mark.usefixtures("one_core")

CPU = torch.device("cpu")
TINY = bench_convert.SHAPES["llama3-1b"] | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 4096}


@pytest.fixture(scope="module")
def tiny():
    return bench_models.source_config("tiny")


@pytest.mark.parametrize("structure", [None, *bench_models.converted_configs()])
def test_random_models_cache_what_their_structure_says_and_a_step_stays_where_it_is(structure, tiny):
    config = tiny if structure is None else bench_models.converted_configs()[structure](tiny, 24, 8)
    model = bench_models.random_model(config, CPU)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    numbers = {None: 64, "gqa": 32}.get(structure, 32)
    cache = steady_cache(model, 2, 20, CPU)
    itemsize = next(model.parameters()).element_size()
    assert held_bytes(cache) == 2 * 21 * 2 * numbers * itemsize
    token, position = torch.ones(2, 1, dtype=torch.long), torch.full((2, 1), 20)
    with torch.no_grad():
        first = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
        again = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
    assert torch.equal(first, again) and cache.get_seq_length() == 20
    assert first.isfinite().all()


def test_a_steady_step_is_that_of_a_growing_cache(tiny):
    """The source, whose plain cache is filled with the same tokens."""
    from transformers import DynamicCache

    model = bench_models.random_model(tiny, CPU)
    steady, growing = steady_cache(model, 1, 12, CPU), DynamicCache()
    for index, layer in enumerate(steady.layers):
        growing.update(layer.keys[:, :, :-1].clone(), layer.values[:, :, :-1].clone(), index)
    token = torch.tensor([[5]])
    with torch.no_grad():
        one = model(input_ids=token, position_ids=torch.tensor([[12]]), past_key_values=steady).logits
        other = model(input_ids=token, past_key_values=growing).logits
    torch.testing.assert_close(one, other)


def test_decoding_is_measured_for_every_model_context_and_batch(tmp_path, capsys):
    settings = DecodeSettings((16,), (1, 2), rank=24, rope_dim=8, kernels=(False,))
    path, said = tmp_path / "decode.json", []
    record = measure_decoding(["tiny"], settings, CPU, out=path, say=said.append)
    assert json.loads(path.read_text()) == record
    measured = record["rows"]
    assert [(row["kind"], row["batch"]) for row in measured] == [("source", 1), ("source", 2), ("mla", 1), ("mla", 2)]
    assert measured[0]["cache_bytes"] == 2 * measured[2]["cache_bytes"]
    assert all(row["times_source"] == 1.0 for row in measured[:2])
    assert "figures say nothing of a GPU" in record["note"]
    show_decoding(record, [path])
    shown = capsys.readouterr().out
    assert "tokens/s" in shown and "figures say nothing of a GPU" in shown


def test_a_checkpoint_folder_is_measured_as_it_is(tmp_path, tiny):
    bench_models.random_model(tiny, CPU).save_pretrained(tmp_path / "ckpt")
    record = measure_decoding([str(tmp_path / "ckpt")], DecodeSettings((8,), (1,), kernels=(False,)), CPU)
    row = record["rows"][0]
    assert (row["model"], row["kind"], row["context"], row["batch"]) == ("ckpt", "checkpoint", 8, 1)


def test_kernels_that_refuse_are_a_row_with_the_reason(monkeypatch):
    done = Acceleration((), refused="tensors are on the cpu device")
    monkeypatch.setattr("surgery.acceleration.accelerate", lambda model: done)
    (row,) = measure_decoding(["tiny"], DecodeSettings((8,), (1,), structures=(), kernels=(True,)), CPU)["rows"]
    assert row["accelerated"] and row["skipped"] == "tensors are on the cpu device"


def test_rows_are_held_against_the_source_as_it_is():
    place = {"model": "m", "context": 8, "largest": False}
    rows = [
        {**place, "kind": "source", "accelerated": False, "batch": 1, "tokens_per_second": 10.0},
        {**place, "kind": "mla", "accelerated": True, "batch": 1, "tokens_per_second": 25.0},
        {**place, "kind": "mla", "accelerated": True, "batch": 2, "tokens_per_second": 25.0},
        {**place, "kind": "source", "accelerated": False, "batch": 6, "largest": True, "tokens_per_second": 50.0},
        {**place, "kind": "mla", "accelerated": True, "batch": 40, "largest": True, "tokens_per_second": 200.0},
    ]
    _against_source(rows)
    assert [row.get("times_source") for row in rows] == [1.0, 2.5, None, 1.0, 4.0]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(SurgeryError, match="gpt5: no folder, and no shape either: choose llama3-8b"):
        measure_decoding(["gpt5"], DecodeSettings((8,), (1,)), CPU)
    with pytest.raises(SurgeryError, match="--to mqx: choose mla"):
        measure_decoding(["tiny"], DecodeSettings((8,), (1,), structures=("mqx",)), CPU)


def test_kernels_without_a_gpu(tmp_path, capsys):
    request = KernelRequest(operations="mla_decode", contexts="40", batches="2", device="cpu")
    record, written = measure_kernels(request, tmp_path)
    assert [path.name for path in written] == ["kernels.json"]
    show_kernels(record, written)
    shown = capsys.readouterr().out
    assert "right" in shown and "no speed on the cpu device" in shown, shown
    for wrong, message in (
        ({"tune": True}, "--tune"),
        ({"operations": "mla"}, "unknown operation"),
        ({"contexts": "8x"}, "--contexts"),
        ({"dtype": "int8"}, "--dtype int8"),
    ):
        with pytest.raises(SurgeryError, match=message):
            measure_kernels(KernelRequest(device="cpu", **wrong), tmp_path)


def test_parts_have_their_time_and_leave_their_logs(tmp_path, capsys):
    python = [sys.executable, "-S", "-c"]
    waiting = [
        Part("quick", 0.2, lambda seconds: [*python, "print('done')"]),
        Part("endless", 0.001, lambda seconds: [*python, "import time; print('began', flush=True); time.sleep(60)"]),
        Part("absent", 0.1, lambda seconds: [], "it is not installed"),
        Part("failing", 0.7, lambda seconds: [*python, "raise SystemExit(3)"]),
    ]
    record = run_all(tmp_path, 60.0, lambda line: None, waiting)
    ended = {part["name"]: part["ended"] for part in record["parts"]}
    assert ended == {
        "quick": "well",
        "endless": "stopped: its time was over",
        "absent": "left out: it is not installed",
        "failing": "with exit code 3",
    }
    assert (tmp_path / "quick.log").read_text() == "done\n"
    assert json.loads((tmp_path / "parts.json").read_text()) == record
    show_parts(record)
    assert "its time was over" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_everything_needs_a_gpu(tmp_path):
    with pytest.raises(SurgeryError, match="there is none"):
        need_gpu()


def test_parts_can_be_chosen_and_know_their_limit(tmp_path):
    every = chosen_parts(tmp_path, None)
    assert [part.name for part in every] == ["tests", "kernels", "tuning", "decode", "memcheck"]
    kernels, decode = chosen_parts(tmp_path, "kernels, decode")
    assert kernels.command(77.4)[-2:] == ["--limit", "77"] and str(tmp_path / "kernels") in kernels.command(1.0)
    assert decode.environment == {"SURGERY_TUNED": str(tmp_path / "tuned")}
    with pytest.raises(SurgeryError, match="--parts all: choose tests"):
        chosen_parts(tmp_path, "all")


@pytest.mark.slow
def test_a_conversion_with_text_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench_convert.SHAPES, "tiny", TINY)
    text = ["--calibration", "prose", "--calibration-tokens", "128", "--calibration-length", "64", "--held-out", "1"]
    verb = ["bench", "convert", "--shape", "tiny", "--dir", tmp_path, "--json", "--to", "lowrank", "--device", "cpu"]
    code, shown, errors = run_main(monkeypatch, capsys, *verb, *text)
    assert code == 0, errors
    found = json.loads(shown)
    assert found["seconds"] > 0 and found["peak_memory_bytes"] > 0
    assert found["report"]["target"]["model_type"] == "surgery" and "calibrate: backward" in found["report"]["seconds"]
