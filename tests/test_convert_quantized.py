"""`--to quantized` end to end on tiny models: a row of fixed bytes per token, with a basis for every head."""

import pytest
import torch
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.common.errors import SurgeryError
from surgery.eval.kv_cache import cache_bytes
from surgery.model.parts import entries_of
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.registry import find_target

TEXT = {"calibration": str(HELD_OUT), "calibration_tokens": 512, "calibration_length": 64, "held_out": 1, "recall": 0.0}
AUTO = QuantizedSettings(**TEXT, batch_size=4, kv_ratio=0.15)
INT8, INT4, INT2 = (QuantizedSettings(**TEXT, batch_size=4, bits=bits) for bits in (8, 4, 2))


def rows_of(made):
    model = AutoModelForCausalLM.from_pretrained(made.path, trust_remote_code=True)
    return model, entries_of(model.config)


def test_an_engine_quantizes_its_plain_cache_itself():
    def answer(**options):
        return QuantizedSettings.better_alternative({"engine": "llama.cpp", **options}.get)

    assert answer() == answer(bits="auto") == answer(bits="4") and "-ctk q4_0 -ctv q4_0" in answer()
    assert "-ctk q8_0" in answer(bits="8")
    assert "surgery plan CKPT --kv-ratio 0.5 --engine llama.cpp --allow engine" in answer(kv_ratio="0.5")
    assert QuantizedSettings.better_alternative({}.get) is None


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # biases; a key norm
def test_bits_are_spent_on_the_components_of_single_heads(name, conversions):
    """Converting verifies logits and the bytes of the live cache."""
    made = conversions(name, AUTO)
    model, entries = rows_of(made)
    assert made.report.target["to"] == "quantized" and made.report.target["bits"] == "auto"
    heads = model.config.num_key_value_heads
    for entry in entries:
        assert [(block.keys, block.values) for block in entry.blocks] == [
            *(((head,), ()) for head in range(heads)),
            *(((), (head,)) for head in range(heads)),
        ]
    rows = [entry.format.row_bytes for entry in entries]
    assert rows == made.report.target["row_bytes"]
    budget = 0.15 * made.report.kv["source_bytes_per_token"]
    assert budget - 4 - len(rows) < sum(rows) <= budget
    cache = model(torch.arange(20)[None] + 5, use_cache=True).past_key_values
    assert cache_bytes(cache) == 20 * sum(rows) + 4 * sum(entry.format.channels for entry in entries) * 4


def test_the_same_bits_for_every_value(conversions):
    """All components are kept, 8 bits are near the source, and fewer lose more."""
    errors = []
    for settings in (INT8, INT4, INT2):
        made = conversions("qwen2", settings)
        model, entries = rows_of(made)
        width = 2 * model.config.num_key_value_heads * model.config.hidden_size // model.config.num_attention_heads
        assert {len(entry.format.bits()) for entry in entries} == {width}
        assert {bits for entry in entries for bits in entry.format.bits()} == {settings.bits}
        errors.append(max(layer.measured["quantized"] for layer in made.report.layers))
    assert 0 < errors[0] < 0.05 and errors == sorted(errors)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"bits": 4, "kv_ratio": 0.2}, "kv_ratio"), ({"bits": 3}, "bits"), ({"calibration": "none"}, "calibration")],
)
def test_settings_that_cannot_be(settings, name):
    with pytest.raises(SurgeryError) as error:
        find_target("quantized").settings({**TEXT, **settings})
    assert error.value.setting == name


@pytest.mark.parametrize("name", ["group", "keys", "hadamard", "rope_bits", "streaming_bits"])
def test_settings_of_the_grouped_format_name_what_to_use(name):
    with pytest.raises(SurgeryError) as error:
        find_target("quantized").settings({name: 8})
    assert error.value.setting == name and error.value.hint


@pytest.mark.parametrize(
    ("to", "settings"),
    [("lowrank", {}), ("mla", {}), ("crosslayer", {"method": "cascade"}), ("gqa", {}), ("hybrid", {})],
)
def test_bits_of_other_structures_are_chosen_by_the_loss_or_left_out(to, settings):
    with pytest.raises(SurgeryError) as error:
        find_target(to).settings({**settings, "bits": 4})
    assert error.value.setting == "bits" and error.value.hint
