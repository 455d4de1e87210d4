"""Names of removed options, commands and values, each with its replacement. Needs no torch."""

from __future__ import annotations

ROWS = "every channel has its own scale, from calibration text: leave it out"
TUNED = "the best configuration was as fast as the default on an H100: leave it out"
WIDTHS = "use --bits auto; with 16-bit weights --kv-ratio {} averages {} bits per value"
KL = "use kl, the divergence that every report trained with"
FIT = "healing recovers more in the same time: surgery convert --heal 5m, or a heal step of a recipe"

REMOVED = {
    "gpu": "speed is measured, not predicted: use surgery bench decode",
    "fit_steps": FIT,
    "fit_iterations": FIT,
    "fit_queries": FIT,
    "fit_worth": FIT,
    "mixtures": "plans use one target for all layers; leave it out",
    "refine": "use --to lowrank --bits auto, which allocates the budget by layer",
    "method attention-area": "use --method kvzip, which is as fast and finds retrieval heads",
    "method ablation": "use --method duo, which finds the same heads, and surgery eval of the hybrids",
    "method procrustes": "use --method fisher, which aligns heads in the metric of the loss",
    "method xkv-prompt": "use --method xkv, whose basis is computed once from text; existing checkpoints still load",
    "heads compare": "convert by each pattern with --to hybrid, then surgery eval of the results",
    "heads score": "use surgery heads CKPT",
    "compare-heads": "convert by each pattern with to: hybrid, then an eval step of the results",
    "allocate greedy": "use --allocate spectrum, which allocates ranks by dropped energy",
    "tasks repeat": "use --tasks loss,needle, which shows where long-range recall degrades",
    "tasks match": "use --tasks loss, which reports top-1 agreement and KL with the source per token",
    "tasks kernels": "use surgery.accelerate, which reports the difference of logits with and without kernels",
    "tasks memory": "use surgery bench decode for peak memory on a GPU; KV bytes are always measured",
    "variants mean-pool": "use surgery convert --to gqa --method mean-pool, then surgery eval",
    "repeat_lags": "its task was removed: use --tasks loss,needle",
    "repeat_rows": "its task was removed: use --tasks loss,needle",
    "match_prompts": "its task was removed: use --tasks loss, which reports top-1 agreement with the source",
    "match_tokens": "its task was removed: use --tasks loss, which reports top-1 agreement with the source",
    "ruler_floor": "choose tasks that the source can solve: --ruler-tasks niah_single_1,vt",
    "ruler_tasks qa_1": "use niah_multikey_1 for retrieval among distractors",
    "ruler_tasks qa_2": "use vt for multi-hop facts",
    "quick": "choose what to measure: --shapes llama3-8b --contexts 8k,128k --batches 1,8",
    "tune": TUNED,
    "tuned": TUNED,
    "bench convert": "surgery convert prints its time and peak memory; tools/scale.py creates random weights",
    "peak_tflops": "a dry run measures the speed of this machine; run it on the machine of the training",
    "utilization": "a dry run measures the speed of this machine; run it on the machine of the training",
    "quantization_aware": "training always reads the quantized values of packed rows: leave it out",
    "attention surgery": "PyTorch's fused attention was faster on a GPU: leave it out",
    "orthogonal": "nested ranks are trained without it: leave it out",
    "launcher zero3": "use --launcher fsdp2, which shards the same without a further package",
    "train_patterns": "use --train all, or --train lora with lora_modules",
    "objective reverse_kl": KL,
    "objective jsd": KL,
    "objective jsd_beta": KL,
    "objective attention": "use hidden, which matches the layers' outputs, or layerwise alone",
    "objective temperature": "leave it out: every report trained with temperature 1",
    "patience": "set max_tokens or max_seconds; heal.jsonl has the held-out losses of a run",
    "final_learning_rate": "leave it out: cosine and linear schedules end at 0, constant stays at the peak",
    "stream": "datasets are always streamed: set `tokens` to limit them",
    "data chat": "use prose and code, or a file of conversations of your own",
    "data teacher": "use builtin or your own text",
    "calibration self": "use --calibration chat, which samples replies of the model to built-in prompts",
    "convert wandb": "use surgery eval --wandb, which logs the result next to its source",
    "convert wandb_mode": "use surgery eval --wandb, which logs the result next to its source",
    "log_file": "redirect standard error, which has a line per phase: 2>> FILE, with --verbose for times and memory",
    "push_to_hub": "use surgery push CKPT ORG/NAME",
    "run copy": "use surgery config NAME > NAME.yaml and edit the file",
    "config copy": "use surgery config NAME > NAME.yaml and edit the file",
    "processes": "use torchrun --nproc-per-node N -m surgery eval; other commands but heal run as one process",
    "heads restart": "scoring always starts from scratch: leave it out",
    "activation_memory": "use fewer --calibration-tokens; figures show no gain beyond the default",
    "held_out_text": "other documents of the calibration text are held out: measure with surgery eval --data",
    "penalty": "training adapts the weight of the gates until the target is met: leave it out",
    "recall": "--method needle and duo plant facts, the others need none: leave it out",
    "inspect calibration": "use surgery plan, which measures the loss increase of every target and size",
    "inspect plot": "use surgery plan, which measures the loss increase of every target and size",
    "group": ROWS,
    "keys": ROWS,
    "hadamard": ROWS,
    "rope_bits": ROWS,
    "streaming_bits": "streaming heads keep full-precision tokens: leave it out",
    "quantized window": "only the first tokens stay in full precision (--sinks): leave it out",
    "bits 8": WIDTHS.format(0.5, 8),
    "bits 4": WIDTHS.format(0.25, 4),
    "bits 3": WIDTHS.format(0.1875, 3),
    "bits 2": WIDTHS.format(0.125, 2),
    "bits fp8": WIDTHS.format(0.5, 8),
    "granularity": "layers with a window and no sinks recalled nothing: leave it out, and single heads stream",
    "heads_multiple": "streaming heads run in one process of every engine: leave it out",
    "gqa bits": "quantize the result: surgery convert CKPT-gqa --to quantized",
    "mqa bits": "quantize the result: surgery convert CKPT-mqa --to quantized",
    "hybrid bits": "streaming heads keep full-precision tokens; --to quantized quantizes all tokens",
    "to mixed": "convert all layers to one target, such as --to lowrank --bits auto, which allocates bits by layer; "
    "existing mixed checkpoints still load",
}
"""Replacement by name: an option, ``command option`` for an option of one command, ``option value``, or a command."""


def removal(name: str) -> str | None:
    """Return the end of the error message for a removed name; None for any other name."""
    return f"was removed: {instead}" if (instead := REMOVED.get(name)) else None
