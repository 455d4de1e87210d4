"""Table of all engines' verdicts on a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.engines import in_transformers, llama_cpp, mlx, sglang, vllm
from surgery.engines.facts import Facts
from surgery.engines.verdict import NOT_TRIED, REFUSED, Verdict

ANY = "CKPT"
"""Placeholder for the checkpoint in the commands of reports, since checkpoints move."""

ASKED = {
    "vllm": (vllm.CUDA,),
    "sglang": (sglang.NAME,),
    "llama.cpp": (llama_cpp.NAME,),
    "mlx": (mlx.NAME,),
    "all": (vllm.CUDA, sglang.NAME, llama_cpp.NAME, mlx.NAME),
}
"""Rows of the table that each value of ``--engine`` requires."""


def verdicts(config: dict[str, Any], path: str = ANY) -> list[Verdict]:
    """Return all engines' verdicts for a config.json; commands refer to ``path``."""
    facts = Facts.of(config)
    results = [
        in_transformers.verdict(facts, path),
        vllm.cuda(facts, path),
        vllm.cpu(facts, path),
        sglang.verdict(facts, path),
        llama_cpp.verdict(facts, path),
        mlx.verdict(facts, path),
    ]
    codes = {"status": NOT_TRIED, "reason": "no test covers its quantized weights"}
    return [replace(each, **codes) if facts.quantized and each.loads else each for each in results]


def engine_table(config: dict[str, Any], path: str = ANY) -> dict[str, dict[str, Any]]:
    """Return the verdicts by engine as plain values for reports."""
    return {verdict.engine: verdict.to_dict() for verdict in verdicts(config, path)}


def support_lines(engines: dict[str, Any]) -> dict[str, str]:
    """Format a report's table as one line per engine; reports of earlier versions contain these lines."""
    return {engine: entry if isinstance(entry, str) else entry["text"] for engine, entry in engines.items()}


def refuse_unless_loadable(engine: str, config: dict[str, Any]) -> None:
    """Check that the engine of ``--engine`` can serve a result.

    Raises:
        SurgeryError: the engine refuses it, or its own class would compute different outputs.
    """
    for verdict in verdicts(config):
        if verdict.engine in ASKED[engine] and (verdict.status == REFUSED or verdict.remedy):
            message = f"{verdict.engine} cannot serve it: {verdict.reason}"
            hint = "surgery inspect, which lists the conversions that it supports"
            raise SurgeryError(f"--engine {engine}: {message}", setting="engine", hint=hint)
