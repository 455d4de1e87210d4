"""Options and files of defaults that are made of the classes of settings: flags, aliases, notes and panels."""

import re

import pytest
import typer
import yaml
from command_line import ROOT, run_main

from surgery.cli import program as cli
from surgery.cli.shipped import config_page
from surgery.common.errors import SurgeryError
from surgery.common.setting import settings_of
from surgery.common.shipped import shipped
from surgery.evaluation.settings import EvalSettings
from surgery.heads.settings import HeadSettings
from surgery.planning.settings import PlanSettings
from surgery.structures.hybrid.settings import HybridSettings
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.registry import SLICE, TARGETS
from surgery.training.settings import HealSettings

CLASSES = {name: target.settings_class for name, target in TARGETS.items()}
CLASSES |= {"slice": SLICE.settings_class, "heads": HeadSettings, "heal": HealSettings, "eval": EvalSettings}
CLASSES["plan"] = PlanSettings

FLAGS = {
    "convert": "allocate batch-size bits calibration calibration-length calibration-tokens carrier "
    "config context device dry-run dtype engine freqfold group-size heads "
    "held-out json keep-statistics kv-heads kv-lora-rank kv-ratio "
    "max-shard-size method out overwrite qk-rope-head-dim rank recall recent rope-dim "
    "rope-frequencies seed sinks streaming text-field to window",
    "slice": "allocate batch-size device dtype json kv-ratio max-shard-size out overwrite",
    "heads": "config device dtype facts json learning-rate length method out overwrite "
    "recent samples seed seeds sinks steps target text text-field",
    "heal": "batch-size config data device dry-run dtype json launcher learning-rate length max-time "
    "max-tokens measure no-measure out overwrite processes recipe seed teacher train wandb wandb-mode",
    "eval": "baseline batch-size batches config contexts data device domain dtype json length limit "
    "lm-eval-include needle-lengths num-fewshot out overwrite prompt seed tasks text-field "
    "trust-remote-code variants wandb wandb-mode windows",
    "inspect": "json",
}
"""Options of commands before they were made from the settings."""

MORE_FLAGS = {
    "convert": "text data window heal",
    "heads": "calibration data window",
    "heal": "text calibration wandb max-seconds max-steps",
    "eval": "text calibration decoded",
}


