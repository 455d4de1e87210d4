"""Weights, inputs and texts at the edge of what numbers can hold: each target converges or refuses, and never has NaN.

A conversion runs what it wrote and compares it with its simulation; here every number of its report and of its weights
is looked at too, and what was fitted is never worse on held-out text than the closed form it began from.
"""

import json
import math

import pytest
import torch
from config_files import config_of, edit_config
from conversions import STRUCTURE_TARGETS, convert_checkpoint
from safetensors.torch import load_file, save_file
from tiny_models import HELD_OUT, make_checkpoint

from surgery.common.errors import SurgeryError
from surgery.structures.registry import TARGETS

QUICK = {"calibration_tokens": 256, "calibration_length": 64, "held_out": 1, "batch_size": 2}
REQUESTS = {
    "mla": {"kv_ratio": 0.5},
    "gqa": {"kv_heads": 1},
    "lowrank": {"kv_ratio": 0.5},
    "crosslayer": {"group_size": 2},
    "hybrid": {"streaming": 1},
    "quantized": {},
}
assert set(REQUESTS) == STRUCTURE_TARGETS
ATTENTION = "model.layers.{}.self_attn.{}_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = 8


def each_layer(names, change):
    def edit(tensors):
        for layer in range(2):
            for name in names:
                change(tensors[ATTENTION.format(layer, name)])

    return edit


def overflowing(tensors):
    """Return tensors in float16 with keys near its largest number and queries among its smallest."""
    for layer in range(2):
        tensors[ATTENTION.format(layer, "k")].mul_(3e4)
        tensors[ATTENTION.format(layer, "q")].div_(3e4)


def duplicated(tensors):
    for layer in range(2):
        for name in "kv":
            weight = tensors[ATTENTION.format(layer, name)]
            weight[HEAD:] = weight[:HEAD]


def deficient(tensors):
    """Embeddings of rank 2."""
    left, values, right = torch.linalg.svd(tensors[EMBEDDING].float(), full_matrices=False)
    values[2:] = 0
    tensors[EMBEDDING].copy_(left * values @ right)


def outliers(tensors):
    for layer in range(2):
        tensors[f"model.layers.{layer}.input_layernorm.weight"][3] *= 1e4


def massive(tensors):
    """Tokens of activations 10,000 times as large as others', the first of a text among them."""
    tensors[EMBEDDING][1] *= 1e4
    tensors[EMBEDDING][5::50] *= 1e4


WEIGHTS = {
    "fp16 overflow": overflowing,
    "dead heads": each_layer("qkv", lambda weight: weight[:HEAD].zero_()),
    "a dead layer": each_layer("kv", lambda weight: weight.zero_()),
    "duplicated heads": duplicated,
    "rank-deficient inputs": deficient,
    "outlier channels": outliers,
    "massive activations": massive,
}
ROPE = {f"RoPE base {base:g}": base for base in (1e2, 1e4, 1e6, 1e8)}
TEXTS = {"constant tokens": (json.dumps({"text": "a " * 200}) + "\n") * 100, "one token": None}
CASES = [*WEIGHTS, *ROPE, *TEXTS]


def source_and_request(folder, case):
    """The checkpoint of a case, and settings that belong to it."""
    source = make_checkpoint(folder / "source", "llama", torch.float16 if case == "fp16 overflow" else torch.float32)
    settings = {**QUICK, "calibration": str(HELD_OUT)}
    if case in WEIGHTS:
        tensors = load_file(source / "model.safetensors")
        WEIGHTS[case](tensors)
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
    elif case in ROPE:
        rope = config_of(source)["rope_parameters"]
        edit_config(source, rope_parameters=rope | {"rope_theta": ROPE[case]})
    elif case == "one token":
        settings |= {"calibration_tokens": 1, "calibration_length": 2, "recall": 0.0}
    else:
        (folder / "text.jsonl").write_text(TEXTS[case])
        settings |= {"calibration": str(folder / "text.jsonl"), "recall": 0.0}
    return source, settings


def numbers(value):
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, float):
        yield value


def converges_or_refuses(folder, case, to):
    source, request = source_and_request(folder, case)
    try:
        settings = TARGETS[to].settings({**request, **REQUESTS[to]})
        report = convert_checkpoint(source, folder / "out", settings).report.to_dict()
    except SurgeryError as error:
        assert "\n" not in str(error)
        assert not (folder / "out").exists()
        return str(error)
    assert all(map(math.isfinite, numbers(json.loads(json.dumps(report)))))
    for tensor in load_file(folder / "out" / "model.safetensors").values():
        assert not tensor.is_floating_point() or tensor.isfinite().all()
    return None


FEW = [
    ("a dead layer", "mla"),
    ("a dead layer", "lowrank"),
    ("outlier channels", "crosslayer"),
    ("one token", "quantized"),
]


@pytest.mark.parametrize(("case", "to"), FEW)
def test_a_few(case, to, tmp_path):
    converges_or_refuses(tmp_path, case, to)


@pytest.mark.slow
@pytest.mark.parametrize("to", REQUESTS)
@pytest.mark.parametrize("case", CASES)
def test_every_case_converges_or_refuses(case, to, tmp_path):
    converges_or_refuses(tmp_path, case, to)
