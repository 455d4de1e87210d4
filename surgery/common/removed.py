"""Names that earlier versions had and this one does not, each with what to use instead. Needs no torch."""

from __future__ import annotations

REMOVED = {
    "gpu": "speed is measured, not predicted: use surgery bench decode",
    "mixtures": "plans choose one structure for all layers; leave it out",
    "refine": "low rank spends its budget by layer already: --to lowrank --bits auto",
    "method attention-area": "--method kvzip is as quick and finds the heads that retrieve",
    "method ablation": "--method duo finds the same heads; surgery heads compare --measure says what they are worth",
    "method xkv-prompt": "--method xkv takes the basis from text once; checkpoints of bases by prompt load as before",
    "allocate greedy": "--allocate spectrum deals ranks out by what is dropped",
    "ruler_tasks qa_1": "use niah_multikey_1 for retrieval among distractors",
    "ruler_tasks qa_2": "use vt for facts that take two steps",
    "bench convert": "surgery convert prints its time and peak memory, tools/scale.py makes random weights of a shape",
    "peak_tflops": "a dry run takes the speed of this machine; run it where the training will run",
    "utilisation": "a dry run takes the speed of this machine; run it where the training will run",
    "stream": "datasets are always read as streams: say with `tokens` how many to take",
    "data teacher": "use builtin, or text of your own",
    "to mixed": "convert all layers to one structure, such as --to lowrank --bits auto, which spends by layer; "
    "mixed checkpoints load as before",
}
"""Settings and options by name, values as ``setting value``, commands by their words."""


def removal(name: str) -> str | None:
    """The rest of a message about a name that was removed; None for any other name."""
    return f"was removed: {instead}" if (instead := REMOVED.get(name)) else None
