"""Verdict for mlx-lm, tested with its CPU backend; nothing was run on Apple silicon."""

from __future__ import annotations

from surgery.engines.facts import HEADS, MLA, OWN, Facts
from surgery.engines.trials import MLX, MLX_DIFFERS
from surgery.engines.verdict import LOADS_WITH, NOT_TRIED, REFUSED, Verdict

NAME = "mlx-lm"


def obstacle(facts: Facts) -> str | None:
    """Return why mlx-lm would refuse a checkpoint or compute different outputs; None if no obstacle is known."""
    if facts.structure == OWN:
        return "it does not support the custom model class"
    if facts.structure == MLA and facts.frequency_list:
        return "it ignores the RoPE frequency list"
    if facts.structure == MLA and facts.tied:
        return "its deepseek_v3 does not support tied embeddings"
    return None


def verdict(facts: Facts, path: str) -> Verdict:
    """Return the verdict for mlx-lm, whose ``deepseek_v3.py`` supports biases and caches latents."""
    fields = {"engine": NAME, "version": MLX.version, "device": MLX.device}
    if problem := obstacle(facts):
        return Verdict(**fields, status=REFUSED, command=None, reason=problem, remedy=facts.again("--engine mlx"))
    if facts.kind in MLX_DIFFERS:
        return Verdict(**fields, status=REFUSED, command=None, reason=MLX_DIFFERS[facts.kind])
    if facts.structure == HEADS and facts.kind in MLX.kinds and not facts.has_legacy_rope_keys:
        reason = "it reads rope_theta and rope_scaling: add them to config.json next to rope_parameters"
        return Verdict(**fields, status=REFUSED, command=None, reason=reason)
    fields |= {"command": f"mlx_lm.server --model {path}", **facts.cache(facts.number_bytes)}
    if facts.kind in MLX.kinds:
        return Verdict(**fields, status=LOADS_WITH, reason=f"ran in mlx-lm {MLX}")
    return Verdict(**fields, status=NOT_TRIED, reason="no test covers this kind of checkpoint")
