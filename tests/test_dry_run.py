"""A dry run says beforehand what the conversion then writes, whatever the target; screens show every target and method.

Conversions are from the command line, as users call it.
"""

import json
import re
import shutil
from collections import namedtuple
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch
from command_line import run_main
from conversions import convert_checkpoint
from tiny_models import CONFIGS, SHAPE, SHORT_TEXT, add_tokenizer, random_model
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig

from surgery.calibration.sweep import BoundaryStore, forward_sweep
from surgery.engines.verdict import OPEN
from surgery.families.attention import CapturedAttention
from surgery.inspection.converted import skeleton
from surgery.running.experts import share_of_experts
from surgery.running.source import Source
from surgery.structures.base import LONG
from surgery.structures.dry_run import plan_conversion
from surgery.structures.estimates import ERROR, Demand, NoMemory, Workload
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import SLICE, TARGETS

WEIGHTS = {"calibration": "none", "device": "cpu"}
TEXT = {**SHORT_TEXT, "batch_size": 2, "device": "cpu"}
CASES = {
    "mla": ("llama", {"kv_ratio": 0.5, "rope_dim": 4, **WEIGHTS}),
    "mla of known frequencies": ("llama_bias", {"kv_ratio": 0.5, "rope_frequencies": "grid", **WEIGHTS}),
    "gqa": ("llama", {"kv_ratio": 0.5, **WEIGHTS}),
    "mqa": ("mistral", WEIGHTS),
    "lowrank": ("qwen3", {"kv_ratio": 0.5, **WEIGHTS}),
    "crosslayer": ("llama", {"group_size": 2, **TEXT}),
    "hybrid": ("llama", {"streaming": 1, "sinks": 2, "recent": 8, "context": 100, **TEXT}),
    "quantized": ("qwen2", TEXT),
    "slice": ("llama", {"kv_ratio": 0.25, **WEIGHTS}),
}


def convert(monkeypatch, capsys, source, out, case, request):
    """`surgery convert` or `slice`: its report, and the lines of its screen from the head of its table on."""
    verb = ["slice"] if case == "slice" else ["convert", "--to", case.split()[0]]
    flags = [part for name, value in request.items() for part in (f"--{name.replace('_', '-')}", value)]
    code, output, err = run_main(monkeypatch, capsys, *verb, source, "--out", out, *flags)
    assert code == 0, err
    report, lines = json.loads((out / "surgery_report.json").read_text()), output.splitlines()
    head = next(number for number, line in enumerate(lines) if line.split()[:1] == ["layer"])
    stages = list(report["layers"][0]["measured"])
    columns = re.split(r"\s{2,}", lines[head].strip())
    assert columns[len(columns) - len(stages) :] == stages
    # Below the head and its rule, a line a layer, or a group of them.
    rows = [line.split()[0] for line in lines[head + 2 : head + 2 + len(report["layers"])]]
    assert rows == [str(layer["layer"]) for layer in report["layers"]]
    if "method" in request:
        assert report["target"]["method"] == request["method"]
    return report, lines[head:]


