"""The refit of output projections compares a layer's source with the same layer converted, for every target."""

import pytest
import torch
from conversions import convert_checkpoint
from tiny_models import SHORT_TEXT, make_checkpoint

from surgery.structures import refit
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized.settings import QuantizedSettings

WHOLE = {
    "low rank": LowRankSettings(kv_ratio=0.999, **SHORT_TEXT),
    "heads in bits": QuantizedSettings(bits=8, **SHORT_TEXT),
}
"""Conversions that lose one latent or the last bits."""
FEWER = {
    "MLA by rank": ConvertSettings(kv_ratio=0.5, carrier="own", **SHORT_TEXT),
    "MLA in bits": ConvertSettings(kv_ratio=0.4, **SHORT_TEXT),
    "cascade in bits": CrossLayerSettings(kv_ratio=0.4, group_size=2, **SHORT_TEXT),
    "fewer heads": KVHeadsSettings(kv_heads=1, **SHORT_TEXT),
}


@pytest.fixture
def refits(monkeypatch, tmp_path):
    """Convert a tiny model; return (projection before, refitted, source's outputs, head outputs) of every layer."""

    def run(family, settings):
        seen, refit_output = [], refit.refit_output

        def record(o, batches):
            pairs = list(batches)
            outputs, heads = (torch.cat([pair[index].double() for pair in pairs]) for index in (0, 1))
            seen.append((o.double(), refit_output(o, pairs).double(), outputs, heads))
            return seen[-1][1].to(o)

        monkeypatch.setattr(refit, "refit_output", record)
        convert_checkpoint(make_checkpoint(tmp_path / "source", family), tmp_path / "out", settings)
        return seen

    return run


def error(o, outputs, heads):
    return float((torch.einsum("bthe,dhe->btd", heads, o) - outputs).norm() / outputs.norm())


@pytest.mark.parametrize(
    ("target", "family"),
    [*((target, "llama_bias") for target in WHOLE), ("low rank", "qwen3_next_state")],  # with an output gate
)
def test_a_conversion_that_loses_nearly_nothing_gives_equal_outputs(refits, family, target):
    for old, new, outputs, heads in refits(family, WHOLE[target]):
        assert error(old, outputs, heads) < 0.02 and error(new, outputs, heads) < 0.02


@pytest.mark.parametrize("target", FEWER)
def test_the_refit_lowers_the_error_of_every_layer(refits, target):
    layers = refits("llama", FEWER[target])
    assert layers
    for old, new, outputs, heads in layers:
        assert error(new, outputs, heads) < error(old, outputs, heads)
