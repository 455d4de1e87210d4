"""Trackers: refused early, told everything, and never the end of a run."""

import json
import sys
import types
from pathlib import Path

import pytest
from healing import heal_here, heal_settings, log_of, losses_of

from surgery.common.errors import SurgeryError
from surgery.common.wandb_service import check_wandb
from surgery.training import heal, trackers

SHORT = {"max_steps": 2, "eval_every": None, "held_out": 0}
ENVIRONMENT = ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE")


@pytest.fixture
def settings(tmp_path, teacher, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    return lambda **others: heal_settings(tmp_path, teacher, None, **{**SHORT, **others})


@pytest.fixture
def no_models(monkeypatch):
    """Fail if a model is loaded."""
    monkeypatch.setattr(heal, "causal_model", lambda *_, **__: pytest.fail("a model was loaded"))


class Service:
    """Stands for wandb's own package: takes what accelerate's tracker calls."""

    def __init__(self, monkeypatch, *, breaks: str = ""):
        self.asked, self.logged, self.finished, self._breaks = {}, [], 0, breaks
        self.disabled = False
        self.id, self.entity, self.project, self.url = "abc123", "us", "p", "https://example.org/us/p/runs/abc123"
        self.config = types.SimpleNamespace(update=lambda values, **_: self.asked.update(config=values))
        self.Settings = lambda **settings: settings
        self.__spec__ = pytest.importorskip("wandb").__spec__
        monkeypatch.setitem(sys.modules, "wandb", self)

    def init(self, **settings):
        if self._breaks == "init":
            raise RuntimeError("api key is\nnot valid")
        self.asked |= settings
        return self

    def log(self, values, step=None, **_):
        if self._breaks == "log":
            raise ConnectionError("the service went away")
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1
        if self._breaks == "finish":
            raise ConnectionError("the service went away")


def test_wandb_follows_a_run(settings, monkeypatch, tmp_path):
    service = Service(monkeypatch)
    values = settings(wandb="mine", wandb_mode="offline", held_out=2)
    values |= {"tracker_folder": str(tmp_path / "kept")}
    facts = heal_here(values)
    request = (service.asked["project"], service.asked["mode"], service.asked["dir"])
    assert request == ("mine", "offline", str(tmp_path / "kept")) and (tmp_path / "kept").is_dir()
    assert service.asked["config"]["max_steps"] == 2
    names = {(step, name) for step, numbers in service.logged for name in numbers}
    assert {(1, "loss"), (2, "tokens_per_second"), (0, "held_out/cross_entropy")} <= names
    assert service.finished == 1
    assert facts["wandb"] == {"entity": "us", "project": "p", "run_id": "abc123", "url": service.url}
    assert facts["tracker_failed"] is None


@pytest.fixture(scope="module")
def losses(tmp_path_factory, teacher) -> list[float]:
    """The losses of a run without a tracker."""
    values = heal_settings(tmp_path_factory.mktemp("plain"), teacher, None, **SHORT)
    heal_here(values)
    return losses_of(values)


@pytest.mark.parametrize("breaks", ["log", "finish"])
def test_a_tracker_that_fails_does_not_end_the_run(settings, losses, monkeypatch, capsys, breaks):
    Service(monkeypatch, breaks=breaks)
    tracked = settings(name="tracked", wandb="p", wandb_mode="offline")
    heal_here(tracked)
    assert losses_of(tracked) == losses
    assert (Path(tracked["out"]) / "model.safetensors").exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("the tracker failed")]
    assert lines == [
        f"the tracker failed at {breaks} (the service went away): "
        "the run continues without it; all values are in heal.jsonl"
    ]
    (failed,) = log_of(tracked, "tracker", finished=False)
    assert failed["failed"] == f"{breaks}: the service went away"
    recorded = json.loads((Path(tracked["out"]) / "heal.json").read_text())["tracker_failed"]
    assert recorded == (failed["failed"] if breaks == "log" else None)  # what comes last is in the run's log alone


def test_a_tracker_ends_with_a_run_that_fails(settings, monkeypatch):
    service = Service(monkeypatch)
    monkeypatch.setattr(heal.Loop, "run", lambda self: (_ for _ in ()).throw(SurgeryError("no")))
    with pytest.raises(SurgeryError, match="no"):
        heal_here(settings(wandb="p", wandb_mode="offline"))
    assert service.finished == 1


def test_a_tracker_that_refuses_does_so_before_models_are_loaded(settings, monkeypatch, no_models):
    Service(monkeypatch, breaks="init")
    with pytest.raises(SurgeryError, match=r"wandb does not start: api key is not valid; .*leave wandb out"):
        heal_here(settings(wandb="p", wandb_mode="offline"))


def test_wandb_online_without_a_network(settings, monkeypatch, no_models):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # a run before has read the environment once for the process
    monkeypatch.setattr(trackers, "SECONDS", 1)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(SurgeryError, match=r"wandb does not start: .*127\.0\.0\.1:9.*wandb_mode offline"):
        heal_here(settings(wandb="p"))


@pytest.mark.parametrize("mode", ["offline", "disabled"])
@pytest.mark.parametrize("by_variable", [False, True])
def test_wandb_without_a_service(settings, tmp_path, monkeypatch, mode, by_variable):
    """Use the real package: neither mode needs a login or a network."""
    wandb = pytest.importorskip("wandb")
    # Inputs of jobs that wandb starts itself, for which it imports its launcher and all of its API.
    monkeypatch.setattr("wandb.sdk.wandb_run.Run._detect_and_apply_job_inputs", lambda self: None)
    if by_variable:
        monkeypatch.setenv("WANDB_MODE", mode)
        wandb.teardown()
    values = settings(wandb="p", wandb_mode="online" if by_variable else mode, tracker_folder=str(tmp_path / "kept"))
    facts = heal_here(values)
    assert (facts["steps"], facts["tracker_failed"]) == (2, None)
    runs = list((tmp_path / "kept").glob("wandb/offline-run-*"))
    assert len(runs) == (mode == "offline") and bool(facts["wandb"]) == (mode == "offline")


def test_wandb_online_needs_a_login(settings, tmp_path, monkeypatch, no_models):
    pytest.importorskip("wandb")
    values = settings(wandb="p")
    with pytest.raises(SurgeryError, match="logged in"):
        heal_here(values)
    assert not Path(f"{values['out']}.run").exists()
    for host, url in (("api.wandb.ai", ""), ("metrics.example.org", "https://metrics.example.org")):
        monkeypatch.setenv("WANDB_BASE_URL", url)
        (tmp_path / "no-netrc").write_text(f"machine {host}\n  login user\n  password x\n")
        check_wandb("online")
    monkeypatch.setenv("WANDB_BASE_URL", "https://other.example.org")
    with pytest.raises(SurgeryError, match="logged in"):
        check_wandb("online")
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_wandb("online")
