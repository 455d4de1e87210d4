"""Verdicts for vLLM on CUDA and CPU: its own classes and our plugin.

vLLM's ``deepseek_v2.py`` builds projections without biases and treats non-default RoPE as YaRN; its transformers
backend (``--model-impl transformers``) supports both. On CUDA before Blackwell the prefill supports certain head
sizes; on CPU the MLA kernel is built for 576 elements per token.
"""

from __future__ import annotations

from surgery.engines.facts import MLA, OWN, Facts
from surgery.engines.limits import FAST_ROPE, FAST_WIDTH
from surgery.engines.trials import VLLM_CHECKED, VLLM_CPU, VLLM_MLA_HEADS, VLLM_PLUGIN
from surgery.engines.verdict import LOADS, LOADS_WITH, NOT_TRIED, REFUSED, Verdict

CUDA, CPU = "vLLM on CUDA", "vLLM on CPU"
OURS = "--carrier own"
"""Flag for the custom model class, which our plugin serves, biases included."""
# `vllm serve` of the package vllm-cpu fails: "No package metadata was found for vllm".
SERVE_ON_CPU = "python -m vllm.entrypoints.openai.api_server --model"
# For the custom model class on both devices: one-line errors, and this package is installed anyway.
SERVE_OWN = "python -m surgery_vllm.serve"
# Without this, uncompiled vllm-cpu does not apply RoPE to MLA keys and generates other tokens.
ROTATED = """ --compilation-config '{"custom_ops": ["all", "-rotary_embedding"]}'"""
PLUGIN = "our plugin (this package, installed next to vLLM)"
# Bytes per element of vLLM's default dtype, also for float32 weights.
NUMBER_BYTES = 2


def cuda(facts: Facts, path: str) -> Verdict:
    """Return the verdict for GPUs before Blackwell. None was run: a yes is that of vLLM's own check."""
    fields = {"engine": CUDA, "version": VLLM_CHECKED, "device": "CUDA before Blackwell"}
    if facts.structure == OWN:
        return _plugin(facts, path, fields)
    serve = f"vllm serve {path}"
    sizes = f"its prefill does not support head sizes {facts.head_sizes} (nope, rope, value) before Blackwell"
    sizes *= facts.head_sizes not in VLLM_MLA_HEADS
    if other := _not_by_its_class(facts, fields, sizes, facts.again_for("vllm", OURS), serve):
        return other
    fields |= facts.cache(NUMBER_BYTES)
    if facts.structure != MLA:
        return Verdict(**fields, status=NOT_TRIED, command=serve, reason="not tried on a GPU")
    checked = f"vLLM {VLLM_CHECKED}'s supports_mla_dimensions accepts {facts.head_sizes}; not tried on a GPU"
    if facts.width == FAST_WIDTH:
        return Verdict(**fields, status=LOADS, command=serve, reason=checked)
    command = f"{serve} --attention-backend TRITON_MLA"
    # The Triton kernel takes any width, but its metadata builder lists 320, 512 and 576 (get_supported_head_sizes).
    reason = f"{checked}, and r + rope is {facts.width}, not {FAST_WIDTH}"
    # Conversions keep at most half of the bytes, so the source of a conversion wider than 288 caches more than 576.
    within = FAST_WIDTH // 2 < facts.width < FAST_WIDTH and not facts.real_experts
    # Not a remedy: `convert --engine vllm` refuses results with a remedy.
    reason += f"; --kv-lora-rank {FAST_WIDTH - FAST_ROPE} --rope-dim {FAST_ROPE} gives {FAST_WIDTH}" * within
    return Verdict(**fields, status=NOT_TRIED, command=command, reason=reason)


def cpu(facts: Facts, path: str) -> Verdict:
    """Return the verdict for the CPU build, ``vllm-cpu``."""
    fields = {"engine": CPU, "version": VLLM_CPU.version, "device": VLLM_CPU.device}
    if facts.structure == OWN:
        return _plugin(facts, path, fields)
    serve = f"{SERVE_ON_CPU} {path}"
    width = f"its CPU kernel supports only r + rope of {FAST_WIDTH}, not {facts.width}" * (facts.width != FAST_WIDTH)
    if other := _not_by_its_class(facts, fields, width, facts.again(OURS), serve):
        return other
    fields |= facts.cache(NUMBER_BYTES)
    rotated = ROTATED if facts.structure == MLA else ""
    command = f"{serve}{rotated}"
    if facts.kind not in VLLM_CPU.kinds:
        return Verdict(**fields, status=NOT_TRIED, command=command, reason="no test covers this kind of checkpoint")
    status = LOADS_WITH if rotated else LOADS
    return Verdict(**fields, status=status, command=command, reason=f"ran in vllm-cpu {VLLM_CPU}")


def _plugin(facts: Facts, path: str, fields: dict[str, str]) -> Verdict:
    """Return the verdict for the custom model class, with our plugin installed next to vLLM."""
    if not_served := facts.not_served or "quantized weights" * facts.quantized:
        reason = f"our plugin does not support {not_served}"
        return Verdict(**fields, status=REFUSED, command=None, reason=reason)
    fields |= {"command": f"{SERVE_OWN} {path}"}
    on_cuda = fields["device"] != VLLM_PLUGIN.device
    fields |= facts.cache(NUMBER_BYTES, unpacks=on_cuda)
    if on_cuda:
        kernels = "; its kernels for CUDA were compiled, not run" if facts.served.startswith("mla") else ""
        return Verdict(**fields, status=NOT_TRIED, reason=f"{PLUGIN} was tested on the CPU only{kernels}")
    if facts.served not in VLLM_PLUGIN.kinds:
        return Verdict(**fields, status=NOT_TRIED, reason=f"no test covers {PLUGIN} with this kind of checkpoint")
    return Verdict(**fields, status=LOADS_WITH, reason=f"ran in vllm-cpu {VLLM_PLUGIN} with {PLUGIN}")


def _not_by_its_class(
    facts: Facts, fields: dict[str, str], sizes: str, remedy: str | None, serve: str
) -> Verdict | None:
    """Return the verdict on MLA that vLLM's own class refuses, or computes differently; else None."""
    if facts.structure != MLA:
        return None
    if refusal := sizes if facts.activation == "silu" else f"its class supports SiLU only, not {facts.activation}":
        return Verdict(**fields, status=REFUSED, command=None, reason=refusal, remedy=remedy)
    parts = ["drops the biases"] * facts.biases + ["treats the RoPE frequency list as YaRN"] * facts.frequency_list
    if not parts:
        return None
    fields = {**fields, **facts.cache(NUMBER_BYTES), "command": f"{serve} --model-impl transformers"}
    reason = f"its own class {' and '.join(parts)}; its transformers backend was not tried"
    return Verdict(**fields, status=NOT_TRIED, reason=reason, remedy=facts.again_for("vllm", OURS))
