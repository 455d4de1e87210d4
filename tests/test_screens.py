"""Screens as people meet them: help that fits eighty columns, suggestions, silence, and a verdict at the end."""

import json
import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import typer
from command_line import run_main
from tiny_models import SHORT_TEXT_FLAGS, make_checkpoint, random_model
from transformers import LlamaConfig
from typer.testing import CliRunner

from surgery.checkpoint.named_models import demo_model
from surgery.cli import program as cli
from surgery.common.setting import settings_of
from surgery.console import verdicts
from surgery.console.checks import show_checks
from surgery.console.conversion import WORTH_HEALING
from surgery.console.heal import show_healed
from surgery.console.inspection import show_inspection
from surgery.console.recipe import show_made
from surgery.console.verdicts import of_conversion
from surgery.engines.table import engine_table
from surgery.eval.report import pareto
from surgery.eval.report.document import compared_context, compared_share, read_report
from surgery.eval.report.verdict import verdict
from surgery.healing.heal import Healed
from surgery.inspection.checks import Check, Checked
from surgery.inspection.inspect import inspect_checkpoint
from surgery.reporting.quality import useless_layers
from surgery.reporting.report import previous_report
from surgery.structures.mla.structure import MLA
from surgery.structures.registry import TARGETS
from surgery.workflow.recipe import Finished

ROOT = Path(__file__).resolve().parent.parent


def verbs(command, path=()):
    """Every command of the command line by its words."""
    if not hasattr(command, "commands"):
        return {path: command}
    return {k: v for name, each in command.commands.items() for k, v in verbs(each, (*path, name)).items()}


VERBS = verbs(typer.main.get_command(cli.app))


@pytest.fixture
def at_eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("screens") / "source", "llama")


OLD_SPELLINGS = {"--text", "--data", "--calibration", "--recent", "--max-seconds", "--prompts"}


def flags_of(screen):
    """Options that a help shows."""
    return set(re.findall(r"^│ (?:[* ] {,4})?(--[a-z-]+)", screen, re.MULTILINE))


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_help_fits_two_screens_and_names_the_rest(path, at_eighty_columns, monkeypatch, capsys):
    """--help-all has every option that the command takes, but for other spellings; no name is broken, no flag typed."""
    _, short, _ = run_main(monkeypatch, capsys, *path, "--help")
    _, full, _ = run_main(monkeypatch, capsys, *path, "--help-all")
    options = [each for each in VERBS[path].params if each.param_type_name == "option"]
    names = {next(flag for flag in each.opts if flag.startswith("--")) for each in options if not each.hidden}
    assert flags_of(full) == names | {"--help"} and flags_of(short) <= flags_of(full)
    assert len(short.splitlines()) <= 90
    assert (flags_of(short) == flags_of(full)) or "--help-all" in short.splitlines()[-3]
    assert {flag for each in options if each.hidden for flag in each.opts} <= OLD_SPELLINGS
    words = set(full.replace(",", " ").split())
    assert names <= words and not re.search(r"<[\w\[\]]+>|[{}]", full) and "--quiet" in full
    for each in options:
        if not each.hidden and not each.is_flag:
            assert each.metavar and set(each.metavar.replace(",", " ").split()) <= words, each.opts


@pytest.mark.parametrize("to", [name for name, target in TARGETS.items() if not target.fixed])
def test_help_of_a_target_fits_two_screens(to, at_eighty_columns, monkeypatch, capsys):
    _, shown, _ = run_main(monkeypatch, capsys, "convert", "--to", to, "--help")
    settings = settings_of(TARGETS[to].settings_class).values()
    common = {f"--{each.flag.replace('_', '-')}" for each in settings if not (each.info.in_file or each.info.advanced)}
    every = {f"--{each.flag.replace('_', '-')}" for each in settings}
    assert len(shown.splitlines()) <= 90 and flags_of(shown) & every == common


def test_verbs_of_groups_are_suggested(monkeypatch, capsys):
    code, _, err = run_main(monkeypatch, capsys, "bench", "decodee", "builtin")
    assert code == 2 and "Did you mean 'decode'?" in err


