"""llama.cpp, through the GGUF that ``surgery export`` writes."""

from __future__ import annotations

from pathlib import Path

from surgery.checkpoint.named_models import name_of
from surgery.engines.facts import DECILM, MLA, OWN, Facts
from surgery.engines.trials import LLAMA_CPP
from surgery.engines.verdict import LOADS_WITH, NOT_TRIED, REFUSED, Verdict

NAME = "llama.cpp"
LLAMAS = ("llama", "mistral")


def obstacle(facts: Facts) -> str | None:
    """Return why a checkpoint cannot become a GGUF that computes the same; None if it can."""
    if facts.structure == OWN:
        return "the model class of this package"
    if facts.structure == MLA:
        found = ["it has no biases in deepseek2"] * facts.biases
        found += ["it ignores the frequency list"] * facts.frequency_list
        found += ["surgery export does not write YaRN: use llama.cpp's converter"] * facts.yarn
        found += [f"it takes SiLU only, not {facts.activation}"] * (facts.activation != "silu")
        found += ["a mixture of experts of DeepSeek's own: use llama.cpp's converter"] * facts.real_experts
        return " and ".join(found) or None
    if facts.family in LLAMAS and facts.windowed:
        return "its llama class has no attention windows"
    return None


def verdict(facts: Facts, path: str) -> Verdict:
    """The cache is in f16 unless told otherwise, of MLA the latents alone."""
    said = {"engine": NAME, "version": LLAMA_CPP.version, "device": LLAMA_CPP.device}
    found = obstacle(facts)
    if found:
        remedy = facts.again_for("llama.cpp")
        return Verdict(**said, status=REFUSED, command=None, reason=found, remedy=remedy)
    said |= facts.cache(2)
    if facts.structure not in (MLA, DECILM) and facts.family not in LLAMAS:
        command = f"convert_hf_to_gguf.py {path} --outfile {path}.gguf && llama-server -m {path}.gguf"
        reason = "surgery export writes Llama-class models only; llama.cpp's own converter was not tried"
        return Verdict(**said, status=NOT_TRIED, command=command, reason=reason)
    called = name_of(path)
    written = path if called == path else Path(path).name  # of a model that ships, in the working folder
    command = f"surgery export {called} --engine llama.cpp && llama-server -m {written}.gguf"
    if facts.kind not in LLAMA_CPP.kinds:
        return Verdict(**said, status=NOT_TRIED, command=command, reason="no test ran such a checkpoint")
    return Verdict(**said, status=LOADS_WITH, command=command, reason=f"ran in llama.cpp {LLAMA_CPP}")
