"""Rank allocation of a slice: the latents that every block keeps, by the energies in the conversion's report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surgery.architectures.sliced import LatentModel, Ranks
from surgery.calibration.settings import NO_CALIBRATION
from surgery.checkpoint.file_kinds import REPORT
from surgery.common.errors import SurgeryError
from surgery.reporting.report import read_report
from surgery.transforms.allocation import proportional, water_fill

STRUCTURES = ("lowrank", "mla")
"""Targets of ``--to`` whose results have latents."""

LOSS_WEIGHTED = ("fisher", "separate")
"""Methods whose energies are shares of one loss, and therefore comparable between layers."""


@dataclass(frozen=True)
class Origin:
    """Conversion that made a checkpoint's latents.

    Attributes:
        target: the report's entry of the target.
        source_bytes: KV bytes per token of the conversion's source.
        energies: energies of all latents of the conversion, by layer and block; a sliced checkpoint has fewer latents.
        comparable: whether energies of different layers have the same unit.
    """

    target: dict
    source_bytes: float
    energies: list[list[Tensor]]
    comparable: bool

    @classmethod
    def of(cls, path: Path) -> Origin:
        """Read the origin from the report next to a checkpoint, or from the previous reports in it.

        Raises:
            SurgeryError: there is no report of such a conversion, or the latents are not in the order of energies.
            ValueError: the report holds an invalid size or energy.
        """
        for report in _history(path):
            target = report["target"]
            if target.get("hadamard"):
                raise SurgeryError.at(path, "a Hadamard rotation mixed its latents; slice before --to quantized")
            if target["to"] in STRUCTURES and "sliced" not in target:
                break
        else:
            raise SurgeryError.at(
                path,
                f"no {REPORT} of a conversion to latents next to the weights, which surgery slice requires; convert "
                "the source again",
            )
        if any("energies" not in layer for layer in report["layers"]):
            raise SurgeryError.at(path, f"{REPORT} has no energies of the latents; convert the source again")
        method, settings = target["method"], report["settings"]
        source_bytes = report["kv"]["source_bytes_per_token"]
        if not 0 < source_bytes < math.inf:
            raise ValueError("invalid budget in the report")
        return cls(
            target,
            source_bytes,
            [_by_block(layer) for layer in report["layers"]],
            method in LOSS_WEIGHTED and settings["calibration"] != NO_CALIBRATION,
        )


def plan_slice(
    path: Path, model: LatentModel, origin: Origin, kv_ratio: float, itemsize: int, allocate: str
) -> dict[str, Ranks]:
    """Plan the candidate ranks of a slice, by name of the allocation; all spend the whole budget.

    Args:
        path: path of the checkpoint, for errors.
        kv_ratio: share of the KV bytes per token of the original source, without a residual window.
        itemsize: bytes per cached element.
        allocate: "spectrum" drops the least total energy, "uniform" the same share of every block. "auto" returns both
            and their mean, to be measured, if energies are comparable.

    Raises:
        SurgeryError: the budget is not less than the checkpoint's bytes or leaves a block without a latent, or the
            allocation is impossible.
        ValueError: the report does not fit the checkpoint.
    """
    if allocate == "spectrum" and not origin.comparable:
        raise SurgeryError.at(
            path,
            f"--allocate spectrum needs latents measured by the loss, which method "
            f"{origin.target['method']} does not do; use --allocate uniform",
        )
    for energies, ranks in zip(origin.energies, model.ranks, strict=True):
        if any(len(block) < rank for block, rank in zip(energies, ranks, strict=True)):
            raise ValueError("fewer energies than latents")
    before = [rank for ranks in model.ranks for rank in ranks]
    fixed = sum(model.fixed(layer) for layer in range(model.layers))
    share = itemsize / origin.source_bytes
    if kv_ratio >= (sum(before) + fixed) * share:
        raise SurgeryError.at(
            path,
            f"has {(sum(before) + fixed) * share:.4g} of the KV bytes of its original source; "
            f"--kv-ratio {kv_ratio:g} must be less",
        )
    least = len(before)
    total = int(kv_ratio / share + 1e-6) - fixed
    if total < least:
        raise SurgeryError.at(
            path,
            f"--kv-ratio {kv_ratio:g} is too small: one latent in each of "
            f"{len(before)} blocks and {fixed} other elements need {(least + fixed) * share:.4g}",
        )
    # In proportion to the original ranks, so that slicing a slice equals slicing the whole checkpoint.
    sizes = [len(energies) for blocks in origin.energies for energies in blocks]
    plans = {"uniform": proportional(sizes, total, maximum=before)}
    if allocate != "uniform" and origin.comparable:
        spectra = [
            energies[:rank]
            for blocks, ranks in zip(origin.energies, model.ranks, strict=True)
            for energies, rank in zip(blocks, ranks, strict=True)
        ]
        plans["spectrum"] = water_fill(spectra, total)
        means = [(a + b) / 2 for a, b in zip(*plans.values(), strict=True)]
        plans["between"] = proportional(means, total, maximum=before)
    return {name: _shaped(ranks, model) for name, ranks in plans.items() if allocate in ("auto", name)}


def _shaped(ranks: list[int], model: LatentModel) -> Ranks:
    """Group the ranks of all blocks by layer."""
    remaining = iter(ranks)
    return tuple(tuple(next(remaining) for _ in blocks) for blocks in model.ranks)


def _history(path: Path) -> Iterator[dict]:
    """Yield the report of a checkpoint, then the report of its source, and so on."""
    report = read_report(path)
    while report is not None:
        yield report
        report = report.get("previous")


def _by_block(layer: dict) -> list[Tensor]:
    energies = torch.tensor(layer["energies"], dtype=torch.float64)
    if not bool((energies >= 0).all() and energies.isfinite().all()):
        raise ValueError("energies are not shares of a loss")
    return list(energies.split(layer.get("ranks") or [len(energies)]))
