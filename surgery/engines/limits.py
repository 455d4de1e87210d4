"""Limits of ``convert --engine``: sizes that an engine's MLA kernels support.

On CUDA before Blackwell, vLLM's MLA prefill uses FlashAttention, which supports certain head sizes
(``FlashAttnPrefillBackend.supports_mla_dimensions``). FlashMLA, the fastest decode kernel there and in SGLang, requires
576 elements per token, as does llama.cpp's flash attention on CUDA; vLLM's Triton kernel supports any number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from surgery.common.errors import SurgeryError
from surgery.engines.trials import VLLM_MLA_HEADS

Engine = Literal["vllm", "sglang", "llama.cpp", "mlx", "all"]
ENGINES = get_args(Engine)

FAST_WIDTH, FAST_ROPE = 576, 64


@dataclass(frozen=True)
class MLALimits:
    """MLA limits of an engine for a given head size.

    Attributes:
        head_sizes: (nope, rope, value) dims of a head to which weights are padded, which fixes the cached rotary dims;
            None: no padding.
        width: rank + rope dims of the fastest kernels, FAST_ROPE of them rotary; larger budgets are not used. None:
            any width.
        tied: whether the engine's class supports tied embeddings.
    """

    head_sizes: tuple[int, int, int] | None = None
    width: int | None = None
    tied: bool = True


def mla_limits(engine: str, head_dim: int, value_dim: int) -> MLALimits:
    """Return an engine's MLA limits for heads of ``head_dim`` nope dims and ``value_dim`` value dims.

    Raises SurgeryError: the heads are larger than the engine supports.
    """
    tied = engine not in ("mlx", "all")
    if engine in ("llama.cpp", "mlx"):
        return MLALimits(tied=tied)
    if engine == "sglang":
        return MLALimits(width=FAST_WIDTH)
    fitting = [
        sizes for sizes in VLLM_MLA_HEADS if sizes[1] == FAST_ROPE and sizes[0] >= head_dim and sizes[2] >= value_dim
    ]
    if not fitting:
        raise SurgeryError(
            f"--engine {engine}: head size {head_dim} with value size {value_dim} exceeds the (nope, rope, value) that "
            f"vLLM's prefill supports on CUDA: {', '.join(map(str, VLLM_MLA_HEADS))}"
        )
    return MLALimits(min(fitting), FAST_WIDTH, tied)
