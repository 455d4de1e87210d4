"""Files that a result takes over from its source: those of a checkpoint, as they were at the beginning, and no code."""

import json
import shutil

import pytest
from command_line import run_main
from conversions import convert_checkpoint
from hostile import cases
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_checkpoint

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.file_kinds import Kind, kind_of, list_files, summary
from surgery.structures import converter
from surgery.structures.kv_heads.settings import KVHeadsSettings

NONE = KVHeadsSettings(kv_heads=1, calibration="none", device="cpu")
CARRIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE")
CARRIED += ("chat_template.json", "additional_chat_templates/tools.jinja", "spiece.model", "merges.txt", "vocab.json")
CARRIED += ("special_tokens_map.json", "NOTICE.txt", "USE_POLICY.md", "preprocessor_config.json", "tekken.json")
CARRIED += ("LICENCE",)
CODE = ("modeling_x.py", "CODE.Py", "custom_generate/generate.py", "custom_generate/requirements.txt", "x.so", "run.sh")
STRAYS = ("trainer_state.json", "latest", "params.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "env")
STRAYS += ("rng_state_0.pth", "events.out.tfevents.1.host.2.0", "wandb/debug.log", "global_step10/mp_rank_00.pt")
STRAYS += ("original/params.json", "original/tokenizer.model", "notes.md", "id_rsa", "quantize_config.json", "run.log")
STRAYS += ("pytorch_model.bin", "model.gguf", "tokenizer.bin")
STRAYS += ("sub/tokenizer.json", "tokenizer.json.bak", "LICENSE.key")
HIDDEN = (".env", ".git/config", ".cache/x.json", ".gitattributes")
CODE_NAMED = {"auto_map": {"AutoTokenizer": ["x.Slow", "x.Fast"]}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("carried") / "source", "llama")


@pytest.fixture
def copy(source, tmp_path):
    """A source with files of every kind, code and links among them."""
    folder = shutil.copytree(source, tmp_path / "source")
    for name in (*CARRIED, *CODE, *STRAYS, *HIDDEN):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            (folder / name).write_text("{}")
    (folder / "zero_to_fp32.py").write_text("")
    (folder / "link").symlink_to("/etc/hostname")
    (folder / "linked").symlink_to("/etc")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | CODE_NAMED))
    # Files that transformers would read.
    for name in ("preprocessor_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "spiece.model"):
        (folder / name).unlink()
    return folder


def test_kinds_of_names():
    assert {kind_of(name) for name in CARRIED} == {Kind.TEMPLATE, Kind.LOADED, Kind.DOCUMENT}
    assert {kind_of(name) for name in CODE} == {Kind.CODE}
    assert {kind_of(name) for name in STRAYS} == {Kind.WEIGHTS, Kind.OTHER}


def test_a_result_carries_no_code_and_no_leftovers(copy, tmp_path):
    """Code next to the weights runs with `trust_remote_code`; files of trainings are of no use to it."""
    conversion = convert_checkpoint(copy, tmp_path / "out", NONE)
    there = {*list_files(tmp_path / "out", hidden=True)}
    expected = {*CARRIED, "README.md", "README.source.md", "config.json", "model.safetensors", "surgery_report.json"}
    assert there <= expected and {*CARRIED} - there == {
        *("preprocessor_config.json", "special_tokens_map.json", "vocab.json", "merges.txt", "spiece.model")
    }
    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text())
    record = conversion.report.source_files
    assert record["code"] == [] and "chat_template.jinja" in record["templates"]
    assert {*CODE, "zero_to_fp32.py", "link", "linked/", "tokenizer_config.json: auto_map", *STRAYS} == {
        *record["left_out"]
    }


def test_code_is_carried_when_asked(copy, tmp_path, monkeypatch, capsys):
    arguments = ["--to", "gqa", "--kv-heads", "1", "--calibration", "none", "--out", tmp_path / "out", "--keep-code"]
    code, _, err = run_main(monkeypatch, capsys, "convert", copy, *arguments)
    assert code == 0, err
    there = list_files(tmp_path / "out")
    assert {*CODE} <= {*there} and not {*STRAYS} & {*there}
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["auto_map"] == CODE_NAMED["auto_map"]
    assert "`modeling_x.py`" in (tmp_path / "out" / "README.md").read_text()
    report = json.loads((tmp_path / "out" / "surgery_report.json").read_text())
    assert {*report["source_files"]["code"]} == {*CODE, "zero_to_fp32.py"} and {*CODE} <= report["files"].keys()


def test_what_changes_after_the_beginning_is_not_carried(copy, tmp_path, monkeypatch):
    before = {name: (copy / name).read_bytes() for name in list_files(copy) if kind_of(name) is not Kind.OTHER}
    copy_tensors = converter.copy_tensors

    def changed(*arguments):
        for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "README.md"):
            (copy / name).write_text("other")
        (copy / "added_tokens.json").write_text("{}")
        (copy / "chat_template.json").unlink()
        return copy_tensors(*arguments)

    monkeypatch.setattr(converter, "copy_tensors", changed)
    out = convert_checkpoint(copy, tmp_path / "out", NONE).path
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "chat_template.json"):
        assert (out / name).read_bytes() == before[name]
    assert (out / "README.source.md").read_bytes() == before["README.md"]
    assert not (out / "added_tokens.json").exists()


def test_documents_that_are_links_are_left_out(copy):
    (copy / "LICENSE").unlink()
    (copy / "LICENSE").symlink_to(copy.parent / "id_rsa")
    (copy.parent / "id_rsa").write_text("secret")
    carried = CarriedFiles.of(CheckpointReader.open(copy))
    assert (
        "LICENSE" not in carried.names and "LICENSE" in carried.left_out and not (carried.folder / "LICENSE").exists()
    )


@given(st.lists(st.sampled_from((*CARRIED, *CODE, *STRAYS, *HIDDEN)), unique=True), st.booleans())
@cases(25)
def test_nothing_else_is_carried(source, tmp_path_factory, names, keep_code):
    folder = shutil.copytree(source, tmp_path_factory.mktemp("random") / "source")
    original = {name for name in list_files(folder) if kind_of(name) is Kind.LOADED}
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    carried = CarriedFiles.of(CheckpointReader.open(folder), keep_code=keep_code)
    settings = {*CARRIED, *(CODE if keep_code else ())} & {*names}
    assert {*carried.names} == original | settings
    assert {*list_files(carried.folder, hidden=True)} == {*carried.names, "config.json"}
    assert {*names} - {*carried.names, *HIDDEN} == {*carried.left_out}


@pytest.mark.parametrize("name", ["LICENSE\n.txt", "tokenizer\x1b[2J.model"])
def test_names_that_a_report_cannot_hold_are_left_out(name, copy, tmp_path):
    (copy / name).write_text("x")
    left_out = CarriedFiles.of(CheckpointReader.open(copy)).record([])["left_out"]
    assert name not in list_files(CarriedFiles.of(CheckpointReader.open(copy)).folder)
    assert name in left_out
    json.dumps(left_out, ensure_ascii=False).encode()


def test_long_lists_are_told_by_folder():
    names = [*(f"wandb/{number}" for number in range(9)), "a/b", "notes.txt", ".git/x"]
    assert summary(names) == [".git/ (1 files)", "a/b", "notes.txt", "wandb/ (9 files)"]
