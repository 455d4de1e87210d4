"""Limits of ``convert --engine``: the sizes that an engine's kernels for MLA are built for.

vLLM on CUDA before Blackwell runs the prompt by FlashAttention, for some sizes of heads only
(``FlashAttnPrefillBackend.supports_mla_dimensions``). FlashMLA, the fastest for decoding there and in SGLang, reads 576
numbers per token, as does llama.cpp's flash attention on CUDA; vLLM's Triton kernel reads any.
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
    """Limits of one engine, for heads of one size.

    Attributes:
        head_sizes: (nope, rope, value) numbers of a head that the weights are padded to, and so the rotary dimensions
            that are cached; None: as they are.
        width: r + rope at which the fastest kernels run, FAST_ROPE of them rotated; budgets beyond it are not spent.
            None: any is as good.
        tied: whether its class takes embeddings that are the output head too.
    """

    head_sizes: tuple[int, int, int] | None = None
    width: int | None = None
    tied: bool = True


def mla_limits(engine: str, head_dim: int, value_dim: int) -> MLALimits:
    """Return an engine's limits of MLA with heads of ``head_dim`` unrotated and ``value_dim`` value dims.

    Raises:
        SurgeryError: the heads are wider than any that it takes.
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
            f"--engine {engine}: heads of {head_dim} numbers and values of {value_dim} fit none of the sizes that "
            f"vLLM's prefill runs on CUDA, {', '.join(map(str, VLLM_MLA_HEADS))}"
        )
    return MLALimits(min(fitting), FAST_WIDTH, tied)
