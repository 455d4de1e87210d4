"""The functions of the package: paths, models in memory, results, refusals; and the examples of docs/python.md."""

import re
import shutil
from importlib.util import find_spec

import pytest
import torch
from command_line import ROOT
from conversions import convert_checkpoint
from healing import trained_here
from tiny_models import CONFIGS, DEMO, HELD_OUT, SHORT_TEXT, random_model
from transformers import AutoTokenizer

import surgery
from surgery.structures.kv_heads.settings import KVHeadsSettings

pytestmark = pytest.mark.usefixtures("short_decoding", "no_pictures")

FUNCTIONS = ("convert", "evaluate", "heal", "inspect", "score_heads", "slice")
MERGED = {"kv_heads": 1, "method": "mean-pool", "calibration": "none", "device": "cpu", "progress": False}
SMALL = {"tasks": "loss", "windows": 2, "length": 32, "decoded": 0, "variants": "none", "device": "cpu"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, and one for temporary files."""
    temporary, folder = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir(), folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def in_memory():
    """A model that was never on the disk, and its tokenizer."""
    return random_model(CONFIGS["llama"]()).eval(), AutoTokenizer.from_pretrained(DEMO)


def test_the_functions_are_the_package_s_and_no_module_is_called_as_they_are():
    assert set(FUNCTIONS) <= set(surgery.__all__) <= set(dir(surgery))
    for name in FUNCTIONS:
        assert callable(getattr(surgery, name)) and getattr(surgery, name).__name__ == name
        assert find_spec(f"surgery.{name}") is None, name
        for part in ("Args:", "Raises:", "Example:"):
            assert part in getattr(surgery, name).__doc__, (name, part)


def test_a_conversion_is_the_command_line_s(checkpoints, here):
    source = checkpoints("llama")
    result = surgery.convert(source, to="gqa", out=here / "out", **MERGED)
    settings = KVHeadsSettings(kv_heads=1, method="mean-pool", calibration="none", device="cpu")
    same = convert_checkpoint(source, here / "same", settings)
    assert (here / "out" / "model.safetensors").read_bytes() == (same.path / "model.safetensors").read_bytes()
    assert result.path == here / "out" and result.report["settings"] == same.report.settings
    assert (result.kv_bytes_before, result.kv_bytes_after, result.kv_ratio) == (256, 128, 0.5)
    assert result.loss_before is None and result.source == str(source)


def test_a_model_in_memory_becomes_another_and_nothing_is_written(in_memory, here):
    model, tokenizer = in_memory
    settings = {"to": "lowrank", "rank": 24, "device": "cpu", "progress": False, **SHORT_TEXT}
    result = surgery.convert(model, tokenizer=tokenizer, **settings)
    saved = here.parent / "saved"
    model.save_pretrained(saved), tokenizer.save_pretrained(saved)
    same = surgery.convert(saved, **settings)
    assert (result.loss_before, result.loss_after) == (same.loss_before, same.loss_after) != (None, None)
    assert result.report["source"]["sha256"] == same.report["source"]["sha256"]
    ids = torch.arange(12)[None]
    assert torch.equal(result.model(ids).logits, same.model(ids).logits) and result.model is result.model
    assert type(result.model).__name__ == "SurgeryForCausalLM" and result.source is None
    assert result.tokenizer("def").input_ids == tokenizer("def").input_ids
    assert list(here.iterdir()) == [] and result.path.is_dir()
    temporary = result.path.parent
    entries = result.save(here / "kept")
    assert entries == here / "kept" and (entries / "model.safetensors").is_file()
    with pytest.raises(surgery.SurgeryError, match="exists"):
        result.save(here / "kept")
    del result, same
    assert not temporary.exists() and not list(temporary.parent.iterdir())


def test_results_go_on_as_models(checkpoints, here):
    weights_alone = {"calibration": "none", "device": "cpu", "progress": False}
    whole = surgery.convert(checkpoints("llama"), to="lowrank", rank=24, **weights_alone)
    smaller = surgery.slice(whole, 0.5, **weights_alone)
    assert smaller.kv_bytes_after <= 0.5 * 256 < whole.kv_bytes_after and smaller.source is whole
    hybrid = surgery.convert(smaller, to="hybrid", streaming=1.0, sinks=2, recent=6, **weights_alone)
    assert hybrid.kv_bytes_after < smaller.kv_bytes_after
    assert list(here.iterdir()) == []


def test_models_in_memory_are_inspected(in_memory, here):
    assert surgery.inspect(in_memory[0]).kv["bytes_per_token"] == 256 and list(here.iterdir()) == []


def test_evaluations_have_rows_a_text_and_plots(in_memory, checkpoints, here):
    model, tokenizer = in_memory
    merged = surgery.convert(checkpoints("llama"), to="mqa", **{**MERGED, "kv_heads": None})
    result = surgery.evaluate({"merged": merged}, model, tokenizer=tokenizer, progress=False, **SMALL)
    assert [(row.name, row.role) for row in result.rows] == [("model", "baseline"), ("merged", "checkpoint")]
    assert result["merged"].kv_ratio == 0.5 and result["merged"].loss > 0 and result["merged"].recall is None
    assert result.folder is None and list(here.iterdir()) == []
    assert "- merged: 50.0% of the KV bytes" in result.text == result._repr_markdown_()
    assert "<svg" in result.plot() and result.plot("needle") is None
    with pytest.raises(surgery.SurgeryError, match="did you mean needle"):
        result.plot("needles")
    again = surgery.evaluate([merged], out=here / "report", progress=False, **SMALL)
    assert (again.folder / "report.md").read_text() == again.text


def test_scored_heads_make_a_hybrid(checkpoints, here):
    source, records = checkpoints("llama"), {"sinks": 4, "recent": 16}
    scored = surgery.score_heads(source, "induction", **records, length=64, samples=2, device="cpu", progress=False)
    assert scored.scores.shape == (2, 2) and "<svg" in scored._repr_svg_() and scored.settings["sinks"] == 4
    hybrid = surgery.convert(source, to="hybrid", heads=scored, streaming=0.5, calibration="none", device="cpu",
                             progress=False)  # fmt: skip
    assert hybrid.report["target"]["pattern"]["sha256"] == scored.pattern.sha256
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: surgery.convert("builtin", to="gqq"), "unknown target"),
        (lambda: surgery.convert("builtin", kv_ration=0.5), "unknown setting 'kv_ration'; did you mean kv_ratio?"),
        (lambda: surgery.convert("builtin", kv_ratio="half"), "kv_ratio must be a number, not 'half'"),
        (lambda: surgery.convert("nowhere"), "nowhere: no such folder"),
        (lambda: surgery.convert(3), "unsupported model type int"),
        (lambda: surgery.convert("builtin", config="mla-everywher"), "did you mean mla-everywhere?"),
        (lambda: surgery.slice("builtin", 2.0), "kv_ratio 2.0 must lie between 0 and 1"),
        (lambda: surgery.evaluate("builtin", task="loss"), "evaluate: unknown setting 'task'; did you mean tasks?"),
        (lambda: surgery.heal("builtin", max_token=3), "heal: unknown setting 'max_token'; did you mean max_tokens?"),
        (lambda: surgery.heal("builtin", launcher="fsdp3"), "did you mean fsdp2?"),
        (lambda: surgery.score_heads("builtin", "induktion"), "method 'induktion' is unknown"),
    ],
)
def test_mistakes_are_one_line(call, message, here):
    with pytest.raises(surgery.SurgeryError) as caught:
        call()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(here.iterdir()) == [] and not list((here.parent / "temporary").iterdir())


def test_a_model_in_memory_has_no_text_without_its_tokenizer(in_memory, here):
    with pytest.raises(surgery.SurgeryError, match="pass tokenizer="):
        surgery.convert(in_memory[0], to="gqa")
    assert not list((here.parent / "temporary").iterdir())


def test_an_output_that_is_there_is_kept(checkpoints, here):
    (here / "out").mkdir()
    (here / "out" / "mine.txt").write_text("mine")
    with pytest.raises(surgery.SurgeryError, match="out: exists"):
        surgery.convert(checkpoints("llama"), to="gqa", out="out", **MERGED)


def test_a_healing_takes_the_source_of_what_it_is_given(in_memory, here, monkeypatch):
    monkeypatch.setattr("surgery.healing.heal.run_interruptible", trained_here)
    model, tokenizer = in_memory
    settings = {"length": 32, "batch_size": 2, "gradient_accumulation": 1, "held_out": 2, "max_steps": 2, "recall": 0.0}
    settings |= {"data": [str(HELD_OUT)], "learning_rate": 1e-2, "device": "cpu", "max_tokens": None}
    measure = {"windows": 2, "length": 32, "recall_prompts": 1, "data": [str(HELD_OUT)]}
    model.save_pretrained(here / "source"), tokenizer.save_pretrained(here / "source")
    merged = surgery.convert("source", to="gqa", **MERGED)
    healed = surgery.heal(merged, measure=measure, progress=False, **settings)
    assert healed.report["steps"] == 2 and healed.source is merged
    assert None not in (healed.loss_source, healed.loss_before, healed.loss_after)
    assert type(healed.model).__name__ == "LlamaForCausalLM"
    assert [path.name for path in here.iterdir()] == ["source"]
    shutil.rmtree(here / "source")
    with pytest.raises(surgery.SurgeryError, match="source: no such folder"):
        surgery.heal(merged, measure=False, progress=False, **settings)


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("builtin", ["a tiny model", pytest.param("the demo model", marks=pytest.mark.slow)])
def test_the_examples_of_the_page_run(here, checkpoints, monkeypatch, builtin):
    """One after the other, as a reader would, in one notebook."""
    assert len(BLOCKS) >= 5
    if builtin == "a tiny model":
        monkeypatch.setattr("surgery.checkpoint.named_models.demo_model", lambda: checkpoints("llama"))
    names = {}
    for block in BLOCKS:
        if builtin == "a tiny model":
            block = block.replace('tokens": 1024', 'tokens": 256').replace('length": 256', 'length": 64')
            block = block.replace("length=128, recall_prompts=4", "length=96, recall_prompts=1")
        exec(compile(block, "docs/python.md", "exec"), names)
    assert {path.name for path in here.iterdir()} == {"smaller", "quality.svg"}