def options_of(verb):
    command = typer.main.get_command(cli.app)
    for part in verb.split():
        command = command.commands[part]
    return {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("verb", FLAGS)
def test_every_flag_that_was_is(verb):
    reference = options_of(verb)
    expected = {f"--{flag}" for flag in f"{FLAGS[verb]} {MORE_FLAGS.get(verb, '')}".split()}
    assert expected <= set(reference)


@pytest.mark.parametrize("verb", FLAGS)
def test_every_option_says_what_it_is(verb):
    assert all(each.hidden or each.help for name, each in options_of(verb).items() if name.startswith("--"))


def test_all_settings_have_help_and_no_second_name_for_another():
    for name, cls in CLASSES.items():
        settings = settings_of(cls)
        assert all(each.info.help.endswith(".") and each.info.section for each in settings.values()), name
        flags = [each.flag for each in settings.values()]
        assert len(set(flags)) == len(flags), name


@pytest.mark.parametrize("name", [each.name for each in shipped("configs")])
def test_shipped_files_are_what_the_verb_prints(name, monkeypatch, capsys):
    code, printed, _ = run_main(monkeypatch, capsys, "config", name)
    assert code == 0 and printed == (ROOT / "configs" / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", CLASSES)
def test_a_printed_file_holds_every_setting_at_its_default(name):
    read, settings = yaml.safe_load(config_page(name)), settings_of(CLASSES[name])
    assert list(read) == sorted(read, key=list(read).index) and set(read) == set(settings)
    needed = {"kv_ratio": 0.5} if name in ("slice", "plan") else {}
    cls = CLASSES[name]
    assert cls.from_mapping({**read, **needed}, name) == cls(**needed)


def asked_of(monkeypatch, capsys, *arguments):
    """Settings that a `surgery convert` comes to, and what it says before that."""
    records = {}

    def stop(self, source, out, settings, **options):
        records["settings"] = settings
        raise SurgeryError("seen enough")

    monkeypatch.setattr("surgery.structures.registry.Target.check_paths", stop)
    code, out, err = run_main(monkeypatch, capsys, "convert", "builtin", *arguments)
    assert code == 1 and not out
    return records.get("settings"), err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "mla", "--rank", "8"], "--rank is for lowrank; --to mla has no such setting"),
        (["--window", "8"], "--window is for lowrank, hybrid; --to mla has no such setting"),
        (["--to", "mqa", "--text", "x", "--group-size", "8"], "--group-size is for crosslayer; --to mqa has no such"),
        (["--kv-ratio", "25%"], "--kv-ratio must be a number, not '25%'"),
        (["--kv-ratio", "25"], "--kv-ratio 25.0 must lie between"),
        (["--rope-dim", "some"], "--rope-dim must be a whole number or auto"),
        (["--rope-dim", "3"], "must be even"),
        (["--max-shard-size", "3x"], "--max-shard-size '3x' is not a size"),
        (["--seed", "2.5"], "--seed must be a whole number, not '2.5'"),
        (
            ["--to", "hybrid", "--window", "4", "--recent", "4"],
            "--window and --recent are the same option: pass only one",
        ),
        (["--dtype", "fp8"], "dtype 'fp8' is unknown: choose float32, bfloat16, float64"),
    ],
)
def test_a_wrong_flag_says_whose_it_is(arguments, message, monkeypatch, capsys):
    settings, err = asked_of(monkeypatch, capsys, *arguments)
    assert settings is None and err.splitlines()[-1].startswith("surgery: error: ") and message in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("window: 3", "window is for lowrank, hybrid; mla has no such setting"),
        ("kv_ratio: 25", "kv_ratio 25.0 must lie between"),
        ("max_shard_size: 3x", "max_shard_size '3x' is not a size"),
    ],
)
def test_a_wrong_setting_of_a_file_is_told_by_its_name_there(line, message, tmp_path, monkeypatch, capsys):
    (tmp_path / "own.yaml").write_text(f"{line}\n")
    settings, err = asked_of(monkeypatch, capsys, "--config", tmp_path / "own.yaml")
    assert settings is None and err.count("\n") == 1
    assert message in err and "--" not in err


def test_values_are_of_the_settings_kinds(monkeypatch, capsys):
    arguments = ["--to", "lowrank", "--rank", "1e2", "--dtype", "bf16"]
    settings, err = asked_of(monkeypatch, capsys, *arguments)
    assert (settings.rank, settings.dtype) == (100, "bfloat16")
    assert err == "surgery: error: seen enough\n"
    assert asked_of(monkeypatch, capsys, "--rope-dim", "auto")[0].rope_dim is None
    assert asked_of(monkeypatch, capsys, "--qk-rope-head-dim", "8")[0].rope_dim == 8
    assert asked_of(monkeypatch, capsys, "--to", "mqa")[0].kv_heads == 1


def test_flags_win_over_the_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.yaml").write_text("batch_size: 4\nseed: 3\n")
    arguments = ["--config", tmp_path / "own.yaml", "--batch-size", "8"]
    settings, _ = asked_of(monkeypatch, capsys, *arguments)
    assert (settings.batch_size, settings.seed) == (8, 3)


@pytest.mark.parametrize(
    ("arguments", "name", "value", "note"),
    [
        (["--to", "hybrid", "--recent", "7"], "recent", 7, "surgery: note: --recent is --window now\n"),
        (["--to", "hybrid", "--window", "7"], "recent", 7, ""),
        (["--to", "gqa", "--text", "t.txt"], "calibration", "t.txt", "surgery: note: --text is --calibration now\n"),
        (["--data", "t.txt"], "calibration", "t.txt", "surgery: note: --data is --calibration now\n"),
    ],
)
def test_other_spellings_work_with_a_note(arguments, name, value, note, monkeypatch, capsys):
    settings, err = asked_of(monkeypatch, capsys, *arguments)
    assert getattr(settings, name) == value and err == f"{note}surgery: error: seen enough\n"


