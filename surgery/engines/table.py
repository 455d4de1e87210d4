"""Table of all engines' verdicts on a checkpoint."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError
from surgery.engines import in_transformers, llama_cpp, mlx, sglang, vllm
from surgery.engines.facts import Facts
from surgery.engines.verdict import NOT_TRIED, REFUSED, Verdict

if TYPE_CHECKING:
    from surgery.checkpoint import CheckpointReader

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


def verdicts(config: dict[str, Any], path: str = ANY, folder: Path | None = None) -> list[Verdict]:
    """Return all engines' verdicts for a config.json; commands refer to ``path``.

    Args:
        folder: folder with the tokenizer's files, on which a command depends; None: unknown.
    """
    facts, quoted = Facts.of(config), shlex.quote(path)
    results = [
        in_transformers.verdict(facts, path),
        vllm.cuda(facts, quoted),
        vllm.cpu(facts, quoted),
        sglang.verdict(facts, quoted),
        llama_cpp.verdict(facts, path, folder),
        mlx.verdict(facts, quoted),
    ]
    codes = {"status": NOT_TRIED, "reason": "no test covers its quantized weights"}
    return [replace(each, **codes) if facts.quantized and each.loads else each for each in results]


def verdicts_on(reader: CheckpointReader, path: str) -> list[Verdict]:
    """Return all engines' verdicts on a checkpoint, which may be a GGUF file; commands refer to ``path``."""
    results = verdicts(reader.config, path, reader.path)
    return [_on_gguf(each, reader) for each in results] if reader.source.is_file() else results


def _on_gguf(verdict: Verdict, reader: CheckpointReader) -> Verdict:
    """Return the verdict on a GGUF file, from that on the checkpoint that it becomes when it is converted."""
    file, command = reader.source, None
    reason = "not tried with GGUF files; convert it first, or use the Hugging Face checkpoint"
    if verdict.engine == in_transformers.NAME:
        folder, name = (json.dumps(str(part), ensure_ascii=False) for part in (file.parent, file.name))
        command = f'AutoModelForCausalLM.from_pretrained({folder}, gguf_file={name}, dtype="auto")'
        reason = "its own loader of GGUF files drops biases and RoPE scaling of some models"
    elif verdict.engine == llama_cpp.NAME:
        command = f"llama-server -m {shlex.quote(str(file))}"
        if verdict.loads and reader.dequantised_from is None:
            return replace(verdict, command=command)
        reason = "its own format; no test covers this kind of file"
    return replace(verdict, status=NOT_TRIED, command=command, reason=reason, remedy=None)


def engine_table(config: dict[str, Any], path: str = ANY, folder: Path | None = None) -> dict[str, dict[str, Any]]:
    """Return the verdicts by engine as plain values for reports; takes the arguments of :func:`verdicts`."""
    return {verdict.engine: verdict.to_dict() for verdict in verdicts(config, path, folder)}


def support_lines(engines: dict[str, Any]) -> dict[str, str]:
    """Format a report's table as one line per engine; reports of earlier versions contain these lines."""
    return {engine: entry if isinstance(entry, str) else entry["text"] for engine, entry in engines.items()}


def refuse_unless_loadable(engine: str, config: dict[str, Any]) -> None:
    """Check that the engine of ``--engine`` can serve a result.

    Raises SurgeryError: the engine refuses it, or its own class would compute different outputs.
    """
    for verdict in verdicts(config):
        if verdict.engine in ASKED[engine] and (verdict.status == REFUSED or verdict.remedy):
            message = f"{verdict.engine} cannot serve it: {verdict.reason}"
            hint = "surgery inspect, which lists the conversions that it supports"
            raise SurgeryError(f"--engine {engine}: {message}", setting="engine", hint=hint)


@dataclass(frozen=True)
class Diagnosis:
    """Verdicts of all engines on one checkpoint.

    Attributes:
        ruined_by: weight or cache formats in which the checkpoint produces garbage, as far as its tensors show.
    """

    path: str
    facts: Facts
    verdicts: tuple[Verdict, ...]
    ruined_by: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        engines = [verdict.to_dict() for verdict in self.verdicts]
        facts = {"path": self.path, "kind": self.facts.kind, **asdict(self.facts)}
        return {**facts, "engines": engines, "ruined_by": list(self.ruined_by)}


def diagnose(checkpoint: str | Path) -> Diagnosis:
    """Collect the engines' verdicts from config.json, and for stock MLA ruinous formats from the latent projections.

    Raises SurgeryError: there is no checkpoint, or its config lacks an entry that the verdicts need.
    """
    from surgery.checkpoint import CheckpointReader  # needs torch, which errors at first sight do not load
    from surgery.engines.number_formats import ruinous_formats

    opened = CheckpointReader.open(checkpoint)
    reader = opened.as_stored
    try:
        answers = tuple(verdicts_on(reader, str(checkpoint)))
        return Diagnosis(str(checkpoint), Facts.of(reader.config), answers, tuple(ruinous_formats(opened)))
    except KeyError as error:
        raise SurgeryError.at(reader.source, f"config.json: {error} is missing") from None
