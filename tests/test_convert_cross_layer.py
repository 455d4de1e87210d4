"""Layers that share a cache, end to end on tiny models: written, verified by the conversion, run elsewhere."""

import json

import pytest
import torch
from conversions import convert_checkpoint
from decoding import in_pieces
from safetensors.torch import load_file
from tiny_models import DEMO, SHORT_TEXT, tokens
from transformers import AutoModelForCausalLM

from surgery.calibration.cross_layer_statistics import joint_moment
from surgery.calibration.held_out import HeldOut
from surgery.calibration.texts import Texts
from surgery.checkpoint.file_kinds import REPORT
from surgery.checkpoint.snapshots import Snapshots
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.eval.kv_cache import cache_bytes
from surgery.eval.report.plots import layer_errors
from surgery.evaluation.models import Checkpoint
from surgery.running.source import Source
from surgery.structures.context import ConversionContext
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.cross_layer.structure import plan_groups

QUICK = {**SHORT_TEXT, "method": "xkv", "batch_size": 2, "block": 16, "group_size": 2}
FAMILIES = ("llama", "llama3", "llama_bias", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@pytest.fixture
def converted(conversions):
    return lambda name, **settings: conversions(name, CrossLayerSettings(**{**QUICK, **settings}))


# To the cache, mistral and mixtral without windows are llama, and llama_bias and qwen2 are one.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("mistral", "mixtral", "llama_bias"))) for n in FAMILIES]
)
@torch.no_grad()
def test_what_is_written_is_what_was_simulated(converted, checkpoints, name):
    """The conversion compares logits itself; here its simulation and the model must have scored the same."""
    result = converted(name)
    report = result.report
    losses = {row["stage"]: row["loss"] for row in report.ladder}
    assert list(losses) == ["source", "shared", "reloaded"]
    assert losses["reloaded"] == pytest.approx(losses["shared"], abs=1e-4)
    assert losses["shared"] != losses["source"]
    model = load(result.path)
    logits, cache = in_pieces(model, tokens(), (20, 11, *[1] * 9))
    expected = model(tokens()).logits
    assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4
    # A quarter of the keys and values of two complete blocks, and 8 tokens as they were.
    width = model.model.layers[0].self_attn.width
    assert cache_bytes(cache) == 2 * 4 * (32 * 2 * width // 4 + 8 * 2 * width) == model.kv_cache_bytes(2, 40)


@torch.no_grad()
def test_a_larger_budget_is_nearer_to_the_source(converted, checkpoints):
    """Down to the source itself, all but one of 64 numbers."""
    source = load(checkpoints("llama"))(tokens()).logits
    errors, predicted = [], []
    for settings in ({"kv_ratio": 0.1}, {}, {"kv_ratio": 0.99}):  # the second is the default, a quarter
        result = converted("llama", **settings)
        errors.append(float((load(result.path)(tokens()).logits - source).norm() / source.norm()))
        predicted.append(result.report.layers[0].error)
    assert errors[0] > errors[1] > errors[2] and predicted[0] > predicted[1] > predicted[2]
    assert errors[2] < 0.05


def test_windows_and_sinks_and_blocks_are_as_asked(converted):
    result = converted("llama", window=24, sinks=2, block=8, rank=9)
    config = json.loads((result.path / "config.json").read_text())
    entry = config["attention_layers"][1]
    assert entry == {
        "kind": "cross_layer",
        "group_size": 2,
        "index_in_group": 1,
        "rank": 18,
        "block": 8,
        "sinks": 2,
        "window": 24,
    }
    plain = converted("llama", block=8, rank=9)
    assert abs(result.report.layers[0].measured["shared"]) < abs(plain.report.layers[0].measured["shared"])


def test_minicache_merges_pairs_of_the_deeper_half(checkpoints, tmp_path):
    settings = CrossLayerSettings(method="minicache", block=32)
    groups, entries = plan_groups(Source.open(DEMO, settings), settings)
    assert groups == ((3, 5),) and entries[0].kept == 2 and entries[0].interpolation == 0.6
    result = convert_checkpoint(
        DEMO, tmp_path / "out", CrossLayerSettings(**{**QUICK, "method": "minicache", "held_out": 1})
    )
    losses = {row["stage"]: row["loss"] for row in result.report.ladder}
    assert losses["reloaded"] == pytest.approx(losses["shared"], abs=0.02)
    assert 0.5 < result.report.kv["ratio"] < 1


def test_half_precision_stays_half_precision(checkpoints, tmp_path):
    source = checkpoints("llama", torch.bfloat16)
    result = convert_checkpoint(source, tmp_path / "out", CrossLayerSettings(**QUICK))
    tensors = load_file(result.path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert result.report.kv["measured_bytes_per_token"] == 2 * 16  # 64 tokens are four blocks, none is exact


def test_report_and_card_are_written(converted):
    result = converted("llama")
    report = json.loads((result.path / REPORT).read_text())
    assert report["target"]["method"] == "xkv" and report["target"]["groups"] == [[0, 2]]
    assert report["layers"][0]["layer"] == "0-1" and 0 < report["layers"][0]["error"] < 1
    assert "latents of rank 16" in (result.path / "README.md").read_text()
    layers = Checkpoint.open(str(result.path)).conversion()["layers"]
    figure = layer_errors({"rows": [{"name": "converted", "role": "checkpoint", "conversion": {"layers": layers}}]})
    assert [list(line.get_xdata()) for line in figure.axes[0].lines] == [[0.5]]  # between both


def test_the_joint_moment_is_that_of_each_layer_on_its_diagonal(checkpoints):
    settings = CrossLayerSettings(**QUICK)
    opened = Source.open(checkpoints("mixtral"), settings)
    texts = Texts(tokens(), HeldOut.of_text(tokens()), {})
    work = ConversionContext.in_folder(Snapshots(), opened, settings, texts, Progress(silent=True))
    with work.store, work.library as library, work.converted:
        work.gather(gradients=False)
        moment = joint_moment(opened, work.store, 0, 2, batch_size=1)
        width = len(moment) // 2
        for layer in range(2):
            block = moment[layer * width : (layer + 1) * width, layer * width : (layer + 1) * width]
            assert torch.allclose(block, library.load(layer)[0].moment, rtol=1e-4, atol=1e-5)
    assert torch.equal(moment, moment.T) and moment[:width, width:].abs().max() > 0.01


def test_converted_checkpoints_are_refused(converted, tmp_path):
    with pytest.raises(SurgeryError, match="convert its source"):
        convert_checkpoint(converted("llama").path, tmp_path / "out", CrossLayerSettings(**QUICK))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mistral_window", {}, "sliding window"),
        ("llama", {"calibration": "none"}, "requires calibration text"),
        ("llama", {"rank": 40}, "must be fewer than the source's 64"),
        ("llama", {"kv_ratio": 0.001}, "and at least one"),
        ("llama", {"method": "minicache", "kv_ratio": 0.5}, "has a fixed ratio"),
    ],
)
def test_impossible_requests_leave_nothing(checkpoints, tmp_path, name, settings, message):
    with pytest.raises(SurgeryError, match=message):
        convert_checkpoint(checkpoints(name), tmp_path / "out", CrossLayerSettings(**{**QUICK, **settings}))
    assert list(tmp_path.iterdir()) == []
