"""Candidate splits of a KV budget between rotary dimensions and latent."""

from __future__ import annotations

from surgery.common.errors import SurgeryError
from surgery.engines.limits import FAST_ROPE, mla_limits
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.rope import default_theta
from surgery.structures.mla.settings import ConvertSettings
from surgery.transforms.mla import METHODS, Split

# Candidate shares of rotary dimensions in the budget. The best share is less than a third for small budgets, two fifths
# or more at half of the cache, and smaller for real models than for the demo model.
ROPE_SHARES = (0.125, 0.2, 0.3, 0.375, 0.45)


def candidate_splits(settings: ConvertSettings, anatomy: AttentionAnatomy, reserved: int) -> list[Split]:
    """List the splits that the settings allow; a single one if they leave no choice.

    ``anatomy`` is any layer's; ``reserved`` are elements per token that are cached next to latent and rotated keys.
    Raises SurgeryError: the budget is impossible.
    """
    full = anatomy.kv_width
    pairs, max_rope = anatomy.head_dim // 2, anatomy.kv_heads * anatomy.head_dim
    if settings.kv_lora_rank is not None and settings.rope_dim is not None:
        if settings.kv_ratio is not None:
            raise SurgeryError(
                "pass either kv_ratio or both kv_lora_rank and rope_dim, not all three", setting="kv_lora_rank"
            )
        sizes = [(settings.rope_dim, settings.kv_lora_rank)]
    else:
        ratio = 0.25 if settings.kv_ratio is None else settings.kv_ratio
        budget = int(ratio * full + 1e-9) - reserved
        if settings.kv_lora_rank is not None:
            sizes = [((budget - settings.kv_lora_rank) // 2 * 2, settings.kv_lora_rank)]
        elif settings.rope_dim is not None:
            sizes = [(settings.rope_dim, budget - settings.rope_dim)]
        else:
            shares = {min(max(2, 2 * round(budget * share / 2)), max_rope) for share in ROPE_SHARES}
            sizes = [(rope, budget - rope) for rope in sorted(shares)]
            if METHODS[settings.method].folds:
                sizes = [_folded_size(budget, pairs)]
        if budget < 2:
            raise SurgeryError(
                f"kv_ratio {ratio:g} leaves {budget} of {full} elements per token and layer; raise kv_ratio",
                setting="kv_ratio",
            )
    if settings.engine is not None:
        sizes = _engine_sizes(settings, anatomy, sizes)
    elif settings.rope_frequencies == "grid":
        sizes = list(dict.fromkeys((min(rope, 2 * pairs), rank + max(0, rope - 2 * pairs)) for rope, rank in sizes))
    for rope, rank in sizes:
        _check(rope, rank, reserved, full, max_rope)
    if not METHODS[settings.method].folds:
        return [Split(rope, rank) for rope, rank in sizes]
    return [Split(rope, rank, fold) for rope, rank in sizes for fold in _folds(settings, rope, pairs)]


def _engine_sizes(
    settings: ConvertSettings, anatomy: AttentionAnatomy, sizes: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the nearest sizes (nonzero rotary dimensions, rank) that the engine supports within the same bytes."""
    limits = mla_limits(settings.engine, anatomy.head_dim, anatomy.value_dim)
    grid = 2 * default_pairs(anatomy)
    nearest = []
    for rope, rank in sizes:
        width = rope + rank
        if limits.head_sizes is None and limits.width is not None and grid < FAST_ROPE:
            fast = False  # rotated keys are not padded with zeros
        else:
            fast = limits.width is not None and width >= limits.width
        if fast and settings.kv_lora_rank is None:
            width = limits.width
        cached = FAST_ROPE if limits.head_sizes or fast else min(rope, grid)
        nearest.append((min(cached, grid), width - cached))
    return list(dict.fromkeys(nearest))


def default_pairs(anatomy: AttentionAnatomy) -> int:
    """Count the highest frequencies that form default RoPE: all, unless RoPE scaling changes the lower ones."""
    count = anatomy.head_dim // 2
    while count > 1 and default_theta(anatomy.inv_freq[:count]) is None:
        count -= 1
    return count


def _check(rope: int, rank: int, reserved: int, full: int, max_rope: int) -> None:
    if rope < 0 or rope > max_rope or rope % 2:
        raise SurgeryError(f"rope_dim {rope} is not possible: choose an even number up to {max_rope}")
    if rank < 1:
        raise SurgeryError(
            f"the rotary dimensions that the engine or rope_dim asks for leave no room for a latent: raise kv_ratio by "
            f"{(1 - rank) / full:.2g} or more, or lower rope_dim if the engine supports it"
        )
    if rope + rank + reserved >= full:
        numbers = f"{rope} + {rank + reserved} elements per token"
        raise SurgeryError(f"{numbers} are not fewer than the source's {full}: lower kv_lora_rank or rope_dim")


def _folded_size(budget: int, pairs: int) -> tuple[int, int]:
    """Return TransMLA's rotary dimensions, a head width or a power-of-two part, up to half of the budget; and rank."""
    rope = 2 * pairs
    while rope > 2 and rope > budget / 2:
        rope //= 2
    return rope, budget - rope


def _folds(settings: ConvertSettings, rope: int, pairs: int) -> list[int]:
    """List the folds that divide the frequencies, from the smallest possible to eight times it."""
    if rope == 0 or pairs % (rope // 2):
        raise SurgeryError(f"method transmla: rope_dim must divide {2 * pairs}, unlike {rope}", setting="method")
    smallest = pairs // (rope // 2)
    if settings.freqfold is None:
        return [smallest * 2**i for i in range(4) if pairs % (smallest * 2**i) == 0]
    if settings.freqfold % smallest or pairs % settings.freqfold:
        raise SurgeryError(
            f"freqfold must be a multiple of {smallest} that divides {pairs}, not {settings.freqfold}",
            setting="freqfold",
        )
    return [settings.freqfold]
