"""What the compiler makes of every operation at sizes of real models: spills, shared memory, matrix instructions."""

import pytest
from kernel_checks import compiled

from surgery.kernels.compilation import SHARED_LIMITS

BOTH = (80, 90)
SPILLED = {
    (80, "Llama-3-8B, joint 1024"): 128,
    (80, "Llama-2-7B, blocks of four heads"): 124,
    (80, "Qwen2.5-7B, one head, exact"): 24,
}
"""Bytes, where a few addresses of `lowrank_decode` are over 255 registers."""


def any_kind(name, capability, mma):
    return bool(mma)


def of_a_warp(name, capability, mma):
    return mma == ["mma"] or "decode" not in name or "float32" in name


def of_the_gpu(name, capability, mma):
    return mma == ["wgmma" if capability == 90 else "mma"] or "float32" in name


def among_others(name, capability, mma):
    return ("wgmma" if capability == 90 else "mma") in mma


def of_many_rows(name, capability, mma):
    """Of `mla_decode`: Hopper's where 64 rows are worth them."""
    rows_of_wgmma = capability == 90 and (name.startswith(("40", "128")) or "4 tokens" in name)
    return mma == ([] if "fp32" in name else ["wgmma"] if rows_of_wgmma else ["mma"])


def of_prefill(name, capability, mma):
    return "fp32" in name or mma == ([] if "delta" in name else ["wgmma" if capability == 90 else "mma"])


def none(name, capability, mma):
    return not mma


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    slow("compile_gqa_decode:dense", BOTH, any_kind),
    slow("compile_gqa_decode:quantized", BOTH, any_kind),
    slow("compile_hybrid_decode:hybrid_decode_launch", BOTH, of_a_warp),
    slow("compile_hybrid_decode:hybrid_decode_launches", BOTH, of_a_warp),
    slow("compile_sink_recent_prefill:sink_recent_prefill_launch", BOTH, of_the_gpu),
    slow("compile_sink_recent_prefill:sink_recent_prefill_launches", BOTH, of_the_gpu),
    slow("compile_lowrank_decode:launches_80", (80,), among_others),
    ("compile_lowrank_decode:launches_90", (90,), among_others),
    slow("compile_lowrank_decode:more_launches_80", (80,), among_others),
    slow("compile_lowrank_decode:more_launches_90", (90,), among_others),
    slow("compile_mla_decode:launches_80", (80,), of_many_rows),
    slow("compile_mla_decode:launches_90", (90,), of_many_rows),
    ("compile_mla_decode:quantized_first", (90,), of_the_gpu),
    slow("compile_mla_decode:quantized_80", (80,), of_the_gpu),
    slow("compile_mla_decode:quantized_90", (90,), of_the_gpu),
    slow("compile_mla_prefill:launches_80", (80,), of_prefill),
    slow("compile_mla_prefill:launches_90", (90,), of_prefill),
    slow("compile_split_kv:launches", BOTH, none),
]
WITH_STACK = ("lowrank", "mla_decode:launches", "prefill:launches_")
"""Where a frame on the stack is no spill that counts."""


@pytest.mark.parametrize(("cases", "capabilities", "expected"), CASES)
def test_launches_compile_without_spills(cases, capabilities, expected):
    for name, facts in compiled(cases, capabilities).items():
        for capability in capabilities:
            made, where = facts[str(capability)], f"{name} on sm_{capability}: {facts}"
            if "mla_prefill" not in cases or "fp32" not in name:
                assert made["spill_bytes"] <= SPILLED.get((capability, name), 0), where
            assert made["stack_bytes"] == 0 or any(each in cases for each in WITH_STACK), where
            assert made["shared_bytes"] <= SHARED_LIMITS[capability], where
            assert expected(name, capability, made["mma"]), where


@pytest.mark.slow
def test_two_programs_of_the_widest_latent_fit_into_a_multiprocessor():
    (facts,) = compiled("compile_mla_decode:first_launches").values()
    for capability, made in facts.items():
        assert made["spill_bytes"] == 0 and made["mma"] == ["mma"]
        assert 2 * made["shared_bytes"] <= SHARED_LIMITS[90] and made["shared_bytes"] <= SHARED_LIMITS[int(capability)]