@pytest.mark.parametrize("case", CASES)
def test_the_class_and_the_bytes_are_those_of_the_conversion(case, checkpoints, tmp_path, monkeypatch, capsys):
    family, request = CASES[case]
    target, source = TARGETS.get(case.split()[0], SLICE), checkpoints(family)
    if target is SLICE:
        whole = TARGETS["lowrank"].settings({"kv_ratio": 0.5, **WEIGHTS})
        source = convert_checkpoint(source, tmp_path / "whole", whole).path
    settings = target.settings(request)
    plan = plan_conversion(source, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()
    assert plan.memory["host_bytes"] > 0 and plan.work["estimated_seconds"] > 0

    report, _ = convert(monkeypatch, capsys, source, tmp_path / "out", case, request)
    assert plan.target["model_type"] == report["target"]["model_type"]
    assert plan.target["reasons"] == report["target"]["reasons"]
    statuses = {name: row["status"] for name, row in report["target"]["engines"].items()}
    forecast = {name: row["status"] for name, row in plan.target["engines"].items()}
    undecided = {name for name, status in forecast.items() if status == OPEN}
    assert forecast == statuses | dict.fromkeys(undecided, OPEN)
    assert undecided == ({"llama.cpp", "SGLang"} if case == "mla" else set())
    values = report["kv"]["predicted_bytes_per_token"]
    if plan.target["model_type"] == "surgery":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        tokens = request.get("context", LONG)
        values = skeleton(config, torch.float32).kv_cache_bytes(1, tokens) / tokens
    assert plan.kv["bytes_per_token"] == pytest.approx(values, rel=1e-4)


def methods(target):
    return get_args(get_type_hints(TARGETS[target].settings_class)["method"])


SHOWN = {
    **{f"mla {method}": {"method": method} for method in methods("mla")},
    **{f"gqa {method}": {"method": method} for method in methods("gqa")},
    **{f"lowrank {method}": {"method": method, "kv_ratio": 0.75} for method in methods("lowrank")},
    "lowrank in bits": {"kv_ratio": 0.2, "bits": "auto"},
}
"""Calls for every method that is none of the cases above."""
# Methods whose tables another of their target prints too.
ALIKE = [f"{target} {method}" for target in ("mla", "lowrank") for method in methods(target) if method != "fisher"]
ALIKE += ["gqa mean-pool"]


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    """Four layers, as merged pairs of layers begin in the middle."""
    folder = tmp_path_factory.mktemp("four-layers")
    random_model(LlamaConfig(**{**SHAPE, "num_hidden_layers": 4}, head_dim=16)).save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in ALIKE)) for case in SHOWN])
def test_every_method_is_printed(case, four_layers, tmp_path, monkeypatch, capsys):
    request = {**SHOWN[case], **TEXT}
    report, _ = convert(monkeypatch, capsys, four_layers, tmp_path / "out", case, request)
    losses = {row["stage"]: row["loss"] for row in report["ladder"]}
    if "method" in request and report["target"]["to"] == "lowrank":
        assert losses["reloaded"] == pytest.approx(losses["low rank"], abs=1e-4)
        assert report["kv"]["ratio"] <= 0.75


def test_every_target_is_a_case():
    assert {case.split()[0] for case in CASES} == {*TARGETS, SLICE.name}


