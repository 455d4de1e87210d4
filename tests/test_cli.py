"""The command line: quick help, one-line errors, pure JSON, and a dry run that writes nothing."""

import json
import re

import pytest
from command_line import launch, listing, run_main
from tiny_models import HELD_OUT
from typer.testing import CliRunner

from surgery.cli import program as cli
from surgery.common.errors import SurgeryError
from surgery.structures.dry_run import plan_conversion
from surgery.structures.mla.settings import ConvertSettings
from surgery.version import __version__

pytestmark = pytest.mark.usefixtures("one_core")

QUICK = [
    "--calibration", str(HELD_OUT), "--calibration-tokens", "256", "--calibration-length", "128", "--held-out", "1",
    "--kv-ratio", "0.5", "--rope-dim", "4",
]  # fmt: skip


PARTS = {"bench": ("kernels", "decode")}
VERBS = [[verb] for verbs in cli.COMMANDS.values() for verb in verbs if verb not in PARTS]
VERBS += [[verb, part] for verb, parts in PARTS.items() for part in parts]


def test_help_is_a_verb_too():
    for verb in ([], ["push"], ["bench", "decode"]):
        output, helped = (CliRunner().invoke(cli.app, args).output for args in (["help", *verb], [*verb, "--help"]))
        assert output == helped and "Usage" in output


def test_version():
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == __version__


# Runs one command line after the other and says of each how it ended and what was loaded by then.
MISTAKES = """
import contextlib, io, json, sys
from surgery.cli.program import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv = ["surgery", *arguments]
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, told.getvalue(), sorted({"torch", "transformers", "matplotlib"} & set(sys.modules))]))
"""


def test_help_answers_without_torch_and_has_an_example_and_no_types(tmp_path):
    verbs = [[], *VERBS]
    process = launch(json.dumps([[*verb, "--help"] for verb in verbs]), code=MISTAKES, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    answers = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("[")]
    assert answers == [[0, "", []]] * len(verbs) and process.stdout.count("Usage") == len(verbs)
    for verb, page in zip(verbs, re.split(r"^\[.*\n", process.stdout, flags=re.MULTILINE), strict=False):
        assert not verb or re.search(rf"Examples?:\s+surgery {' '.join(verb)} ?", page)
        assert not re.search(r"\[x|<\w+", page)


