"""`surgery verify`: what a conversion wrote is found to be good, and what was changed since is caught and named."""

import json
import shutil

import pytest
import torch
from command_line import ROOT, run_main
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicLayer

import surgery
from surgery.checkpoint.carry_over import REPORT
from surgery.checkpoint.digests import Digest
from surgery.verification.record import Recorded

OLD = ROOT / "tests" / "old_checkpoints"
QUICK = {"calibration": "none", "device": "cpu", "progress": False}
CONVERSIONS = {
    "stock MLA": {"to": "mla", "kv_lora_rank": 12, "rope_dim": 4, "carrier": "stock"},
    "own class": {"to": "lowrank", "rank": 12},
    "fewer heads": {"to": "gqa", "kv_heads": 1, "method": "mean-pool"},
    "codes": {"to": "quantized", "group": 4},
    "a prompt's basis": {"to": "crosslayer", "method": "xkv-prompt", "kv_ratio": 0.5},
}
CHECKS = ["report", "files", "tensors", "class", "pieces", "batches", "KV bytes", "logits"]
WEIGHTS = "model.safetensors"


def verify(folder):
    return surgery.verify(folder, device="cpu", progress=False)


def wrong(folder):
    """What is wrong with a checkpoint, by check; each is in the one line that the command line prints."""
    verified = verify(folder)
    with pytest.raises(surgery.SurgeryError) as caught:
        verified.raise_if_wrong()
    assert all(check.said[:200] in str(caught.value) for check in verified.wrong)
    return {check.name: check.said for check in verified.wrong}


@pytest.fixture(scope="module")
def converted(checkpoints, tmp_path_factory):
    """Gives a conversion by name, made once."""
    made, folder = {}, tmp_path_factory.mktemp("converted")

    def get(name):
        if name not in made:
            made[name] = surgery.convert(checkpoints("llama"), out=folder / name, **CONVERSIONS[name], **QUICK).path
        return made[name]

    return get


@pytest.fixture
def copied(converted, tmp_path):
    """A copy of a conversion, to be changed."""

    def get(name="stock MLA", *, earlier=False):
        folder = shutil.copytree(converted(name), tmp_path / "copy")
        if earlier:
            report = json.loads((folder / REPORT).read_text())
            del report["written"]
            (folder / REPORT).write_text(json.dumps(report))
        return folder

    return get


def flip(folder, place):
    path = folder / WEIGHTS
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def swap(folder, one, other):
    tensors = load_file(folder / WEIGHTS)
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("name", CONVERSIONS)
def test_what_was_written_is_good(converted, name):
    verified = verify(converted(name))
    assert verified.good and verified.report == REPORT
    assert [check.name for check in verified.checks] == CHECKS
    assert {check.name for check in verified.unchecked} == ({"pieces"} if name == "a prompt's basis" else set())


def test_a_slice_is_good(converted, tmp_path):
    assert verify(surgery.slice(converted("own class"), 0.25, out=tmp_path / "out", **QUICK)).good


KINDS = sorted(path.name for path in OLD.iterdir() if path.is_dir())
# The others run code that these run too.
QUICKLY = ("hybrid-lowrank", "mla-int8", "xkv-prompt")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICKLY else pytest.mark.slow) for kind in KINDS]
)
def test_without_a_report_the_rest_is_checked(kind):
    verified = verify(OLD / kind)
    assert verified.good and verified.report is None
    unchecked = {"report", "files", "logits"} | ({"pieces"} if kind == "xkv-prompt" else set())
    assert {check.name for check in verified.unchecked} == unchecked


def test_an_earlier_report_says_what_it_can(copied):
    verified = verify(copied(earlier=True))
    assert verified.good
    assert [check.name for check in verified.unchecked] == ["files", "logits"]
    assert all("older" in check.said for check in verified.unchecked)


def test_a_flipped_byte(copied):
    folder = copied()
    flip(folder, (folder / WEIGHTS).stat().st_size - 3)
    last = list(load_file(folder / WEIGHTS))[-1]
    module = wrong(folder)["files"].removeprefix(f"{WEIGHTS} is not what was written, in ")
    assert last.startswith(module)


def test_a_flipped_byte_of_the_header(copied):
    folder = copied()
    place = (folder / WEIGHTS).read_bytes().index(b'"pt"') + 1
    flip(folder, place)
    assert wrong(folder)["files"] == f"{WEIGHTS} is not what was written, in its header"


@pytest.mark.parametrize("earlier", [False, True])
def test_a_truncated_file(copied, earlier):
    folder = copied(earlier=earlier)
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])
    found = wrong(folder)
    assert f"{WEIGHTS}: truncated" in found["tensors"]
    assert earlier or found["files"] == f"{WEIGHTS} has {len(content) - 100} bytes, written were {len(content)}"


@pytest.mark.parametrize("earlier", [False, True])
def test_an_edited_rank(copied, earlier):
    folder = copied(earlier=earlier)
    edit_config(folder, kv_lora_rank=11)
    found = wrong(folder)
    assert "self_attn.kv_a_proj_with_mqa.weight is (16, 32), DeepseekV3ForCausalLM wants (15, 32)" in found["class"]
    assert earlier or found["files"].startswith("config.json ")