def test_too_small_a_disk_is_told_with_the_plan(checkpoints, tmp_path, monkeypatch, capsys):
    verb = ["convert", "--to", "gqa", checkpoints("llama"), "--calibration", "none", "--kv-ratio", "0.5", "--dry-run"]
    usage = namedtuple("usage", "total used free")(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    code, output, errors = run_main(monkeypatch, capsys, *verb, "--out", tmp_path / "out", "--json")
    plan = json.loads(output)
    assert code == 1 and "the disk has 1,000 B free" in errors and plan["refusal"] in errors
    assert plan["memory"]["host_bytes"] > 0 and plan["disk"]["free_bytes"] == 1000


def most_allocated(work):
    """Bytes that tensors take at a time, at most, beyond those that were there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as records:
        work()
    events = [event for event in records.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_memory_of_a_batch_with_gradients(family, tmp_path):
    """Count several experts a token, each as wide as the feed-forward block of a model without."""
    config = CONFIGS[family]()
    config.intermediate_size, config.vocab_size = 512, 64
    random_model(config, 0).save_pretrained(tmp_path / "wide")
    opened = Source.open(tmp_path / "wide", settings := ConvertSettings(batch_size=2))
    counts = {"length": 128, "calibration": 2, "held_out": 0, "recall_prompts": 0}
    forecast = replace(Workload.of(opened, settings, counts, Demand()), on_host=False).memory()["device_bytes"]
    hidden, captured = torch.randn(2, 128, 32), CapturedAttention(opened.anatomy(0), gradients=True)

    def run():
        with torch.enable_grad():
            layer(hidden.requires_grad_(), captured).sum().backward()

    with opened.stream.layer(0) as layer:
        run()
        held = sum(each.numel() * (4 + 4) for each in layer.model.layers.parameters())  # as stored, and the module
        assert 0.6 * (forecast - held) < most_allocated(run) < forecast - held


def test_less_work_takes_less(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.structures.dry_run.measure_speed", lambda device, dtype: 1e9)

    def plan(**more):
        settings = ConvertSettings(**{**TEXT, **more})
        return plan_conversion(checkpoints("llama"), tmp_path / "out", settings)

    whole, less = plan(), plan(calibration_tokens=128)
    assert 0 < less.work["estimated_seconds"] < whole.work["estimated_seconds"]
    assert less.memory["host_bytes"] < whole.memory["host_bytes"]
    assert less.disk["temporary_bytes"] < whole.disk["temporary_bytes"]


def test_too_little_memory_is_refused_before_any_work(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2**29))
    settings = ConvertSettings(**TEXT)
    assert "memory" in plan_conversion(checkpoints("llama"), tmp_path / "out", settings).refusal
    with pytest.raises(NoMemory) as error:
        convert_checkpoint(checkpoints("llama"), tmp_path / "out", settings)
    assert "calibration_tokens" in error.value.hint and not list(tmp_path.iterdir())


MEASURED = {
    "SmolLM2, 4 layers": (576, 1536, 9, 3, 8192, 2, 4, 512, 32_768, 1211),
    "Llama-3-8B": (4096, 14336, 32, 8, 128256, 2, 2, 512, 2048, 2458),
}
"""Hidden and feed-forward size, heads, vocabulary, bytes per element, tokens, and the MiB of docs/scale.md."""


@pytest.mark.parametrize("shape", MEASURED)
def test_memory_is_a_bound_of_what_was_measured(shape):
    hidden, width, heads, kv_heads, vocabulary, stored, compute, length, tokens, measured = MEASURED[shape]
    size = 64 if heads == 9 else 128
    parameters = 2 * (heads + kv_heads) * size * hidden + 3 * hidden * width
    work = Workload(
        *(4, parameters, parameters, hidden, heads, size, 2 * kv_heads * size, vocabulary, length, tokens // length),
        **{"sequences": 1, "batch": 4, "stored": stored, "compute": compute, "on_host": True, "own_softmax": False},
        demand=Demand(),
    )
    assert measured <= work.memory()["host_bytes"] / 2**20 <= ERROR * measured


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_a_dry_run_for_a_gpu_needs_none(checkpoints, tmp_path, monkeypatch, capsys):
    verb = ["convert", checkpoints("llama"), "--out", tmp_path / "out", "--calibration", "none", "--device"]
    code, output, _ = run_main(monkeypatch, capsys, *verb, "cuda", "--dry-run")
    assert code == 0 and "accelerator memory" in output and "this machine has no cuda" in output
    assert output.splitlines()[-1].endswith("without --dry-run, on a machine with cuda")
    for more in (["cuda"], ["gpu0", "--dry-run"]):
        code, _, errors = run_main(monkeypatch, capsys, *verb, *more)
        assert code == 1 and f"--device {more[0]}: not available" in errors


def causal_attention(query, key, *_, **__):
    """Operations of scores and their use, of which causal attention does half; torch's counter knows no such kernel."""
    batch, heads, queries, dim = query
    return 2 * batch * heads * queries * key[-2] * dim


def test_operations_of_a_forward_sweep_are_those_that_torch_counts(checkpoints):
    opened = Source.open(checkpoints("llama"), settings := ConvertSettings(batch_size=2))
    tokens = torch.randint(4096, (4, 128), generator=torch.Generator().manual_seed(0))
    counts = {"length": 128, "calibration": 4, "held_out": 0, "recall_prompts": 0}
    forecast = Workload.of(opened, settings, counts, Demand()).phase_flops()
    kernels = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: causal_attention}
    with BoundaryStore() as store, FlopCounterMode(display=False, custom_mapping=kernels) as forward:
        forward_sweep(opened.stream, tokens, store, 2, lambda: None)
    assert forecast["calibrate: forward"] == pytest.approx(forward.get_total_flops(), rel=0.01)


def test_share_of_experts():
    assert share_of_experts(SimpleNamespace(num_local_experts=4, num_experts_per_tok=2)) == 1 / 2
    assert share_of_experts(SimpleNamespace(num_experts_per_tok=2)) == share_of_experts(None) == 1
