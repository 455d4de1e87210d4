"""`surgery bench`: commands from the outside, and decoding of tiny models."""

import json

import pytest
import torch
import written_models
from transformers.cache_utils import DynamicLayer

from surgery.acceleration.accelerate import Acceleration
from surgery.bench import models as bench_models
from surgery.bench.cache import filled_cache, is_steady
from surgery.bench.decode import DecodeSettings, _against_source, measure_decoding
from surgery.bench.kernels import KernelRequest, measure_kernels
from surgery.common.errors import SurgeryError
from surgery.console.bench import show_decoding, show_kernels
from surgery.eval.kv_cache import cache_bytes

pytestmark = pytest.mark.usefixtures("one_core")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return bench_models.source_config("tiny")


CONVERTED = list(bench_models.converted_configs())


@pytest.mark.parametrize("structure", [None, *CONVERTED])
def test_random_models_cache_what_their_structure_says_and_a_step_stays_where_it_is(structure, tiny):
    config = tiny if structure is None else bench_models.converted_configs()[structure](tiny, 24, 8)
    model = bench_models.random_model(config, CPU)
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    numbers = {None: 64, "gqa": 32}.get(structure, 32)
    cache = filled_cache(model, 2, 20, CPU)
    itemsize = next(model.parameters()).element_size()
    layer_bytes = 21 * numbers // 2 + 4 * numbers * itemsize if structure == "mla-bits" else 21 * numbers * itemsize
    assert is_steady(model, CPU) and cache_bytes(cache) == 2 * 2 * layer_bytes
    token, position = torch.ones(2, 1, dtype=torch.long), torch.full((2, 1), 20)
    with torch.no_grad():
        first = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
        again = model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
    assert torch.equal(first, again) and cache.get_seq_length() == 20
    assert first.isfinite().all()


@pytest.mark.parametrize("name", list(written_models.WRITTEN))
def test_every_cache_that_we_write_is_filled(name):
    model = written_models.WRITTEN[name]()
    cache = filled_cache(model, 2, 40, CPU)
    assert cache.get_seq_length() == 40
    if hasattr(model, "kv_cache_bytes") and not is_steady(model, CPU):
        assert cache_bytes(cache) == model.kv_cache_bytes(2, 40)


def test_a_steady_step_is_that_of_a_growing_cache(tiny):
    """The source, whose plain cache is filled with the same tokens."""
    from transformers import DynamicCache

    model = bench_models.random_model(tiny, CPU)
    steady, growing = filled_cache(model, 1, 12, CPU), DynamicCache()
    for index, layer in enumerate(steady.layers):
        growing.update(layer.keys[:, :, :-1].clone(), layer.values[:, :, :-1].clone(), index)
    token = torch.tensor([[5]])
    with torch.no_grad():
        one = model(input_ids=token, position_ids=torch.tensor([[12]]), past_key_values=steady).logits
        other = model(input_ids=token, past_key_values=growing).logits
    torch.testing.assert_close(one, other)


def test_decoding_is_measured_for_every_model_context_and_batch(tmp_path, capsys):
    settings = DecodeSettings((16,), (1, 2), rank=24, rope_dim=8, kernels=(False,))
    path, message = tmp_path / "decode.json", []
    record = measure_decoding(["tiny"], settings, CPU, out=path, say=message.append)
    assert json.loads(path.read_text()) == record
    measured = record["rows"]
    assert [(row["kind"], row["batch"]) for row in measured] == [("source", 1), ("source", 2), ("mla", 1), ("mla", 2)]
    assert measured[0]["cache_bytes"] == 2 * measured[2]["cache_bytes"]
    assert all(row["times_source"] == 1.0 for row in measured[:2])
    assert "not representative of a GPU" in record["note"]
    show_decoding(record, path)
    output = capsys.readouterr().out
    assert "tokens/s" in output and "not representative of a GPU" in output


def test_a_checkpoint_folder_is_measured_as_it_is(tmp_path, tiny):
    bench_models.random_model(tiny, CPU).save_pretrained(tmp_path / "ckpt")
    settings = DecodeSettings((8,), (1,), kernels=(False,), dtype="float32")
    (row,) = measure_decoding([str(tmp_path / "ckpt")], settings, CPU)["rows"]
    assert (row["model"], row["kind"], row["context"], row["batch"]) == ("ckpt", "checkpoint", 8, 1)
    parameters = sum(each.numel() for each in bench_models.random_model(tiny, CPU).parameters())
    assert row["weight_bytes"] >= 4 * parameters


