"""Errors say in fields what is wrong, so that nobody has to read their prose; settings of files in one line."""

import inspect
import pickle

import pytest

from surgery.cli.convert import CONVERTED, convert
from surgery.cli.generated import with_settings
from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.file_settings import read_mapping
from surgery.common.setting import settings_of
from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.planning.settings import PlanSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.low_rank.settings import LowRankSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.registry import SLICE, TARGETS
from surgery.training.settings import HealSettings

CLASSES = [EvalSettings, HeadSettings, PlanSettings, HealSettings, SLICE.settings_class]
CLASSES += [target.settings_class for target in TARGETS.values() if not target.fixed]


@pytest.mark.parametrize("settings_class", CLASSES)
def test_every_setting_names_itself(settings_class):
    attempts = 0
    for name, setting in settings_of(settings_class).items():
        wrong = {"choices": "no such choice", "least": (setting.info.least or 0) - 1, "above": setting.info.above}
        for limit, value in wrong.items():
            reference = setting.choices if limit == "choices" else getattr(setting.info, limit)
            if reference in (None, ()) or (limit != "choices" and setting.choices):
                continue
            with pytest.raises(SurgeryError) as caught:
                setting.parse(value)
            assert caught.value.setting == name, (name, limit)
            attempts += 1
    assert attempts


def test_an_unknown_name_has_the_nearest_as_its_hint():
    with pytest.raises(SurgeryError) as caught:
        HealSettings.from_mapping({"learning_rat": 1}, "heal.yaml")
    assert (caught.value.setting, caught.value.hint) == ("learning_rat", "learning_rate")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "a: !!python/object:x {}", "2024-99-99"])
def test_a_file_that_cannot_be_read_is_named(text, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SurgeryError) as caught:
        read_mapping(path)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("kv_ratio 25 is too much", "--kv-ratio 25 is too much"),
        ("kv_ratio: too much", "--kv-ratio: too much"),
        ("--kv-ratio must be a number", "--kv-ratio must be a number"),
        ("pass rank or kv_ratio, not both", "--kv-ratio: pass rank or kv_ratio, not both"),
    ],
)
def test_the_flag_stands_in_front_and_the_sentence_stays(message, line):
    error = SurgeryError(message, setting="kv_ratio")
    assert error.line == message
    error.flag = "--kv-ratio"
    assert (error.line, str(error)) == (line, message)


def test_a_hint_follows_once():
    assert SurgeryError("a: no such task", hint="loss").line == "a: no such task; try loss"
    assert SurgeryError("a: did you mean loss?", hint="loss").line == "a: did you mean loss?"


def test_an_error_of_a_command_with_settings_keeps_its_kind_and_fields(monkeypatch):
    def lost(*arguments, **options):
        raise ProcessLost("rank 1 has ended", setting="seed", path="ckpt")

    monkeypatch.setattr("surgery.structures.registry.Target.check_paths", lost)
    verb = with_settings(convert, CONVERTED)
    defaults = {name: each.default for name, each in inspect.signature(verb).parameters.items()}
    with pytest.raises(ProcessLost) as caught:
        verb(**defaults | {"checkpoint": "builtin", "seed": "3"})
    assert (caught.value.flag, caught.value.path.name) == ("--seed", "ckpt")


def test_fields_reach_other_processes():
    error = pickle.loads(pickle.dumps(SurgeryError("a: b", setting="a", path="x", hint="c")))
    assert (str(error), error.setting, error.path.name, error.hint) == ("a: b", "a", "x", "c")


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
    assert read(tmp_path, "overwrite: true", HealSettings).overwrite is True
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
        (HealSettings, "overwrite: 1", "overwrite must be true or false, not 1"),
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
