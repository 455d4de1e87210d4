"""Compilation of every operation at sizes of real models: spills, shared memory, matrix instructions."""

import pytest
from compilation import SHARED_LIMITS
from kernel_checks import compiled
from kernel_examples import collect


@pytest.mark.parametrize("case", collect("COMPILED"), ids=str)
def test_launches_compile_without_spills(case):
    for name, facts in compiled(case.cases, case.capabilities).items():
        for capability in case.capabilities:
            result, where = facts[str(capability)], f"{name} on sm_{capability}: {facts}"
            assert result["spill_bytes"] <= case.spilled(name, capability), where
            assert result["stack_bytes"] == 0 or case.frames, where
            assert result["shared_bytes"] <= SHARED_LIMITS[capability], where
            assert case.mma(name, capability, result["mma"]), where


@pytest.mark.slow
def test_two_programs_of_the_widest_latent_fit_into_a_multiprocessor():
    (facts,) = compiled("compile_mla_decode:first_launches").values()
    for capability, result in facts.items():
        assert result["spill_bytes"] == 0 and result["mma"] == ["mma"]
        assert (
            2 * result["shared_bytes"] <= SHARED_LIMITS[90] and result["shared_bytes"] <= SHARED_LIMITS[int(capability)]
        )
