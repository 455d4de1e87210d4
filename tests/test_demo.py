"""The demo, and the process that measures for it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import run_main
from measures import mean_loss, recall_accuracy
from processes import Fork
from tiny_models import add_tokenizer
from transformers import AutoModelForCausalLM

from surgery.checkpoint.named_models import demo_model
from surgery.common import interruption
from surgery.common.errors import SurgeryError
from surgery.console.demo import show_demo
from surgery.demo import run as demo
from surgery.eval.kv_cache import measure_kv
from surgery.eval.recall import RecallSet
from surgery.healing import heal
from surgery.running.loading import load_tokenizer
from surgery.structures import converter, made_already


@pytest.fixture
def one_core(one_core, monkeypatch):
    """Use one core, in the process that measures too."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def forked_script(command: list[str], env: dict[str, str], **_) -> subprocess.CompletedProcess:
    """Run a script in a process that has imported transformers already, in place of `subprocess.run`."""
    run_script = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    fork = Fork(*command[2:], code=run_script, environment=env)
    return subprocess.CompletedProcess(command, fork.wait(), fork.stdout, fork.stderr)


def test_the_measuring_process_agrees_with_surgery_eval(one_core, monkeypatch):
    monkeypatch.setattr(demo.subprocess, "run", forked_script)
    output = replace(demo.DEMO_MODELS["builtin"], windows=2, prompts=2, length=256)
    prompt, (measured,) = demo.measure_with_stock_transformers([demo_model()], output)

    tokens = demo.held_out_tokens(load_tokenizer(demo_model()), output)
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    assert measured.model_class == "LlamaForCausalLM"
    assert measured.loss == pytest.approx(mean_loss(model, tokens["windows"]), abs=1e-5)
    assert measured.recall == recall_accuracy(model, RecallSet(tokens["prompts"], tokens["answers"]))
    assert measured.kv_bytes_per_token == 3072 == measure_kv(model, 65).growth_per_token / 2  # fp32 here
    start = int(tokens["answers"][0].nonzero()[0])
    files = model(tokens["prompts"][:1, :start]).logits[0, -1].argmax()
    assert measured.completion.startswith(load_tokenizer(demo_model()).decode(files))
    planted, _, request = prompt.splitlines()
    assert planted.startswith("# The secret key of ") and request.removeprefix("# Recall: the ") in planted


def test_the_measuring_process_cannot_import_this_package():
    # The script's own first lines, and then what a converted checkpoint's remote code or a plug-in might try.
    script = Path(demo.__file__).with_name("measure.py").read_text(encoding="utf-8")
    head = script[: script.index("import torch")]
    process = subprocess.run([sys.executable, "-I", "-c", head + "import surgery"], capture_output=True, text=True)
    assert process.returncode == 1 and "ModuleNotFoundError" in process.stderr
    assert "surgery" not in script[script.index("import torch") :]


def test_a_failure_of_the_measuring_process_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(demo.subprocess, "run", forked_script)
    (tmp_path / "config.json").write_text("{}")
    add_tokenizer(tmp_path)
    output = replace(demo.DEMO_MODELS["builtin"], windows=1, prompts=1, length=256)
    with pytest.raises(SurgeryError, match="stock transformers could not run the models") as caught:
        demo.measure_with_stock_transformers([tmp_path], output)
    assert "\n" not in str(caught.value)


def test_an_interrupted_demo_resumes_from_its_conversion(tmp_path, monkeypatch, capsys):
    out, conversions = tmp_path / "out", []

    def convert(request, progress):
        conversions.append(request)
        request.out.mkdir()
        (request.out / "config.json").write_text("{}")

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(interruption, "_unfinished", [])
    monkeypatch.setattr(converter, "convert", convert)
    monkeypatch.setattr(heal, "heal_checkpoint", lambda request, _: request.out.mkdir())
    monkeypatch.setattr(heal, "is_already_healed", lambda request: request.out.is_dir())
    monkeypatch.setattr(made_already, "is_conversion_of", lambda path, *_: path.is_dir())
    monkeypatch.setattr(demo, "measure_with_stock_transformers", interrupt)
    for _ in range(2):
        code, _, err = run_main(monkeypatch, capsys, "demo", "--out", out)
        assert code == 130 and f"{out} keeps the finished work" in err.splitlines()[-1]
    assert len(conversions) == 2 and f"{out}: exists already, skipped" in err


@pytest.mark.slow
def test_the_whole_demo(tmp_path, capsys):
    outcome = demo.run_demo(tmp_path / "out", as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["path"] == str(tmp_path / "out")
    assert outcome.source.kv_bytes_per_token == 3072
    assert 760 <= outcome.converted.kv_bytes_per_token <= 768
    assert outcome.converted.model_class == "SurgeryForCausalLM"
    assert outcome.converted.loss - outcome.source.loss < 0.02
    assert outcome.healed.model_class == outcome.stock.model_class == "DeepseekV3ForCausalLM"
    assert outcome.healed.loss < outcome.stock.loss - 0.005 and outcome.healed.recall > outcome.stock.recall
    assert printed["converted"]["completion"] == outcome.converted.completion


def test_the_demo_ends_in_commands_that_run_as_they_stand(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    measured = demo.Measured("C", 2.0, 9.0, 1.0, 1.0, "text")
    show_demo(demo.Demo(tmp_path / "surgery-demo", "builtin", "demo-model", "prompt", *[measured] * 4, 1.0))
    output = capsys.readouterr().out
    assert "surgery-demo: 100.0% of the KV bytes for +0.0000 nats per token" in output
    assert "Next: surgery eval surgery-demo --baseline builtin  " in output
    assert "--to crosslayer --kv-ratio 0.0625 builtin" in output