def test_further_folders_are_compared_with_the_first(tmp_path, tiny):
    for name in ("ckpt", "other"):
        bench_models.random_model(tiny, CPU).save_pretrained(tmp_path / name)
    folders = [str(tmp_path / "ckpt"), str(tmp_path / "other")]
    rows = measure_decoding(folders, DecodeSettings((8,), (1,), kernels=(False,)), CPU)["rows"]
    assert [(row["model"], row["kind"]) for row in rows] == [("ckpt", "source"), ("other", "checkpoint")]
    assert rows[1]["times_source"] == rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"]


def test_caches_that_grow_are_filled_by_the_model(tiny):
    """Others have a slot for the newest token from the start."""
    model = bench_models.random_model(tiny, CPU)
    cache = filled_cache(model, 1, 12, CPU, growing=True)
    assert cache.get_seq_length() == 12 and all(type(layer) is DynamicLayer for layer in cache.layers)
    steady, growing = (
        measure_decoding(["tiny"], DecodeSettings((12,), (1,), structures=(), kernels=(False,), growing=each), CPU)
        for each in (False, True)
    )
    tokens = cache_bytes(cache) // 12
    assert (growing["rows"][0]["cache_bytes"], steady["rows"][0]["cache_bytes"]) == (12 * tokens, 13 * tokens)
    assert growing["cache"] != steady["cache"]


def test_kernels_that_refuse_are_a_row_with_the_reason(monkeypatch):
    result = Acceleration((), refused="tensors are on the cpu device")
    monkeypatch.setattr("surgery.acceleration.accelerate", lambda model: result)
    (row,) = measure_decoding(["tiny"], DecodeSettings((8,), (1,), structures=(), kernels=(True,)), CPU)["rows"]
    assert row["accelerated"] and row["skipped"] == "tensors are on the cpu device"


def test_rows_are_held_against_the_fastest_source():
    common = {"model": "m", "source": "m", "context": 8, "largest": False}
    rows = [
        {**common, "kind": "source", "accelerated": False, "batch": 1, "tokens_per_second": 5.0},
        {**common, "kind": "source", "accelerated": True, "batch": 1, "tokens_per_second": 10.0},
        {**common, "kind": "mla", "accelerated": True, "batch": 1, "tokens_per_second": 25.0},
        {**common, "kind": "mla", "accelerated": True, "batch": 2, "tokens_per_second": 25.0},
        {**common, "kind": "source", "accelerated": False, "batch": 6, "largest": True, "tokens_per_second": 50.0},
        {**common, "kind": "mla", "accelerated": True, "batch": 40, "largest": True, "tokens_per_second": 200.0},
    ]
    _against_source(rows)
    assert [row.get("times_source") for row in rows] == [0.5, 1.0, 2.5, None, 1.0, 4.0]


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(SurgeryError, match="gpt5: not a folder or a known shape; choose from llama3-8b"):
        measure_decoding(["gpt5"], DecodeSettings((8,), (1,)), CPU)
    with pytest.raises(SurgeryError, match="--to mqx: unknown; choose from mla"):
        measure_decoding(["tiny"], DecodeSettings((8,), (1,), structures=("mqx",)), CPU)


def test_kernels_without_a_gpu(tmp_path, capsys):
    request = KernelRequest(operations="mla_decode", contexts="40", batches="2", device="cpu")
    record, path = measure_kernels(request, tmp_path)
    assert path == tmp_path / "kernels.json" and path.exists()
    show_kernels(record, path)
    output = capsys.readouterr().out
    assert "correct" in output and "not timed on the cpu device" in output, output
    for wrong, message in (
        ({"operations": "mla"}, "unknown operation"),
        ({"contexts": "8x"}, "--contexts"),
        ({"dtype": "int8"}, "--dtype int8"),
    ):
        with pytest.raises(SurgeryError, match=message):
            measure_kernels(KernelRequest(device="cpu", **wrong), tmp_path)