def test_an_edited_frequency(copied):
    folder = copied("own class")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_config(folder, rope_parameters={**rope, "rope_theta": rope["rope_theta"] * 1.01})
    found = wrong(folder)
    assert found["files"].startswith("config.json") and found["logits"].startswith("differ from those of the report")


def test_swapped_tensors(copied):
    folder = copied("fewer heads")
    one, other = (f"model.layers.{layer}.self_attn.k_proj.weight" for layer in (0, 1))
    swap(folder, one, other)
    found = wrong(folder)
    assert "in model.layers.0.self_attn, model.layers.1.self_attn" in found["files"] and "logits" in found
    report = json.loads((folder / REPORT).read_text())
    del report["written"]["files"]
    (folder / REPORT).write_text(json.dumps(report))
    assert set(wrong(folder)) == {"logits"}


def test_a_missing_file_and_a_layer_too_many(copied):
    folder = copied()
    (folder / "tokenizer.json").unlink()
    edit_config(folder, num_hidden_layers=1)
    found = wrong(folder)
    assert "tokenizer.json is missing" in found["files"] and "model.layers.1." in found["class"]


def test_bytes_that_are_not_the_report_s(copied):
    folder = copied()
    report = json.loads((folder / REPORT).read_text())
    report["kv"]["measured_bytes_per_token"] += 8
    (folder / REPORT).write_text(json.dumps(report))
    assert f"{REPORT} says" in wrong(folder)["KV bytes"]


def test_values_that_are_none(copied):
    folder = copied(earlier=True)
    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    assert wrong(folder)["tensors"] == "model.norm.weight holds NaN or infinity"


def test_a_damaged_report(copied):
    folder = copied()
    whole = (folder / REPORT).read_text()
    damages = [
        (("written", "files"), {WEIGHTS: {"bytes": "many", "sha256": 1}}),
        (("written", "files"), {WEIGHTS: {"bytes": 1, "sha256": "", "parts": 3}}),
        (("written", "files"), []),
        (("written", "probe", "tokens"), "abc"),
        (("written", "probe", "logits"), [["a"]]),
        (("written", "probe", "prompt"), 0),
        (("written", "probe", "dtype"), "nn"),
        (("kv", "measured_at_tokens"), 10**9),
        (("kv",), None),
    ]
    for place, value in damages:
        report = inner = json.loads(whole)
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = value
        (folder / REPORT).write_text(json.dumps(report))
        with pytest.raises(surgery.SurgeryError, match="damaged"):
            Recorded.beside(folder)
    assert "damaged" in wrong(folder)["report"]


def test_files_outside_are_not_read(copied):
    folder = copied()
    report = json.loads((folder / REPORT).read_text())
    report["written"]["files"] |= {"../secret.json": {"bytes": 2, "sha256": "0"}}
    (folder / REPORT).write_text(json.dumps(report))
    (folder.parent / "secret.json").write_text("{}")
    assert wrong(folder)["files"] == "../secret.json is missing"


def test_a_cache_that_forgets(converted, monkeypatch):
    """A cache layer that gives tokens after the first piece back changed: pieces differ, whatever the batch."""
    update = DynamicLayer.update

    def forgetful(self, key, value, *args, **kwargs):
        return update(self, key, value * (1.1 if self.get_seq_length() else 1.0), *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    found = wrong(converted("fewer heads"))
    assert {"pieces", "logits"} <= set(found) and "batches" not in found


def test_a_cache_that_mixes_rows(converted, monkeypatch):
    update = DynamicLayer.update

    def mixed(self, key, value, *args, **kwargs):
        return update(self, key, value + 0.1 * value.roll(1, 0) * (len(value) > 1), *args, **kwargs)

    monkeypatch.setattr(DynamicLayer, "update", mixed)
    assert set(wrong(converted("fewer heads"))) == {"batches"}


def test_what_no_class_here_runs(checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints("llama"), tmp_path / "copy")
    edit_config(folder, model_type="nemotron-nas")
    verified = verify(folder)
    assert verified.good and "vLLM" in next(check.said for check in verified.checks if check.name == "class")


def test_the_verb(copied, monkeypatch, capsys):
    folder = copied()
    code, shown, _ = run_main(monkeypatch, capsys, "verify", folder, "--quiet")
    assert code == 0 and "Nothing is wrong with it" in shown
    flip(folder, -1)
    code, shown, told = run_main(monkeypatch, capsys, "verify", folder, "--quiet", "--json")
    said = json.loads(shown)
    assert code == 1 and told.startswith(f"surgery: error: {folder}: ") and len(told.splitlines()) == 1
    assert (said["good"], said["report"], [check["name"] for check in said["checks"]]) == (False, REPORT, CHECKS)


def test_modules_that_differ():
    one, other = Digest(1, "", {"a": "0", "b": "1"}), Digest(1, "", {"a": "0", "c": "1"})
    assert one.differing(other) == ["b", "c"] and one.differing(one) == []
