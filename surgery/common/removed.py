"""Names of removed options, commands and values, each with its replacement. Needs no torch."""

from __future__ import annotations

ROWS = "each value has a step of its own, from calibration text: leave it out"
WIDTHS = "use --bits auto; with 16-bit weights --kv-ratio {} is {} bits for every value of the source on average"
FIT = "training wins back more in the same time: surgery convert --heal 5m, or a heal step of a recipe"

REMOVED = {
    "gpu": "speed is measured, not predicted: use surgery bench decode",
    "fit_steps": FIT,
    "fit_iterations": FIT,
    "fit_queries": FIT,
    "fit_worth": FIT,
    "mixtures": "plans choose one structure for all layers; leave it out",
    "refine": "low rank spends its budget by layer already: --to lowrank --bits auto",
    "method attention-area": "--method kvzip is as quick and finds the heads that retrieve",
    "method ablation": "--method duo finds the same heads; surgery eval of hybrids says what they are worth",
    "method xkv-prompt": "--method xkv takes the basis from text once; checkpoints of bases by prompt load as before",
    "heads compare": "convert by each pattern with --to hybrid, then surgery eval of the results",
    "heads score": "surgery heads CKPT scores",
    "compare-heads": "convert by each pattern with to: hybrid, then an eval step of the results",
    "allocate greedy": "--allocate spectrum deals ranks out by what is dropped",
    "tasks repeat": "--tasks loss,needle says where long range is lost",
    "tasks match": "top-1 agreement and KL of --tasks loss compare with the source token by token",
    "tasks kernels": "surgery.accelerate compares logits with and without kernels, and says by how much they differ",
    "tasks memory": "KV bytes are always measured; surgery bench decode measures peak memory on a GPU",
    "variants mean-pool": "surgery convert --to gqa --method mean-pool makes such a model; surgery eval measures it",
    "repeat_lags": "its task was: use --tasks loss,needle",
    "repeat_rows": "its task was: use --tasks loss,needle",
    "match_prompts": "its task was: top-1 agreement of --tasks loss compares with the source",
    "match_tokens": "its task was: top-1 agreement of --tasks loss compares with the source",
    "ruler_floor": "name the tasks that the source can do: --ruler-tasks niah_single_1,vt",
    "ruler_tasks qa_1": "use niah_multikey_1 for retrieval among distractors",
    "ruler_tasks qa_2": "use vt for facts that take two steps",
    "quick": "name what is measured: --shapes llama3-8b --contexts 8k,128k --batches 1,8",
    "bench convert": "surgery convert prints its time and peak memory, tools/scale.py makes random weights of a shape",
    "peak_tflops": "a dry run takes the speed of this machine; run it where the training will run",
    "utilization": "a dry run takes the speed of this machine; run it where the training will run",
    "quantization_aware": "training always reads the quantized values of packed rows: leave it out",
    "orthogonal": "slices of nested ranks are trained without it: leave it out",
    "stream": "datasets are always read as streams: say with `tokens` how many to take",
    "data teacher": "use builtin, or text of your own",
    "calibration self": "--calibration chat samples answers of the model to the prompts of the package",
    "convert wandb": "surgery eval --wandb logs the result next to its source",
    "convert wandb_mode": "surgery eval --wandb logs the result next to its source",
    "push_to_hub": "surgery push CKPT ORG/NAME uploads the result",
    "run copy": "surgery config NAME > NAME.yaml writes one to change",
    "config copy": "surgery config NAME > NAME.yaml writes one to change",
    "processes": "torchrun --nproc-per-node N -m surgery ... starts as many processes that share the work",
    "inspect calibration": "surgery plan measures what every size of every target loses",
    "inspect plot": "surgery plan measures what every size of every target loses",
    "group": ROWS,
    "keys": ROWS,
    "hadamard": ROWS,
    "rope_bits": ROWS,
    "streaming_bits": "streaming heads keep full-precision tokens: leave it out",
    "quantized window": "the first tokens stay in full precision (--sinks), and no recent ones: leave it out",
    "bits 8": WIDTHS.format(0.5, 8),
    "bits 4": WIDTHS.format(0.25, 4),
    "bits 3": WIDTHS.format(0.1875, 3),
    "bits 2": WIDTHS.format(0.125, 2),
    "bits fp8": WIDTHS.format(0.5, 8),
    "gqa bits": "quantize the result: surgery convert CKPT-gqa --to quantized",
    "mqa bits": "quantize the result: surgery convert CKPT-mqa --to quantized",
    "hybrid bits": "streaming heads keep full-precision tokens; --to quantized keeps all tokens in a few bits",
    "to mixed": "convert all layers to one structure, such as --to lowrank --bits auto, which spends by layer; "
    "mixed checkpoints load as before",
}
"""Replacement by name: an option, ``command option`` for an option of one command, ``option value``, or a command."""


def removal(name: str) -> str | None:
    """Return the end of the error message for a removed name; None for any other name."""
    return f"was removed: {instead}" if (instead := REMOVED.get(name)) else None
