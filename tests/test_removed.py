"""Names of earlier versions end in one line that names what to use instead."""

import pytest
from command_line import run_main

from surgery.common.errors import SurgeryError
from surgery.common.removed import REMOVED
from surgery.planning.plan_file import read_plan
from surgery.planning.settings import PlanSettings

OBJECTIVES = ("reverse_kl", "jsd", "jsd_beta", "attention", "temperature")
RULER = ("ruler_floor", "ruler_lengths", "ruler_samples", "ruler_tasks")
PLAIN = {
    "convert": ("fit_steps", "fit_iterations", "fit_queries", "fit_worth", "log_file", "held_out_text", "push_to_hub"),
    "convert --seed 1": ("activation_memory", "group", "keys"),
    "convert --to mla": ("hadamard", "rope_bits", "latent_norm"),
    "convert --to lowrank": ("rank_multiple",),
    "convert --to crosslayer": ("block",),
    "convert --to hybrid": ("compensated", "streaming_bits", "granularity", "heads_multiple"),
    "eval": ("repeat_lags", "repeat_rows", "match_prompts", "match_tokens", "processes", *RULER),
    "heal": ("peak_tflops", "utilization", "orthogonal", "train_patterns", "patience", "attention", "lora_modules"),
    "heal --dry-run": ("project", "final_learning_rate", "spike", "weight_decay", "log_every", "evaluate_every"),
    "heal --quiet": ("evaluate_tasks",),
    "heal builtin": ("evaluate_data", "evaluate_limit", "tracker"),
    "plan": ("mixtures", "refine"),
    "inspect": ("gpu",),
    "heads": ("offload", "penalty", "recall"),
    "bench kernels": ("tune", "tuned", "quick"),
}
"""Options by the command that had them."""
LINES = {name: [*verb.split(), f"--{name.replace('_', '-')}=1"] for verb, names in PLAIN.items() for name in names}
LINES |= {
    f"{verb} {name}": [verb, f"--{name.replace('_', '-')}=x"]
    for verb, name in (("convert", "wandb"), ("convert", "wandb_mode"), ("inspect", "calibration"), ("inspect", "plot"))
}
VARIANTS = ("mean-pool", "kvtc_8x", "kvtc_16x", "kvtc_32x", "kvtc_64x")
LINES |= {f"variants {name}": ["eval", "builtin", f"--variants=int8,{name}"] for name in VARIANTS}
TASKS = ("repeat", "match", "memory", "kernels", "ruler")
LINES |= {f"tasks {name}": ["eval", "builtin", f"--tasks=loss,{name}"] for name in TASKS}
LINES |= {
    f"method {name}": ["heads", "builtin", f"--method={name}"]
    for name in ("ablation", "attention-area", "kvzip", "prulong")
}
METHODS = ("asvd", "cskv", "think")
LINES |= {f"method {name}": ["convert", "builtin", "--to", "lowrank", f"--method={name}"] for name in METHODS}
SHARED = ("xkv", "xkv-prompt", "minicache")
LINES |= {f"method {name}": ["convert", "builtin", "--to", "crosslayer", f"--method={name}"] for name in SHARED}
LINES |= {f"bits {bits}": ["convert", "builtin", "--to", "lowrank", f"--bits={bits}"] for bits in (8, 4, 2)}
LINES |= {f"bits {bits}": ["convert", "builtin", "--to", "quantized", f"--bits={bits}"] for bits in (3, "fp8")}
LINES |= {f"{to} bits": ["convert", "builtin", "--to", to, "--bits=8"] for to in ("gqa", "mqa", "hybrid")}
LINES |= {f"{to} allocate": ["convert", "builtin", "--to", to, "--allocate=spectrum"] for to in ("gqa", "mqa")}
LINES |= {f"{to} carrier": ["convert", "builtin", "--to", to, "--carrier=decilm"] for to in ("gqa", "mqa")}
LINES |= {f"objective {name}": ["heal", "builtin", "--config", "{file}"] for name in OBJECTIVES}
LINES |= {
    "bench convert": ["bench", "convert", "--shape", "llama3-8b"],
    "method procrustes": ["convert", "builtin", "--to", "gqa", "--method", "procrustes"],
    "allocate greedy": ["convert", "builtin", "--to", "lowrank", "--allocate", "greedy"],
    "quantization_aware": ["heal", "builtin", "--no-quantization-aware"],
    "engine trtllm": ["plan", "builtin", "--kv-ratio=0.5", "--engine=trtllm"],
    "resume": ["heal", "builtin", "--no-resume"],
    "balanced": ["heal", "builtin", "--no-balanced"],
    "compile": ["heal", "builtin", "--compile"],
    "train new": ["heal", "builtin", "--train", "new"],
    "data format": ["heal", "builtin", "--config", "{file}"],
    "launcher zero3": ["heal", "builtin", "--launcher", "zero3"],
    "stream": ["heal", "builtin", "--config", "{file}"],
    "data chat": ["eval", "builtin", "--data", "chat"],
    "data teacher": ["heal", "builtin", "--data", "teacher"],
    "heads compare": ["heads", "compare", "a.safetensors", "--measure", "builtin"],
    "heads score": ["heads", "score", "builtin"],
    "heads restart": ["heads", "builtin", "--restart"],
    "compare-heads": ["run", "{recipe}"],
    "calibration self": ["convert", "builtin", "--calibration", "self"],
    "run copy": ["recipes", "--copy", "testbed-mla"],
    "config copy": ["configs", "--copy", "mla"],
    "quantized window": ["convert", "builtin", "--to", "quantized", "--window", "4"],
    "allow_pickle": ["convert", "builtin", "--to", "gqa", "--allow-pickle"],
    "follow_links": ["inspect", "builtin", "--follow-links"],
    "keep_quantised": ["convert", "builtin", "--to", "mla", "--keep-quantised"],
    "to mixed": ["convert", "builtin", "--to", "mixed"],
}


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_or_value_names_what_to_use_instead(name, tmp_path, monkeypatch, capsys):
    file = tmp_path / "settings.yaml"
    command, _, removed = name.partition(" ")
    text = f"objective: {{kl: 1, {removed}: 0.5}}\n" if command == "objective" else ""
    key = {"stream": "stream: true", "data format": "format: chat"}.get(name)
    file.write_text(f"data: [{{source: org/name, {key}}}]\n" if key else text)
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
