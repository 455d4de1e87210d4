from typing import get_args

import pytest

from surgery.common.errors import SurgeryError
from surgery.eval.variants.engine_cache import CALIBRATED, FORMATS
from surgery.evaluation.kinds import DEFAULT
from surgery.evaluation.settings import EvalSettings, Variant


def test_what_settings_mean():
    """Lists may be strings or single values, short windows decode half, and \"all\" is all tasks."""
    settings = EvalSettings(tasks="loss, needle", needle_lengths=256, contexts="128,256", batches=[1, 1, 2])
    assert settings.tasks == ("loss", "needle")
    assert settings.needle_lengths == (256,) and settings.contexts == (128, 256) and settings.batches == (1, 2)
    assert EvalSettings(prompts="a, b").prompts == ("a, b",)
    assert EvalSettings().decoded == 128 and EvalSettings(length=100).decoded == 50
    assert EvalSettings(length=100, decoded=0).decoded == 0
    assert EvalSettings(tasks="all,lm-eval:x").tasks == (*DEFAULT, "lm-eval:x")
    assert EvalSettings(variants="none").variants == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": "los"}, "did you mean loss"),
        ({"tasks": "lm-eval:"}, "unknown task"),
        ({"variants": "int5"}, "int5"),
        ({"domain": "prose"}, "domain"),
        ({"dtype": "int8"}, "dtype"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"contexts": "1k"}, "whole numbers"),
        ({"batches": [0]}, "batches must be at least 1"),
        ({"needle_depths": [101]}, "percent"),
        ({"length": 8, "decoded": 7}, "decoded"),
        ({"wandb_mode": "on"}, "online or offline"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(SurgeryError, match=message):
        EvalSettings(**settings)


def test_unknown_settings_of_a_file_are_refused(tmp_path):
    path = tmp_path / "eval.yaml"
    path.write_text("taks: [loss]\n")
    with pytest.raises(SurgeryError) as caught:
        EvalSettings.from_file(path)
    assert (caught.value.setting, caught.value.hint) == ("taks", "tasks") and str(path) in str(caught.value)


def test_every_cache_of_an_engine_can_be_asked_for():
    others = {"int8", "int4", "int3", "int2", "window"}
    assert set(get_args(Variant)) == {*FORMATS, *CALIBRATED, *others}