def test_completion_is_offered(monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    output = CliRunner().invoke(cli.app, ["--show-completion", "bash"])
    assert output.exit_code == 0 and "complete -o default" in output.output


def test_quiet_leaves_the_verdict_only(source, tmp_path, monkeypatch, capsys):
    code, output, err = run_main(
        monkeypatch, capsys, "convert", source, "--out", tmp_path / "a", *SHORT_TEXT_FLAGS, "--quiet"
    )
    assert (code, err) == (0, "")
    report = previous_report(tmp_path / "a")
    loss_increase = report["ladder"][-1]["loss"] - report["ladder"][0]["loss"]
    lines = output.splitlines()
    verdict = next(line for line in lines if line.startswith(f"{tmp_path / 'a'}: "))
    entries = (
        f"{report['kv']['ratio_at']['256']:.1%} of the KV bytes at 256"  # the model's limit, not the 64 of the text
    )
    assert f"{entries} for {loss_increase:+.4f} nats per token (perplexity {math.expm1(loss_increase):+.1%})" in verdict
    assert "loads in transformers" in verdict
    assert f"Next: surgery eval {tmp_path / 'a'} --baseline {source}" in lines[-3:]
    show_made(Finished(checkpoints={"a": tmp_path / "a"}))
    output = capsys.readouterr().out
    assert f"a: {entries} for {loss_increase:+.4f}" in output and f"\nNext: surgery eval {tmp_path / 'a'}\n" in output


def test_a_recipe_shows_no_loss_of_the_conversion_for_a_healed_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("surgery.reporting.report.previous_report", lambda path: {"healing": {"table": []}})
    show_made(Finished(checkpoints={"a": tmp_path / "a"}))
    assert capsys.readouterr().out.startswith("a: loss and recall were not measured after healing\n")


def test_a_dry_run_ends_in_what_would_be_kept(monkeypatch, capsys):
    arguments = ["convert", "builtin", "--to", "gqa", "--dry-run", "--calibration", "none"]
    code, output, _ = run_main(monkeypatch, capsys, *arguments)
    assert code == 0 and "dry run: builtin → demo-model-gqa" in output
    assert "would keep 50.0% of the KV bytes; loads in transformers" in output
    assert output.splitlines()[-1] == "Next: the same command without --dry-run"


def test_the_last_lines_name_every_engine(source, monkeypatch, capsys):
    arguments = ["convert", source, "--engine", "sglang", "--dry-run", "--calibration", "none"]
    code, output, _ = run_main(monkeypatch, capsys, *arguments)
    line = next(line for line in output.splitlines() if "would keep" in line)
    assert code == 0 and "; not tried in SGLang" in line
    messages = [name.strip() for part in line.split("; ")[1:] for name in re.split(" in | by |, ", part)[1:]]
    assert sorted(messages) == sorted(
        engine_table({"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8})
    )


def test_a_recipe_is_listed_without_running(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    step = "convert: {name: small, source: %s, to: gqa, kv_heads: 1, calibration: none}"
    (tmp_path / "right.yaml").write_text(f"steps:\n- {step % source}\n")
    code, output, _ = run_main(monkeypatch, capsys, "run", "right.yaml", "--dry-run")
    assert code == 0 and "small" in output and os.listdir(tmp_path) == ["right.yaml"]
    assert output.splitlines()[-1] == "Next: the same command without --dry-run"


def test_an_evaluation_is_told_in_words_next_to_its_rivals():
    report = read_report(ROOT / "docs" / "testbed")
    *lines, last = verdict(report)
    settings = {line.partition(":")[0]: line for line in lines}
    rows = {row["name"]: row for row in report["rows"]}
    named = {*settings, *last.removesuffix(".").partition(": ")[2].split(", ")}
    assert named == {name for name, row in rows.items() if row["role"] == "checkpoint"} and len(settings) == 6
    for name, line in settings.items():
        larger = line.partition("; larger, ")[2].partition(",")[0]
        if larger:
            assert rows[larger]["role"] == "variant" and rows[larger]["kv"]["ratio"] > rows[name]["kv"]["ratio"]
        cheap = line.partition("; no larger, ")[2].partition(",")[0]
        if not cheap:
            continue
        loss_increase = rows[cheap]["comparison"]["loss"]["difference"]
        assert rows[cheap]["kv"]["ratio"] <= rows[name]["kv"]["ratio"]
        for other in rows.values():
            if other["role"] == "variant" and other["kv"]["ratio"] <= rows[name]["kv"]["ratio"]:
                assert loss_increase <= other["comparison"]["loss"]["difference"]
    assert any("; " in line for line in settings.values())


def test_long_windows_are_compared_by_the_bytes_at_their_length():
    """A residual window weighs a quarter of what it does at 1k, so a rival is smaller here that is larger there."""
    report = read_report(ROOT / "docs" / "smollm2" / "rows-8k")
    rows = {row["name"]: row for row in report["rows"]}
    heads, rival = rows["quantized-4"], rows["kvarn_k4v2_g128"]
    assert compared_context(report) == 8192 and rival["kv"]["ratio"] > heads["kv"]["ratio"]
    assert compared_share(rival, report) < compared_share(heads, report) < heads["kv"]["ratio"]
    line = next(line for line in verdict(report) if line.startswith("quantized-4: "))
    assert "no larger, kvarn_k4v2_g128" in line and "8,192" in line
    drawn = {point.row["name"]: point.x for point in pareto._points(report, "loss")}
    assert drawn["kvarn_k4v2_g128"] == compared_share(rival, report) and drawn["source"] == 1
    del rival["kv"]["by_context"]
    assert compared_share(rival, report) == rival["kv"]["ratio"]
    report["tasks"]["loss"]["length"] = 1024
    assert compared_context(report) is None and compared_share(heads, report) == heads["kv"]["ratio"]


def test_a_healing_is_told_against_what_it_began_with_and_the_source():
    row = {"recall": 0.5}
    table = [
        {"name": name, "loss": loss, **row} for name, loss in (("source", 2.0), ("converted", 2.5), ("healed", 2.1))
    ]
    message = verdicts.of_healing({"table": table})
    assert message.startswith(
        "healing changed the loss by -0.4000 nats per token (perplexity -33.0%), recall 0.50 → 0.50"
    )
    assert message.endswith("now +0.1000 nats per token (perplexity +10.5%) relative to the source")
    assert verdicts.of_healing({"table": []}) == "loss and recall were not measured after healing"


def test_a_healing_ends_in_how_to_measure_it(capsys):
    facts = {"table": [], "gap_closed": None, "tokens": 10, "steps": 1, "seconds": 1.0, "tokens_per_second": None}
    facts |= {"peak_memory_bytes": 1, "ended": "max_steps", "tracker_failed": None}
    show_healed(Healed(Path("healed"), facts, "source"))
    assert capsys.readouterr().out.endswith(
        "healed: loss and recall were not measured after healing\n"
        "Next: surgery eval healed --baseline source\n      surgery doctor healed\n"
    )
    show_healed(Healed(Path("healed"), facts, str(demo_model())))
    assert "--baseline builtin\n" in capsys.readouterr().out
    show_healed(Healed(Path("healed"), facts))
    assert capsys.readouterr().out.endswith("\nNext: surgery doctor healed\n")


def test_checks_are_counted_in_the_end(capsys):
    checks = [Check("files", outcome, "") for outcome in ("passed", "passed", "not checked")]
    show_checks(Checked(str(demo_model()), checks), as_json=False)
    end = "builtin: 3 checks: 2 passed, 1 not checked\nNext: surgery doctor builtin\n"
    assert capsys.readouterr().out.endswith(end)
    show_checks(Checked("ckpt", [*checks, Check("files", "failed", "")]), as_json=False)
    assert capsys.readouterr().out.endswith("ckpt: 4 checks: 2 passed, 1 not checked, 1 failed\n")


def test_what_is_exported_of_the_demo_model_lies_in_the_working_folder(monkeypatch, capsys):
    code, output, _ = run_main(monkeypatch, capsys, "doctor", "builtin")
    assert code == 0 and output.startswith("\nbuiltin (llama)\n")
    assert output.endswith("surgery export builtin --engine llama.cpp && llama-server -m demo-model.gguf\n")


def test_an_inspection_is_one_screen(tmp_path, capsys):
    shape = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    random_model(LlamaConfig(**shape, **heads, max_position_embeddings=65536)).save_pretrained(tmp_path)
    inspection = inspect_checkpoint(tmp_path)
    show_inspection(inspection)
    output = capsys.readouterr().out
    assert len(output.splitlines()) <= 34
    assert "32.0 MiB at 8k, 128.0 MiB at 32k tokens" in output and "128k" not in output
    assert "not measured here" in output
    assert "  best quality: --to lowrank --bits auto (25.0%)\n" in output
    assert "  smallest: --to crosslayer --kv-ratio 0.0625 (6.2%)\n" in output
    assert "  for vLLM on CPU: --to mla (25.0%)\n" in output
    assert "--to hybrid" not in output[output.index("recommended (") :]
    # No memory and no context: of a model of few positions it would be warned of, and what fits has nothing to choose.
    assert re.search(
        r"\nNext: surgery plan CKPT --kv-ratio 0.25 --out plan.yaml +measures which loses least at a quarter",
        output,
    )
    show_inspection(inspection, verbose=True)
    assert len(capsys.readouterr().out.splitlines()) > 60


def test_an_inspection_of_a_wide_model_names_what_vllm_reads_on_a_gpu(tmp_path, capsys):
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    random_model(LlamaConfig(**shape, **heads, max_position_embeddings=4096)).save_pretrained(tmp_path)
    show_inspection(inspect_checkpoint(tmp_path))
    flags = "--to mla --engine vllm --kv-lora-rank 512 --rope-dim 64"
    assert f"for vLLM on CUDA (passes its own check, not run), vLLM on CPU: {flags} (28.1%)" in capsys.readouterr().out


def test_a_report_of_a_version_that_fitted_layers_is_still_shown():
    stages = [("source", 2.0), ("truncated", 2.1), ("fitted", 2.3), ("reloaded", 2.1)]
    stages = [{"stage": stage, "loss": loss, "recall": None} for stage, loss in stages]
    target = {"engines": {}, "result": "truncated", "fit": {"tried": [0], "kept": [], "given_up": None}}
    assert "+0.1000" in of_conversion({"ladder": stages, "kv": {"ratio": 0.25}, "target": target})


def test_bytes_of_what_drops_tokens_are_told_with_the_length():
    kv = {"ratio": 0.992, "peak_ratio": 1.15, "measured_at_tokens": 64, "ratio_at": {"4096": 0.2, "40000": 0.05}}
    stages = [{"stage": stage, "loss": None, "recall": None} for stage in ("source", "reloaded")]
    message = of_conversion({"ladder": stages, "kv": kv, "target": {"engines": {}}})
    assert message.startswith("20.0% of the KV bytes at 4k, 5.0% at 40,000; loss not measured")
    stages = [{"stage": stage, "loss": 2.0, "recall": None} for stage in ("source", "reloaded")]
    report = {"ladder": stages, "kv": kv, "target": {"engines": {}}, "calibration": {"length": 1024}}
    assert "nats per token (perplexity +0.0%), measured at 1,024 tokens; " in of_conversion(report)


def test_where_models_run_is_told_in_one_way():
    devices = {path: each for path, verb in VERBS.items() for each in verb.params if "--device" in each.opts}
    settings = {
        path: (each.metavar, each.help.partition(": ")[2]) for path, each in devices.items() if path != ("heal",)
    }
    assert len(settings) > 6
    assert set(settings.values()) == {("NAME", "cpu, cuda, cuda:1 …; auto is cuda if available. [auto]")}


TOLD = "layers 0 (125%)"


@dataclass(frozen=True)
class Layer:
    layer: int | str
    measured: dict = field(default_factory=dict)


def test_the_last_stage_counts():
    errors = [{"truncated": 1.5, "fitted": 0.9}, {"truncated": 0.9, "fitted": 1.01}, {}, {"a": math.nan}, {"a": 1.0}]
    assert useless_layers(map(Layer, range(5), errors)).keys() == {"1", "3"}


@pytest.mark.parametrize("error", (0.5, 1.25))
def test_screen_report_and_card_name_it(error, checkpoints, tmp_path, monkeypatch, capsys):
    def convert_layers(self, work, writer):
        outcome = convert(self, work, writer)
        first, *rest = outcome.layers
        return replace(outcome, layers=[replace(first, measured={"truncated": error}), *rest])

    convert = MLA.convert_layers
    monkeypatch.setattr(MLA, "convert_layers", convert_layers)
    arguments = ["--to", "mla", "--kv-ratio", "0.5", "--calibration", "none", "--out", tmp_path / "out"]
    code, screen, _ = run_main(monkeypatch, capsys, "convert", checkpoints("llama"), *arguments)
    assert code == 0
    target = json.loads((tmp_path / "out" / "surgery_report.json").read_text())["target"]
    assert target.get("useless_layers") == ({"0": 1.25} if error > 1 else None)
    assert (TOLD in screen, TOLD in (tmp_path / "out" / "README.md").read_text()) == (error > 1, error > 1)


def test_a_conversion_ends_in_commands_that_run_from_here(tmp_path, monkeypatch, capsys):
    """With the folder of the result, which lies next to its source; healing only where there is a loss to recover."""
    source = make_checkpoint(tmp_path / "models" / "llama", "llama")
    monkeypatch.chdir(tmp_path)
    arguments = ["--to", "gqa", "--calibration-tokens", "256", "--calibration-length", "64", "--held-out", "1"]
    code, output, err = run_main(monkeypatch, capsys, "convert", source.relative_to(tmp_path), *arguments)
    assert code == 0, err
    commands = [line for line in output.splitlines() if "llama-gqa" in line and "→" not in line]
    assert any("vllm serve models/llama-gqa" in line for line in commands)
    assert all("models/llama-gqa" in line for line in commands)
    increase = float(re.search(r"for ([+-−][\d.]+) nats", output)[1].replace("−", "-"))
    assert ("surgery heal" in output) == (increase > WORTH_HEALING)


def test_what_an_engine_does_itself_is_said_of_a_checkpoint_that_exists(source, monkeypatch, capsys):
    arguments = ["--to", "quantized", "--engine", "vllm"]
    code, output, err = run_main(monkeypatch, capsys, "convert", "nowhere", *arguments)
    assert code == 1 and not output and "nowhere: no such folder" in err
    code, output, _ = run_main(monkeypatch, capsys, "convert", source, *arguments, "--json")
    answer = json.loads(output)
    assert code == 0 and not answer["needs_conversion"] and f"vllm serve {source}" in answer["reason"]
