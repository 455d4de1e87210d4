"""The kernels task: the same losses on the kernels as by a model's own code, and what it says where they cannot run."""

import pytest
import torch
from tiny_models import HELD_OUT
from transformers import AutoModelForCausalLM

from surgery.acceleration import plain_heads
from surgery.common.progress import Progress
from surgery.eval.held_out_text import Document, held_out_text
from surgery.eval.report.tables import columns
from surgery.eval.session import Session
from surgery.eval.tasks.loss import LossTask
from surgery.evaluation.kernels_task import WINDOWS, KernelsTask
from surgery.evaluation.settings import EvalSettings
from surgery.running.processes import Processes

DECODED = 5


@pytest.fixture(scope="module")
def text(tokenizer):
    content = HELD_OUT.read_text(encoding="utf-8")
    return held_out_text(tokenizer, [Document(content, ((0, "all"),))], WINDOWS + 1, 40, seed=0)


@pytest.fixture
def session(tokenizer):
    return Session(tokenizer, Processes(), Progress(silent=True), batch_size=2)


@pytest.fixture
def model(checkpoints):
    return AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.float32).eval()


def shown(found):
    report = {"rows": [{"name": "a", "results": {"kernels": found}}]}
    return {column.key: column.text(report["rows"][0], report) for column in columns(report)}


def test_losses_are_those_of_the_models_own_code(model, text, session):
    before = model.config._attn_implementation
    found = KernelsTask(text, DECODED).run(model, session)
    assert found["operations"] == {"gqa_decode": model.config.num_hidden_layers} and found["refused"] is None
    assert 0 < found["logit_error"] < 1e-4 and 0 < found["largest_difference"] < 1e-4
    expected = LossTask(text.first(WINDOWS), DECODED).run(model, session, None)["cached"]["decoded_loss"]
    assert found["decoded_loss_own_code"] == pytest.approx(expected, abs=1e-6)
    assert found["decoded_loss"] == pytest.approx(expected, abs=1e-4)
    assert model.config._attn_implementation == before  # the next task measures the model's own code
    table = shown(found)
    assert table["kernels"] == f"{model.config.num_hidden_layers} x gqa_decode"
    assert float(table["kernel_error"]) == pytest.approx(found["logit_error"], rel=0.1)


def test_kernels_that_are_wrong_are_said_to_be(model, text, session, monkeypatch):
    right = plain_heads.gqa_decode
    monkeypatch.setattr(plain_heads, "gqa_decode", lambda *a, **k: [1.1 * each for each in right(*a, **k)])
    found = KernelsTask(text, DECODED).run(model, session)
    assert "logits differ" in found["refused"] and found["decoded_loss"] is None
    assert shown(found)["kernels"] == found["refused"]


def test_without_a_gpu_and_without_the_interpreter_nothing_is_measured(model, text, session, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    found = KernelsTask(text, DECODED).run(model, session)
    assert "cpu" in found["refused"] and found["operations"] == {} and found["logit_error"] is None


def test_it_is_measured_when_named_only():
    assert "kernels" not in EvalSettings(tasks="all").tasks
    assert EvalSettings(tasks="all,kernels").tasks[-1] == "kernels"


def test_its_identity_is_its_windows_and_what_is_decoded(text):
    assert KernelsTask(text, DECODED).settings() == KernelsTask(text.first(WINDOWS), DECODED).settings()
    assert KernelsTask(text, DECODED).settings() != KernelsTask(text, DECODED + 1).settings()
