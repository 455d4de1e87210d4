"""Settings from YAML: numbers however they are written, one line for what is no setting."""

import pytest

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import read_mapping
from surgery.heads.settings import HeadSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.training.settings import HealSettings


def read(tmp_path, text, settings=ConvertSettings):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    return settings.from_file(path)


@pytest.mark.parametrize("paths", ["1e4", "10000", "1.0e4", "'10000'", "1E4", "10_000"])
def test_a_whole_number_in_every_spelling(paths, tmp_path):
    tokens = read(tmp_path, f"calibration_tokens: {paths}").calibration_tokens
    assert tokens == 10_000 and type(tokens) is int
    assert read(tmp_path, f"max_tokens: {paths}", HealSettings).max_tokens == 10_000


def test_other_kinds(tmp_path):
    assert read(tmp_path, "kv_ratio: 25e-2").kv_ratio == 0.25
    assert read(tmp_path, "streaming: 1", HybridSettings).streaming == 1
    assert read(tmp_path, "max_shard_size: 5000000").max_shard_size == "5000000"
    assert read(tmp_path, "bits: 4", QuantizedSettings).bits == 4
    assert read(tmp_path, "bits: auto", QuantizedSettings).bits == "auto"
    assert read(tmp_path, "rank:", LowRankSettings).rank is None
    assert read(tmp_path, "offload: true", HeadSettings).offload is True
    assert read(tmp_path, "data: [a, b]\nlearning_rate: 5e-4", HealSettings).learning_rate == 5e-4


@pytest.mark.parametrize(
    ("settings", "line", "message"),
    [
        (ConvertSettings, "kv_ratio: half", "kv_ratio must be a number, not 'half'"),
        (ConvertSettings, "kv_ratio: true", "kv_ratio must be a number, not true"),
        (ConvertSettings, "kv_ratio: [0.5]", "kv_ratio must be a number, not a list"),
        (ConvertSettings, "calibration_tokens: 10.5", "calibration_tokens must be a whole number, not 10.5"),
        (ConvertSettings, "calibration_tokens: .inf", "calibration_tokens must be a whole number, not inf"),
        (ConvertSettings, "seed:", "seed must be a whole number, not empty"),
        (ConvertSettings, "method: {fisher: 1}", "method must be text, not a mapping"),
        (ConvertSettings, "bits: [4]", "bits must be text, not a list"),
        (HeadSettings, "offload: 1", "offload must be true or false, not 1"),
        (HealSettings, "batch_size: many", "batch_size must be a whole number, not 'many'"),
        (ConvertSettings, "- kv_ratio: 0.5", "must be a mapping, not a list; write lines of name: value"),
        (ConvertSettings, "kv_ratio 0.5", "must be a mapping, not 'kv_ratio 0.5'; write lines of name: value"),
        (ConvertSettings, "kv_ration: 0.5", "unknown setting 'kv_ration'; did you mean kv_ratio?"),
    ],
)
def test_what_is_no_setting_is_one_line(settings, line, message, tmp_path):
    with pytest.raises(SurgeryError) as caught:
        read(tmp_path, line, settings)
    assert message in str(caught.value) and "settings.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_file_has_no_settings(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_mapping(tmp_path / "empty.yaml") == {}
