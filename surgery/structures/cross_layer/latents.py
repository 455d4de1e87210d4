"""MLA checkpoints of the custom model class as sources of ``surgery convert --to crosslayer --method xkv``.

The basis of a group's latents is computed from moments and gradients at the output of ``kv_down``.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from surgery.calibration.cross_layer_statistics import moment_of
from surgery.calibration.sweep import BoundaryStore, forward_sweep
from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families.base import ATTENTION_PREFIX
from surgery.families.softmax import Softmax
from surgery.model.attention_functions import normalize_heads, rotate_pairs
from surgery.model.parts import entries_of
from surgery.running.activations import give_back
from surgery.running.moment_precision import MomentPrecision
from surgery.running.source import OwnSource
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.transforms.algebra import damp
from surgery.transforms.cross_layer import SimulatedMember


class LatentSource(OwnSource):
    """Opened MLA checkpoint of the custom model class."""

    @classmethod
    def open(cls, reader: CheckpointReader, settings: CrossLayerSettings) -> LatentSource:
        """Open the checkpoint; raise SurgeryError if the method is not xkv, or a layer not MLA with full attention."""
        if settings.method != "xkv":
            raise SurgeryError.at(reader.source, f"latents are shared with method xkv only, not {settings.method}")
        opened = super().open(reader, settings)
        kinds = {entry.kind for entry in entries_of(opened.config)}
        if kinds != {"latent"}:
            names = ", ".join(sorted(str(kind or "the family's own") for kind in kinds))
            raise SurgeryError.at(reader.source, f"only MLA layers can share latents, not layers of kind {names}")
        for layer, window in enumerate(opened.windows):
            if window is not None:
                raise SurgeryError(f"layer {layer} has a sliding window, so its latents cannot be shared")
        return opened

    def rank(self, layer: int) -> int:
        """Return the width of a layer's latent."""
        return entries_of(self.config)[layer].kv_lora_rank

    def positional(self, layer: int) -> int:
        """Return the number of elements that a layer caches next to its latent."""
        return entries_of(self.config)[layer].width(self.config) - self.rank(layer)

    def down(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return weight [r, D] and bias [r] of the projection to the latent."""
        prefix, rank = ATTENTION_PREFIX.format(layer=layer) + "kv_down.", self.rank(layer)
        bias = self.reader.tensor(prefix + "bias")[:rank] if prefix + "bias" in self.reader else None
        return self.reader.tensor(prefix + "weight")[:rank], bias


def latent_metrics(
    opened: LatentSource, tokens: Tensor, store: BoundaryStore, settings: CrossLayerSettings, progress: Progress
) -> list[Tensor]:
    """Compute the damped Fisher information [r, r] of every layer's latent in float64; fills the store on the way."""
    stream, size = opened.stream, settings.batch_size
    with progress.phase("calibrate: forward", stream.num_layers) as advance:
        final = forward_sweep(stream, tokens, store, size, advance)
    generator = torch.Generator().manual_seed(settings.seed)
    upstream = final  # overwritten in place
    for rows in final.split(size):
        rows.copy_(stream.sampled_loss_gradient(rows, generator))
        give_back(final)
    metrics: list[Tensor] = []
    with progress.phase("calibrate: backward", stream.num_layers) as advance:
        for index in reversed(range(stream.num_layers)):
            rank = opened.rank(index)
            precision, metric = MomentPrecision.of(stream.device, 2 * 8 * rank**2), 0
            with stream.layer(index) as layer:
                outputs: list[Tensor] = []
                down = layer.model.layers[0].self_attn.kv_down
                down.register_forward_hook(lambda module, inputs, output, outputs=outputs: outputs.append(output))
                boundary = store.load(index)
                for rows, row_gradients in zip(boundary.split(size), upstream.split(size), strict=True):
                    leaf = rows.to(stream.device, stream.dtype).requires_grad_()
                    outputs.clear()
                    out = layer(leaf)
                    gradient, latent = torch.autograd.grad(out, (leaf, outputs[0]), row_gradients.to(out))
                    flat = latent[..., :rank].flatten(0, 1)
                    metric += precision.gram(flat)
                    row_gradients.copy_(gradient)
                    give_back(boundary, upstream)
            metrics.append(damp(metric.cpu() / tokens.numel()))
            advance()
    return metrics[::-1]


@torch.no_grad()
def joint_latent_moment(opened: LatentSource, store: BoundaryStore, start: int, stop: int, batch_size: int) -> Tensor:
    """Compute ``E[z zᵀ]`` of the stacked latents, float64 [Σ r, Σ r]."""
    stream = opened.stream
    inputs = [store.load(index) for index in range(start, stop)]
    maps = []
    for index in range(start, stop):
        parts = (*(stream.input_norm(index) or (None, None)), *opened.down(index))
        maps.append([None if part is None else part.to(stream.device, stream.dtype) for part in parts])

    def cached(member: int, hidden: Tensor) -> Tensor:
        scale, shift, weight, bias = maps[member]
        x = hidden.to(stream.device, stream.dtype)
        return nn.functional.linear(x if scale is None else stream.normalize(x, scale, shift), weight, bias)

    return moment_of(inputs, batch_size, cached)


class SimulatedOwnLatents(SimulatedMember):
    """Surrogate MLA whose z are the latents of a :class:`surgery.model.LatentAttention`."""

    def __init__(self, attention: nn.Module, block: int, sinks: int, window: int):
        super().__init__(block, sinks, window)
        # A namespace, so that the replaced module does not become a submodule.
        self._own = SimpleNamespace(attention=attention)
        self._positional: Tensor | None = None

    @property
    def parts(self) -> list[int]:
        """Width of the latent."""
        return [self._own.attention.kv_lora_rank]

    def forward(self, hidden_states: Tensor, **kwargs) -> tuple[Tensor, None]:
        own = self._own.attention
        if self.exact is None:
            self._positional = None
        first = 0 if self.exact is None else self.exact.shape[1]
        tokens = hidden_states.shape[1]
        cos, sin = own.rotary(torch.arange(first, first + tokens, device=hidden_states.device)[None])
        latent, rope = own.kv_down(hidden_states).split((own.kv_lora_rank, own.rope_dim), dim=-1)
        positional = rotate_pairs(rope[:, None], cos, sin)[:, 0]
        if own.key_norm_eps is not None:
            keys = own.k_proj(hidden_states).unflatten(-1, (own.key_gains, -1))
            gain = (keys.square().mean(-1) + own.key_norm_eps).rsqrt()
            positional = torch.cat([positional, gain], dim=-1)
        self._positional = positional if self._positional is None else torch.cat([self._positional, positional], dim=1)
        read, positions, visible = self._read(latent)
        positional = self._positional[:, positions]

        query = own.q_proj(hidden_states).unflatten(-1, (own.num_heads, own.head_dim))
        query = normalize_heads(own.q_norm, query)
        query = torch.einsum("bthd,hdk->bhtk", query, own.query_up)
        content, turned = query.split((own.kv_lora_rank, own.rope_dim), dim=-1)
        logits = content @ read.mT[:, None] + rotate_pairs(turned, cos, sin) @ positional[:, None, :, : own.rope_dim].mT
        if own.key_norm_eps is not None:
            gain = positional[..., own.rope_dim :].mT  # [B, G, K]
            logits = logits * gain.repeat_interleave(own.num_key_value_groups, dim=1)[:, :, None]
        cap, sinks = (getattr(at, name, None) for at, name in ((own.config, "attn_logit_softcapping"), (own, "sinks")))
        weights = Softmax(own.scaling, cap, sinks).weights(logits, visible)
        out = torch.einsum("bhtk,bkr,hvr->bthv", weights, read, own.value_up)
        return own.o_proj(out.flatten(2)), None
