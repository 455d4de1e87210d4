"""Ceilings of GPUs: what a kernel can reach at best."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_SECONDS = 4e-6
"""What a launch adds in a replayed CUDA graph: an assumption, with which two launches at H200 bandwidth equal the time
of 30,000 tokens of a 512 + 64 latent, below which measurements see launches rule."""


@dataclass(frozen=True)
class GPU:
    """The ceilings of a GPU.

    Attributes:
        bytes_per_second: of a copy, bytes read and bytes written both counted; a kernel that only reads is held
            against the same rate.
        flops_per_second: of dense bf16 matrix products.
        processors: multiprocessors.
        memory_bytes: of all.
        source: where the two rates come from, in words for a report.
    """

    name: str
    bytes_per_second: float
    flops_per_second: float
    processors: int
    memory_bytes: float
    source: str
    launch_seconds: float = LAUNCH_SECONDS

    @property
    def ridge(self) -> float:
        """FLOPs a byte from which on products take longer than reading."""
        return self.flops_per_second / self.bytes_per_second


_SHEET = "vendor's data sheet: peak bandwidth, dense bf16"
GPUS = {
    "h200": GPU(
        "NVIDIA H200",
        4.3e12,
        790e12,
        132,
        141e9,
        "published measurements: device-to-device copy, read + write; bf16 product of 8192 x 8192",
    ),
    "h100": GPU("NVIDIA H100 SXM", 3.35e12, 989e12, 132, 80e9, _SHEET),
    "a100": GPU("NVIDIA A100 SXM 80GB", 2.039e12, 312e12, 108, 80e9, _SHEET),
}
