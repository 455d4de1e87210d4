"""Settings of a healing: refused early, and the schedule that follows from them."""

from pathlib import Path

import pytest

from surgery.common.errors import SurgeryError
from surgery.training.schedule import Budget, learning_rate
from surgery.training.settings import HealSettings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_shipped_settings_are_the_defaults():
    assert HealSettings.from_file(CONFIGS / "heal.yaml") == HealSettings()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": "all"}, "did you mean train"),
        ({"train": "lorra"}, "did you mean lora"),
        ({"learning_rate": "fast"}, "learning_rate must be a number"),
        ({"learning_rate": 0}, "learning_rate must be above 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": True}, "batch_size must be a whole number"),
        ({"length": 1}, "length must be at least 2"),
        ({"warmup": 2}, "warmup is a share"),
        ({"betas": [0.9]}, "betas must be two numbers"),
        ({"betas": [0.9, 1.0]}, "betas must be two numbers"),
        ({"max_tokens": None}, "no limit ends the run"),
        ({"data": []}, "data is empty"),
        ({"objective": {"cross_entropi": 1}}, "did you mean cross_entropy"),
        ({"objective": {"kl": 1}}, "kl needs a teacher"),
        ({"objective": {"hidden": 1}, "teacher_logits": "cache"}, "needs the teacher's layers"),
        ({"teacher_logits": "cache", "max_tokens": None, "max_seconds": 5}, "max_tokens or max_steps"),
    ],
)
def test_refuses(values, message):
    with pytest.raises(SurgeryError, match=message):
        HealSettings.from_mapping(values, "heal.yaml")


def test_refuses_what_is_incomplete_or_impossible_before_it_starts():
    with pytest.raises(SurgeryError, match="student is missing"):
        HealSettings(out="x").check_complete()
    with pytest.raises(SurgeryError, match="weight must be a finite number"):
        HealSettings(student="s", out="x", objective={"cross_entropy": -1}).check_complete()


def test_the_objective_is_what_was_named_and_nothing_else():
    assert HealSettings(teacher="t").weights().parts() == ["kl"]
    assert HealSettings().weights().parts() == ["cross_entropy"]
    assert HealSettings(teacher="t", objective={"hidden": 2.0}).weights().parts() == ["hidden"]


def test_steps_of_a_budget():
    settings = HealSettings(length=8, batch_size=2, gradient_accumulation=3, max_tokens=1000)
    assert settings.global_batch(2) == 12
    assert settings.most_steps(2) == 11  # 96 tokens per step
    assert HealSettings(max_tokens=None, max_seconds=9).most_steps(1) is None


@pytest.mark.parametrize(
    ("values", "processes", "expected"),
    [
        ({}, 1, (4, 4)),  # 10M tokens
        ({"max_tokens": 60_000}, 1, (1, 1)),
        ({"max_tokens": 10 * 200 * 1024}, 1, (4, 2)),
        ({"max_tokens": 10 * 200 * 1024}, 5, (2, 1)),
        ({"max_tokens": 60_000, "batch_size": 2}, 1, (2, 1)),
        ({"max_tokens": 60_000, "gradient_accumulation": 3}, 1, (1, 3)),
        ({"gradient_accumulation": 8}, 1, (2, 8)),
        ({"batch_size": 3, "gradient_accumulation": 5, "max_tokens": 1}, 1, (3, 5)),
        ({"max_seconds": 600.0, "device": "cpu"}, 1, (1, 1)),
        ({"max_tokens": None, "max_steps": 5}, 1, (4, 4)),
    ],
)
def test_a_small_budget_has_small_steps(values, processes, expected):
    settings = HealSettings(**values).with_batches(processes)
    assert (settings.batch_size, settings.gradient_accumulation) == expected
    assert settings.global_batch(processes) == HealSettings(**values).global_batch(processes)


def test_yaml_numbers_may_be_text():
    assert HealSettings(learning_rate="1e-4").learning_rate == 1e-4


def test_the_nearest_limit_decides_the_learning_rate():
    budget = Budget(steps=100, tokens=1000, seconds=10)
    assert budget.used(10, 100, 5) == 0.5
    assert budget.used(90, 100, 5) == 0.9
    assert Budget(tokens=10).used(99, 5, 99) == 0.5
    assert [learning_rate("cosine", used, warmup=0.2) for used in (0, 0.1, 0.2, 0.6)] == [0, 0.5, 1, pytest.approx(0.5)]
    assert learning_rate("cosine", 1.0, warmup=0.2) == pytest.approx(0)
    assert learning_rate("linear", 0.75) == 0.25
    assert learning_rate("constant", 0.9, warmup=0.1) == 1
    assert learning_rate("cosine", 1.5) == pytest.approx(0)


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_launches_are_read_by_accelerate(path):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(path))
    assert config.num_processes == {"cpu-1": 1, "cpu-2": 2, "gpu-1": 1, "fsdp2": 8}[path.stem]
    kind = {"fsdp2": "FSDP", "cpu-2": "MULTI_GPU"}.get(path.stem, "NO")
    assert config.distributed_type == kind
