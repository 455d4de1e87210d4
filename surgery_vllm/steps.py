"""Decode steps by the kernels of :mod:`surgery.kernels`: where they run, and what vLLM may record of them.

A step is a request with one new token. Kernels read vLLM's pages as they lie, by its block table and lengths on the
device. Their grids and scratch follow from the number of requests and vLLM's longest context, and the host reads
nothing: so a step can be recorded in a CUDA graph. Prompts, and steps where no kernel runs, are plain PyTorch.

Shapes here: B requests, H query heads, w elements of a query, r rank of the latent, ρ width of the rotated key, G gains
of a token (with q/k-norm).
"""

import os
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport

from surgery.kernels.backend import refusal
from surgery.kernels.mla_decode.operator import mla_decode
from surgery_vllm.backend import PagedBuilder, PagedMetadata, Steps
from surgery_vllm.vector_cache import VectorBackend, VectorCache

KERNELS = "SURGERY_KERNELS"
"""Environment variable; 0 keeps steps in PyTorch. Kernels run on CUDA, and on CPUs under TRITON_INTERPRET=1."""

logger = init_logger(f"vllm.{__name__}")


class StepBuilder(PagedBuilder):
    """Hands steps to kernels if all layers of the model that have a `step` can take them."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.has_kernels = logged(refusal_of_model(vllm_config, device)) is None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Tell whether steps can be recorded: no batch with a prompt or with drafts."""
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
    """The cache of a layer of MLA in the model's dtype, whose steps `mla_decode` reads.

    Args:
        rank: r.
        gains: those of the heads of this process, see `latent_attention`; None: there are none.
    """

    def __init__(self, *arguments: Any, rank: int, gains: slice | None, **settings: Any):
        super().__init__(*arguments, backend=StepBackend, **settings)
        self.rank, self.gains = rank, gains

    def step(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata) -> Tensor:
        """Return the latents that heads mix, [B, H, r], of queries [B, H, r + ρ] in their space."""
        vectors, width = kv_cache[:, 0], query.shape[-1]
        gain = None if self.gains is None else vectors[..., width:][..., self.gains]
        latent, rope_key = vectors[..., : self.rank], vectors[..., self.rank : width]
        return over_pages(query.to(vectors.dtype), latent, rope_key, gain, self.impl.scale, metadata.steps)


def over_pages(
    query: Tensor, latent: Tensor, rope_key: Tensor, key_gain: Tensor | None, scale: float, steps: Steps
) -> Tensor:
    """Attention of queries [B, H, r + ρ] over pages [P, tokens of a page, r], [·, ·, ρ] and [·, ·, G] → [B, H, r]."""
    pages, lengths = steps.pages, steps.lengths
    out, _ = mla_decode(query[:, None], latent, rope_key, scale, lengths=lengths, pages=pages, key_gain=key_gain)
    return out[:, 0]


def logged(reason: str | None) -> str | None:
    """Say once why decode steps run in PyTorch, if there is a reason, which is returned."""
    if reason:
        logger.info_once("Decode steps of latent attention run in plain PyTorch: %s.", reason)
    return reason


def refusal_of_kernels(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why no kernel runs on tensors of a dtype on a device; None if kernels do."""
    return f"{KERNELS}=0" if os.environ.get(KERNELS) == "0" else refusal(torch.empty(0, dtype=dtype, device=device))


def refusal_of_model(vllm_config: VllmConfig, device: torch.device) -> str | None:
    """Return why the steps of a loaded model run in PyTorch; None if kernels take those of all layers with a `step`."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    caches = [layer for layer in layers if isinstance(layer, VectorCache) and layer.attn_backend is StepBackend]
    reasons = (refusal_of_kernels(vllm_config.model_config.dtype, device), *(cache.refusal() for cache in caches))
    return next(filter(None, reasons), None)
