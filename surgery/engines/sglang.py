"""Verdict for SGLang, from its source code; nothing was run."""

from __future__ import annotations

from surgery.engines.facts import MLA, OWN, Facts
from surgery.engines.limits import FAST_WIDTH
from surgery.engines.verdict import NOT_TRIED, REFUSED, Verdict

NAME, VERSION = "SGLang", "0.5.23"


def verdict(facts: Facts, path: str) -> Verdict:
    """Return the verdict for SGLang, whose ``deepseek_v2.py`` drops biases and treats non-default RoPE as YaRN."""
    fields = {"engine": NAME, "version": VERSION, "device": "CUDA"}
    obstacles = []
    if facts.structure == OWN:
        obstacles.append("does not support the custom model class")
    if facts.structure == MLA:
        obstacles += ["drops the biases"] * facts.biases
        obstacles += ["treats the RoPE frequency list as YaRN"] * facts.frequency_list
        obstacles += [f"supports SiLU only, not {facts.activation}"] * (facts.activation != "silu")
    if obstacles:
        remedy = {"remedy": facts.again_for("sglang")}
        return Verdict(**fields, status=REFUSED, command=None, reason=" and ".join(obstacles), **remedy)
    triton = " --attention-backend triton" if facts.structure == MLA and facts.width != FAST_WIDTH else ""
    return Verdict(
        **fields,
        status=NOT_TRIED,
        command=f"python -m sglang.launch_server --model-path {path}{triton}",
        reason="from its source code, not run",
        **facts.cache(2),
    )
