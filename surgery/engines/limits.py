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


def cache_dtype_flags(engine: str, bits: int | str) -> str:
    """An engine's own quantised cache nearest to ``bits``, those of ``--to quantized``.

    As their sources name it; none of them was tried.
    """
    if engine not in ENGINES:
        raise SurgeryError(f"engine {engine!r} is unknown: choose {', '.join(ENGINES)}")
    if engine == "vllm":
        names = {8: "int8_per_token_head", 4: "int4_per_token_head", "fp8": "fp8"}
        return f"vllm serve CKPT --kv-cache-dtype {names.get(bits, 'int4_per_token_head')}"
    if engine == "sglang":
        return "python -m sglang.launch_server --model-path CKPT --kv-cache-dtype fp8_e4m3"
    if engine == "llama.cpp":
        name = "q4_0" if bits in (4, 3, 2) else "q8_0"
        return f"llama-server -m CKPT.gguf -fa on -ctk {name} -ctv {name}"
    if engine == "mlx":
        return f"mlx_lm.generate --model CKPT --kv-bits {8 if bits in (8, 'fp8') else bits}"
    raise SurgeryError("--to quantized --engine all: every engine has cache types of its own, name one engine")
