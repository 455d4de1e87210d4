"""Decode steps with the kernels of :mod:`surgery.kernels`, and their support of CUDA graphs.

A step is a request with one new token. Kernels read vLLM's pages in place, with its block table and lengths on the
device. Their grids and scratch memory depend only on the number of requests and vLLM's longest context, and nothing is
copied to the host, so steps can be captured in CUDA graphs. Prompts, and steps without a kernel, run in plain PyTorch.

Shapes: B requests, H query heads, w elements of a query, r rank of the latent, ρ width of the rotated key, G gains of a
token (with q/k-norm).
"""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport

from surgery.kernels import cpu
from surgery.kernels.backend import refusal
from surgery.kernels.mla_decode.operator import mla_decode
from surgery_vllm.backend import PagedBuilder, PagedMetadata, Steps
from surgery_vllm.vector_cache import VectorBackend, VectorCache

KERNELS = "SURGERY_KERNELS"
"""Environment variable; 0 runs steps in PyTorch. Kernels run on CUDA, and on CPUs with TRITON_INTERPRET=1."""

logger = init_logger(f"vllm.{__name__}")


class StepBuilder(PagedBuilder):
    """Builder that has kernels read decode steps if all layers with a `step` support it."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.has_kernels = logged(refusal_of_model(vllm_config, device)) is None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return whether steps can be captured: only batches of single-token decodes, on CUDA with kernels."""
        device = torch.device(vllm_config.device_config.device)
        if device.type != "cuda" or refusal_of_model(vllm_config, device):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class StepBackend(VectorBackend):
    """Backend of caches with a `step`."""

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder


class LatentCache(VectorCache):
    """Cache of an MLA layer in the model's dtype, whose steps run in `mla_decode`.

    Args:
        rank: r.
    """

    def __init__(self, *arguments: Any, rank: int, **settings: Any):
        super().__init__(*arguments, backend=StepBackend, **settings)
        self.rank = rank

    def step(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata) -> Tensor:
        """Compute attention-weighted latents [B, H, r] of queries [B, H, r + ρ] in latent space."""
        vectors, width = kv_cache[:, 0], query.shape[-1]
        latent, rope_key, gains = vectors.tensor_split([self.rank, width], dim=-1)
        return over_pages(query.to(vectors.dtype), latent, rope_key, gains, self.impl.scale, metadata.steps)


def over_pages(query: Tensor, latent: Tensor, rope_key: Tensor, gains: Tensor, scale: float, steps: Steps) -> Tensor:
    """Run `mla_decode`: queries [B, H, r + ρ], pages [P, tokens of a page, r], [·, ·, ρ] and [·, ·, G] → [B, H, r]."""
    pages, lengths, key_gain = steps.pages, steps.lengths, gains if gains.shape[-1] else None
    out, _ = mla_decode(query[:, None], latent, rope_key, scale, lengths=lengths, pages=pages, key_gain=key_gain)
    return out[:, 0]


def logged(reason: str | None) -> str | None:
    """Log once why decode steps run in PyTorch, if there is a reason; return it."""
    if reason:
        logger.info_once("Decode steps of latent attention run in plain PyTorch: %s.", reason)
    return reason


def refusal_of_kernels(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why no kernel runs for a dtype and device; None if kernels run."""
    return f"{KERNELS}=0" if os.environ.get(KERNELS) == "0" else refusal(torch.empty(0, dtype=dtype, device=device))


def refusal_of_cpu_kernels() -> str | None:
    """Return why no C++ kernel runs on this CPU; None if they are loaded."""
    return f"{KERNELS}=0" if os.environ.get(KERNELS) == "0" else cpu.load()


def refusal_of_model(vllm_config: VllmConfig, device: torch.device) -> str | None:
    """Return why the steps of a loaded model run in PyTorch; None if kernels support all layers with a `step`."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    caches = [layer for layer in layers if isinstance(layer, VectorCache) and layer.attn_backend is StepBackend]
    reasons = (refusal_of_kernels(vllm_config.model_config.dtype, device), *(cache.refusal() for cache in caches))
    return next(filter(None, reasons), None)