def test_mistakes_at_first_sight_cost_no_torch(tmp_path):
    """A folder that is none, a target that is none, an output that is there: told before what takes seconds to load."""
    source, full, adapter = (tmp_path / name for name in ("source", "full", "adapter"))
    for folder, file in ((source, "config.json"), (full, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    (tmp_path / "list.yaml").write_text("- kv_ratio: 0.5\n")
    (tmp_path / "recipe.yaml").write_text("steps: [{convert: {name: a, source: builtin, kv_ration: 0.5}}]\n")
    (tmp_path / "pattern.safetensors").touch()
    absent = "absent: no such folder"
    cases = {
        ("convert", "absent"): absent,
        ("convert", "source", "--to", "mla2"): "unknown target",
        ("convert", "source", "--out", "full"): "full: exists",
        ("convert", "source", "--out", "source"): "would replace its own source",
        ("convert", "source", "--out", "full", "--dry-run"): "full: exists; choose another --out",
        ("convert", "source", "--kv-ratio", "2"): "--kv-ratio 2.0 must lie between",
        ("convert", "source", "--method", "magic"): "unknown: choose",
        ("convert", "source", "--config", "list.yaml"): "write lines of name: value",
        ("convert", "adapter"): "contains an adapter",
        ("convert", "list.yaml"): "is a file",
        ("inspect", "absent"): absent,
        ("slice", "absent", "--kv-ratio", "0.1"): absent,
        ("slice", "source", "--kv-ratio", "0.1", "--out", "full"): "full: exists",
        ("heal", "absent"): absent,
        ("heal", "source", "--teacher", "absent"): absent,
        ("heal", "source", "--out", "full"): "full: exists",
        ("heads", "absent"): absent,
        ("heads", "source", "--out", "pattern.safetensors"): "pattern.safetensors: exists",
        ("eval", "a=absent"): absent,
        ("eval", "source", "--baseline", "absent"): absent,
        ("eval", "source", "--tasks", "los"): "did you mean loss",
        ("plan", "absent", "--kv-ratio", "0.2"): absent,
        ("verify", "absent"): absent,
        ("doctor", "absent"): absent,
        ("export", "absent", "--engine", "llama.cpp"): absent,
        ("run", "recipe.yaml"): "did you mean kv_ratio?",
        ("bench", "decode", "absent"): "absent: not a folder or a known shape; choose from llama3-8b",
        ("bench", "decode", "full", "--kernels", "mine"): "--kernels mine: choose both",
    }
    process = launch(json.dumps(list(cases)), code=MISTAKES, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    for (arguments, message), line in zip(cases.items(), process.stdout.splitlines(), strict=True):
        code, text, loaded = json.loads(line)
        assert code == 1 and text.startswith("surgery: error: ") and text.count("\n") == 1, (arguments, text)
        assert message in text and loaded == [], (arguments, text, loaded)


def test_a_dry_run_writes_nothing_and_knows_the_result(checkpoints, tmp_path, monkeypatch, capsys):
    source, before = checkpoints("llama"), listing(checkpoints("llama"))
    monkeypatch.chdir(tmp_path)
    arguments = ["convert", source, "--out", tmp_path / "out", *QUICK]
    code, output, _ = run_main(monkeypatch, capsys, *arguments, "--dry-run")
    assert code == 0
    assert "nothing is written" in " ".join(output.split())
    code, printed, _ = run_main(monkeypatch, capsys, *arguments, "--dry-run", "--json")
    plan = json.loads(printed)
    assert listing(tmp_path) == [] and listing(source) == before

    code, printed, _ = run_main(monkeypatch, capsys, *arguments, "--json")
    report = json.loads(printed)  # pure: everything else went to standard error
    assert code == 0
    assert report["path"] == str(tmp_path / "out")
    assert plan["kv"]["bytes_per_token"] == report["kv"]["measured_bytes_per_token"]
    assert plan["kv"]["source_bytes_per_token"] == report["kv"]["source_bytes_per_token"]
    assert plan["target"]["model_type"] == report["target"]["model_type"]
    names = sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert plan["disk"]["output_bytes"] == pytest.approx(names, rel=0.2)

    again, _, err = run_main(monkeypatch, capsys, *arguments, "--dry-run")
    assert again == 1 and "exists" in err
    cheaper = ["--calibration", "none", "--dry-run", "--overwrite"]
    assert run_main(monkeypatch, capsys, *arguments, *cheaper)[0] == 0


def test_a_plan_finds_what_a_conversion_would_refuse(checkpoints, tmp_path):
    settings = ConvertSettings(calibration="none", kv_ratio=0.5, carrier="stock")
    with pytest.raises(SurgeryError, match="q/k-norm"):
        plan_conversion(checkpoints("qwen3"), tmp_path / "out", settings)
    settings = ConvertSettings(calibration="nowhere.txt")
    with pytest.raises(SurgeryError, match=r"nowhere\.txt"):
        plan_conversion(checkpoints("llama"), tmp_path / "out", settings)
    with pytest.raises(SurgeryError, match="is not a size"):
        ConvertSettings(calibration="none", max_shard_size="5 parrots")
    assert listing(tmp_path) == []


def test_a_conversion_is_shown_with_its_reasons(checkpoints, tmp_path, monkeypatch, capsys):
    arguments = ["convert", checkpoints("qwen3"), "--out", tmp_path / "out", "--calibration", "none"]
    code, output, err = run_main(monkeypatch, capsys, *arguments, "--kv-ratio", "0.5")
    assert code == 0
    assert "512 B" in output and "256 B, 50.0%" in output
    assert "q/k-norm" in output and "refused: does not support the custom model class" in output
    assert "not measured" in output
    assert str(tmp_path / "out") in output
    assert "\x1b" not in output and "convert" in err  # plain on a pipe, progress next to it
