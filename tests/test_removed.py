"""Names of earlier versions end in one line that names what to use instead."""

import pytest
from command_line import run_main

from surgery.common.errors import SurgeryError
from surgery.common.removed import REMOVED
from surgery.planning.plan_file import read_plan
from surgery.planning.settings import PlanSettings

OBJECTIVES = ("reverse_kl", "jsd", "jsd_beta", "attention", "temperature")
LINES = {
    "fit_steps": ["convert", "builtin", "--fit-steps", "0"],
    "fit_iterations": ["convert", "builtin", "--fit-iterations", "8"],
    "fit_queries": ["convert", "builtin", "--to", "gqa", "--fit-queries", "64"],
    "fit_worth": ["convert", "builtin", "--fit-worth=0.5"],
    "tune": ["bench", "kernels", "--tune"],
    "tuned": ["bench", "kernels", "--tuned", "folder"],
    "bench convert": ["bench", "convert", "--shape", "llama3-8b"],
    "method procrustes": ["convert", "builtin", "--to", "gqa", "--method", "procrustes"],
    "method xkv-prompt": ["convert", "builtin", "--to", "crosslayer", "--method", "xkv-prompt"],
    "allocate greedy": ["convert", "builtin", "--to", "lowrank", "--allocate", "greedy"],
    "ruler_floor": ["eval", "builtin", "--ruler-floor", "0.3"],
    "ruler_tasks qa_1": ["eval", "builtin", "--config", "{file}"],
    "ruler_tasks qa_2": ["eval", "builtin", "--config", "{file}"],
    "tasks repeat": ["eval", "builtin", "--tasks", "loss,repeat"],
    "tasks match": ["eval", "builtin", "--tasks", "match"],
    "tasks memory": ["eval", "builtin", "--tasks", "loss,memory"],
    "tasks kernels": ["eval", "builtin", "--tasks", "kernels"],
    "variants mean-pool": ["eval", "builtin", "--variants", "int8,mean-pool"],
    "repeat_lags": ["eval", "builtin", "--repeat-lags", "64"],
    "repeat_rows": ["eval", "builtin", "--repeat-rows", "2"],
    "match_prompts": ["eval", "builtin", "--match-prompts", "2"],
    "match_tokens": ["eval", "builtin", "--match-tokens", "2"],
    "method ablation": ["heads", "builtin", "--method", "ablation"],
    "method attention-area": ["heads", "builtin", "--method", "attention-area"],
    "gpu": ["inspect", "builtin", "--gpu", "h100"],
    "mixtures": ["plan", "builtin", "--mixtures", "24"],
    "peak_tflops": ["heal", "builtin", "--dry-run", "--peak-tflops", "989"],
    "utilization": ["heal", "builtin", "--dry-run", "--utilization", "0.4"],
    "quantization_aware": ["heal", "builtin", "--no-quantization-aware"],
    "attention surgery": ["heal", "builtin", "--attention", "surgery"],
    "orthogonal": ["heal", "builtin", "--orthogonal"],
    "train_patterns": ["heal", "builtin", "--train-patterns", "*.norm.weight"],
    **{f"objective {name}": ["heal", "builtin", "--config", "{file}"] for name in OBJECTIVES},
    "patience": ["heal", "builtin", "--patience", "3"],
    "final_learning_rate": ["heal", "builtin", "--final-learning-rate", "0.1"],
    "launcher zero3": ["heal", "builtin", "--launcher", "zero3"],
    "stream": ["heal", "builtin", "--config", "{file}"],
    "teacher_logits": ["heal", "builtin", "--teacher-logits", "cache"],
    "teacher_top_k": ["heal", "builtin", "--teacher-top-k", "8"],
    "data chat": ["eval", "builtin", "--data", "chat"],
    "data teacher": ["heal", "builtin", "--data", "teacher"],
    "refine": ["plan", "builtin", "--refine=200k"],
    "heads compare": ["heads", "compare", "a.safetensors", "--measure", "builtin"],
    "heads score": ["heads", "score", "builtin"],
    "compare-heads": ["run", "{recipe}"],
    "calibration self": ["convert", "builtin", "--calibration", "self"],
    "convert wandb": ["convert", "builtin", "--wandb", "p"],
    "convert wandb_mode": ["convert", "builtin", "--wandb-mode", "offline"],
    "log_file": ["convert", "builtin", "--log-file", "log.txt"],
    "push_to_hub": ["convert", "builtin", "--push-to-hub", "me/x"],
    "run copy": ["recipes", "--copy", "testbed-mla"],
    "config copy": ["configs", "--copy", "mla"],
    "inspect calibration": ["inspect", "builtin", "--calibration", "builtin"],
    "inspect plot": ["inspect", "builtin", "--plot", "x.png"],
    "quick": ["bench", "kernels", "--quick"],
    "processes": ["eval", "builtin", "--processes", "2"],
    "group": ["convert", "builtin", "--to", "quantized", "--group", "8"],
    "keys": ["convert", "builtin", "--to", "lowrank", "--keys", "token"],
    "hadamard": ["convert", "builtin", "--to", "mla", "--hadamard"],
    "rope_bits": ["convert", "builtin", "--to", "mla", "--rope-bits", "16"],
    "streaming_bits": ["convert", "builtin", "--to", "hybrid", "--streaming-bits", "4"],
    "quantized window": ["convert", "builtin", "--to", "quantized", "--window", "4"],
    **{f"bits {bits}": ["convert", "builtin", "--to", "lowrank", f"--bits={bits}"] for bits in (8, 4, 2)},
    **{f"bits {bits}": ["convert", "builtin", "--to", "quantized", f"--bits={bits}"] for bits in (3, "fp8")},
    "granularity": ["convert", "builtin", "--to", "hybrid", "--granularity", "layer"],
    "heads_multiple": ["convert", "builtin", "--to", "hybrid", "--heads-multiple", "2"],
    "gqa bits": ["convert", "builtin", "--to", "gqa", "--bits", "8"],
    "mqa bits": ["convert", "builtin", "--to", "mqa", "--bits", "8"],
    "hybrid bits": ["convert", "builtin", "--to", "hybrid", "--bits", "8"],
    "to mixed": ["convert", "builtin", "--to", "mixed"],
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_or_value_names_what_to_use_instead(name, tmp_path, monkeypatch, capsys):
    file = tmp_path / "settings.yaml"
    text = f"tasks: ruler\nruler_tasks: {name.partition(' ')[2] or None}\n"
    command, _, removed = name.partition(" ")
    text = f"objective: {{kl: 1, {removed}: 0.5}}\n" if command == "objective" else text
    file.write_text("data: [{source: org/name, stream: true}]\n" if name == "stream" else text)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("steps: [{compare-heads: {name: both, patterns: [a, b]}}]")
    monkeypatch.chdir(tmp_path)
    code, _, error = run_main(monkeypatch, capsys, *(part.format(file=file, recipe=recipe) for part in LINES[name]))
    *_, line = error.splitlines()
    assert code == 1 and line.startswith("surgery: error: ") and line.endswith(REMOVED[name])


def test_a_file_with_a_removed_setting_does_too(tmp_path):
    (tmp_path / "plan.yaml").write_text("kv_ratio: 0.25\nmixtures: 24\n")
    with pytest.raises(SurgeryError, match="mixtures was removed"):
        PlanSettings.from_file(tmp_path / "plan.yaml")


def test_a_plan_file_whose_choice_is_a_mixture_does_too(tmp_path):
    part = "{to: lowrank, layers: [0], kv_ratio: 0.25}"
    (tmp_path / "plan.yaml").write_text(
        f"to: mixed\nsettings:\n  parts: [{part}]\n  keep: [1]\npredicted: {{loss_increase: 0.01}}\n"
    )
    with pytest.raises(SurgeryError, match="--to mixed was removed"):
        read_plan(tmp_path / "plan.yaml")
