"""Names that earlier versions had and this one does not, each with what to use instead. Needs no torch."""

from __future__ import annotations

REMOVED = {
    "gpu": "speed is measured, not predicted: use surgery bench decode",
    "mixtures": "plans choose one structure for all layers; leave it out",
    "refine": "low rank spends its budget by layer already: --to lowrank --bits auto",
    "method attention-area": "--method kvzip is as quick and finds the heads that retrieve",
    "method ablation": "--method duo finds the same heads; surgery heads compare --measure says what they are worth",
    "to mixed": "convert all layers to one structure, such as --to lowrank --bits auto, which spends by layer; "
    "mixed checkpoints load as before",
}
"""Settings and options by name, values as ``setting value``, commands by their words."""


def removal(name: str) -> str | None:
    """The rest of a message about a name that was removed; None for any other name."""
    return f"was removed: {instead}" if (instead := REMOVED.get(name)) else None
