"""Compilation of every operation at sizes of real models: spills, shared memory, matrix instructions."""

import pytest
from compilation import SHARED_LIMITS
from kernel_checks import compiled
from kernel_examples import found


@pytest.mark.parametrize("case", found("COMPILED"), ids=str)
def test_launches_compile_without_spills(case):
    for name, facts in compiled(case.cases, case.capabilities).items():
        for capability in case.capabilities:
            made, where = facts[str(capability)], f"{name} on sm_{capability}: {facts}"
            assert made["spill_bytes"] <= case.spilled(name, capability), where
            assert made["stack_bytes"] == 0 or case.frames, where
            assert made["shared_bytes"] <= SHARED_LIMITS[capability], where
            assert case.mma(name, capability, made["mma"]), where


@pytest.mark.slow
def test_two_programs_of_the_widest_latent_fit_into_a_multiprocessor():
    (facts,) = compiled("compile_mla_decode:first_launches").values()
    for capability, made in facts.items():
        assert made["spill_bytes"] == 0 and made["mma"] == ["mma"]
        assert 2 * made["shared_bytes"] <= SHARED_LIMITS[90] and made["shared_bytes"] <= SHARED_LIMITS[int(capability)]