def test_other_spellings_of_heads_eval_and_heal(tmp_path, monkeypatch, capsys):
    calls = []

    def stop(*arguments, **options):
        calls[:] = arguments
        raise SurgeryError("seen enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("surgery.heads.scoring.score_heads", stop)
    arguments = ["--recent", "5", "--data", "t", "--dtype", "fp32"]
    err = run_main(monkeypatch, capsys, "heads", "builtin", *arguments)[2]
    request = calls[2]
    assert (request.recent, request.text, request.dtype) == (5, "t", "float32")
    assert "--recent is --window now" in err and "--data is --text now" in err

    monkeypatch.setattr("surgery.evaluation.run.evaluate", stop)
    arguments = ["--text", "a", "--text", "b,c", "--dtype", "bf16", "--tasks", "loss,recall", "--prompt", "x, y"]
    err = run_main(monkeypatch, capsys, "eval", "builtin", *arguments)[2]
    settings = calls[0].settings
    assert (settings.data, settings.dtype, settings.prompts) == (("a", "b,c"), "bfloat16", ("x, y",))
    assert "--text is --data now" in err

    monkeypatch.setattr("surgery.healing.heal.heal_checkpoint", stop)
    arguments = ["--wandb", "mine", "--text", "a", "--dtype", "bfloat16", "--max-seconds", "5", "--teacher", "builtin"]
    err = run_main(monkeypatch, capsys, "heal", "builtin", *arguments)[2]
    settings = HealSettings(**calls[0].overrides)
    assert (settings.wandb, settings.data) == ("mine", ("a",))
    assert (settings.dtype, settings.max_seconds) == ("bf16", 5.0)
    assert "--text is --data now" in err and "--max-seconds is --max-time now" in err
    code, _, err = run_main(monkeypatch, capsys, "heal", "builtin", "--train", "lorra")
    assert code == 1 and "did you mean lora?" in err


def test_files_take_flags_names_and_short_dtypes(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("window: 9\ndtype: bf16\n")
    assert (HeadSettings.from_file(path).recent, HeadSettings.from_file(path).dtype) == (9, "bfloat16")
    assert HybridSettings.from_file(path).recent == 9
    path.write_text("rope_dim: auto\ndtype: fp32\n")
    assert ConvertSettings.from_file(path) == ConvertSettings()
    path.write_text("max_time: 1e3\ndtype: float32\n")
    assert HealSettings.from_file(path).max_seconds == 1000 and HealSettings.from_file(path).dtype == "fp32"


def test_panels_and_targets_in_the_help_of_convert():
    options = options_of("convert")
    assert options["--kv-lora-rank"].rich_help_panel == "--to mla"
    assert options["--group-size"].rich_help_panel == "--to crosslayer"
    assert options["--keep-layers"].rich_help_panel == "Budget"
    assert "(mla, lowrank, crosslayer, quantized)" in options["--keep-layers"].help
    assert options["--seed"].help == "Seed of every random choice. [0]"
    assert "lowrank: fisher" in options["--method"].help and "fisher, transmla, mha2mla" in options["--method"].help


@pytest.mark.parametrize("to", [name for name, target in TARGETS.items() if not target.fixed])
def test_help_of_one_target_has_its_options_and_examples_alone(to, monkeypatch, capsys):
    code, output, _ = run_main(monkeypatch, capsys, "convert", f"--to={to}", "--help-all")
    shown_flags = {
        result.strip("-").replace("-", "_") for result in re.findall(r"^│ (--[a-z-]+)", output, re.MULTILINE)
    }
    every = {each.flag for name in TARGETS for each in settings_of(CLASSES[name]).values()}
    own = {each.flag for each in settings_of(CLASSES[to]).values() if not each.info.in_file}
    assert code == 0 and shown_flags & every == own
    assert all(f"--to {to}" in line for line in output.splitlines() if line.strip().startswith("surgery convert --to"))


def test_defaults_are_told_in_one_way(monkeypatch, capsys):
    for verb in ("inspect", "demo", "convert", "export", "verify", "heal"):
        _, output, _ = run_main(monkeypatch, capsys, verb, "--help")
        assert "default:" not in output, verb
