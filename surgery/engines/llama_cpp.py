"""Verdict for llama.cpp, with GGUF files written by ``surgery export``."""

from __future__ import annotations

import shlex
from pathlib import Path

from surgery.checkpoint.gguf_tokenizer import pre_tokenizer_name
from surgery.checkpoint.named_models import name_of
from surgery.engines.facts import MLA, OWN, Facts
from surgery.engines.trials import LLAMA_CPP
from surgery.engines.verdict import LOADS_WITH, NOT_TRIED, REFUSED, Verdict

NAME = "llama.cpp"
LLAMAS = ("llama", "mistral")
ROPE_TYPES = ("default", "llama3", "linear", "yarn")
"""RoPE types that an export of plain attention writes."""


def obstacle(facts: Facts) -> str | None:
    """Return why a checkpoint cannot be exported to GGUF with equal outputs; None if it can."""
    if facts.structure == OWN:
        return "it does not support the custom model class"
    if facts.structure == MLA:
        reasons = ["its deepseek2 has no attention biases"] * facts.biases
        reasons += ["it ignores the RoPE frequency list"] * facts.frequency_list
        reasons += ["surgery export does not write YaRN: use llama.cpp's converter"] * facts.yarn
        reasons += [f"it supports SiLU only, not {facts.activation}"] * (facts.activation != "silu")
        reasons += ["surgery export does not write MoE layers: use llama.cpp's converter"] * facts.real_experts
        return " and ".join(reasons) or None
    if facts.family in LLAMAS and facts.windowed:
        return "its llama class has no sliding windows"
    if facts.family in LLAMAS and facts.rope not in ROPE_TYPES:
        return f"surgery export does not write RoPE of type {facts.rope!r}"
    return None


def verdict(facts: Facts, path: str, folder: Path | None = None) -> Verdict:
    """Return the verdict for llama.cpp; its cache is f16 by default, for MLA only latents.

    Args:
        folder: folder with the tokenizer's files; None: unknown.
    """
    fields = {"engine": NAME, "version": LLAMA_CPP.version, "device": LLAMA_CPP.device}
    problem = obstacle(facts)
    if problem:
        remedy = facts.again_for("llama.cpp")
        return Verdict(**fields, status=REFUSED, command=None, reason=problem, remedy=remedy)
    fields |= facts.cache(2)
    if facts.structure != MLA and facts.family not in LLAMAS:
        file = shlex.quote(f"{path}.gguf")
        command = f"convert_hf_to_gguf.py {shlex.quote(path)} --outfile {file} && llama-server -m {file}"
        reason = "surgery export writes Llama-class models only; llama.cpp's own converter was not tried"
        return Verdict(**fields, status=NOT_TRIED, command=command, reason=reason)
    called = name_of(path)
    stem = path if called == path else Path(path).name  # a model of this package exports to the working folder
    option = "" if folder is None or pre_tokenizer_name(folder) else " --tokenizer-from SOURCE.gguf"
    command = f"surgery export {shlex.quote(called)} --engine llama.cpp{option}"
    command += f" && llama-server -m {shlex.quote(f'{stem}.gguf')}"
    if facts.kind not in LLAMA_CPP.kinds:
        return Verdict(**fields, status=NOT_TRIED, command=command, reason="no test covers this kind of checkpoint")
    return Verdict(**fields, status=LOADS_WITH, command=command, reason=f"ran in llama.cpp {LLAMA_CPP}")
