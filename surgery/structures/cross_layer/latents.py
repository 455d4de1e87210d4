"""``surgery convert --to crosslayer --method xkv`` for MLA checkpoints of the custom model class.

Rotated keys stay unchanged. The latents of a group share one basis, computed as for keys and values in
:mod:`surgery.structures.cross_layer.structure`, from moments and gradients at the output of ``kv_down``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from surgery.architectures.cross_layer import REASON
from surgery.architectures.own_class import MODEL_TYPE
from surgery.calibration.cross_layer_statistics import moment_of
from surgery.calibration.sweep import BoundaryStore, forward_sweep
from surgery.checkpoint import CheckpointReader, CheckpointWriter, TensorSpec
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.families.base import ATTENTION_PREFIX
from surgery.families.softmax import Softmax
from surgery.model.attention_functions import normalize_heads, rotate_pairs
from surgery.model.cross_layer_entry import SharedLatentEntry
from surgery.model.parts import entries_of
from surgery.reporting.report import SourceShape
from surgery.running.activations import give_back
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.moment_precision import MomentPrecision
from surgery.running.source import OwnSource
from surgery.structures.base import LONG, Forecast, Outcome, Structure
from surgery.structures.context import ConversionContext
from surgery.structures.cross_layer.budget import shared_rank
from surgery.structures.cross_layer.report import SHARED, GroupReport, cross_layer_target
from surgery.structures.cross_layer.settings import CrossLayerSettings
from surgery.structures.estimates import Demand
from surgery.structures.stages import StageTracker
from surgery.transforms.algebra import damp
from surgery.transforms.cross_layer import SharedBasis, SimulatedGroup, SimulatedMember, shared_basis


class LatentSource(OwnSource):
    """Opened MLA checkpoint of the custom model class."""

    @classmethod
    def open(cls, reader: CheckpointReader, settings: CrossLayerSettings) -> LatentSource:
        """Open the checkpoint; raise SurgeryError if the method is not xkv, or a layer not MLA with full attention."""
        if settings.method != "xkv":
            raise SurgeryError.at(reader.path, f"latents are shared with method xkv only, not {settings.method}")
        opened = super().open(reader, settings)
        kinds = {entry.kind for entry in entries_of(opened.config)}
        if kinds != {"latent"}:
            names = ", ".join(sorted(str(kind or "the family's own") for kind in kinds))
            raise SurgeryError.at(reader.path, f"only MLA layers can share latents, not layers of kind {names}")
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


class SharedLatents(Structure[LatentSource, CrossLayerSettings]):
    """Conversion of MLA to latents in a basis that a group of layers shares."""

    def __init__(self, opened: LatentSource, settings: CrossLayerSettings, progress: Progress):
        super().__init__(opened, settings, progress)
        size, layers = settings.group_size, opened.layers
        self._groups = [(i, min(i + size, layers)) for i in range(0, layers, size)]
        self._ranks = [
            shared_rank(sum(map(opened.rank, span)), len(span), settings, sum(map(opened.positional, span)))
            for span in (range(start, stop) for start, stop in self._groups)
        ]
        self._dtype = opened.reader.info(ATTENTION_PREFIX.format(layer=0) + "kv_down.weight").dtype

    @classmethod
    def open(cls, reader: CheckpointReader, settings: CrossLayerSettings) -> LatentSource:
        """Open an MLA checkpoint of the custom model class."""
        return LatentSource.open(reader, settings)

    def forecast(self) -> Forecast:
        """Forecast the conversion; config and shapes do not depend on the calibration."""
        opened = self.opened
        config, tensors = _planned(opened, self._groups, self._ranks, self._dtype, self.settings)
        return Forecast(
            config=config,
            tensors=tensors,
            kv_bytes_per_token=kv_bytes_of(config, self._dtype)(LONG) / LONG,
            model_type=MODEL_TYPE,
            reasons=[REASON],
            demand=Demand(cached=-(-sum(self._ranks) // opened.layers), statistics=True, gradients=True),
        )

    def gather(self, work: ConversionContext) -> None:
        """Compute the loss metrics of all latents."""
        tokens = work.texts.calibration
        if tokens is None:
            raise SurgeryError("method xkv requires calibration text: drop --calibration none", setting="method")
        if work.processes.is_main:  # these sweeps are not shared between processes
            self._metrics = _metrics(self.opened, tokens, work.store, self.settings, work.progress)

    def plan(self, work: ConversionContext) -> dict[str, TensorSpec]:
        """Return the source's tensors and the added bases."""
        self._config, tensors = _planned(self.opened, self._groups, self._ranks, self._dtype, self.settings)
        return tensors

    def convert_layers(self, work: ConversionContext, writer: CheckpointWriter) -> Outcome:
        """Compute the basis of every group, run the stages through the group and write the basis."""
        opened, settings, dtype = self.opened, self.settings, self._dtype
        runs, reports = work.stage_runs((SHARED,)), []
        with work.progress.phase("convert", opened.layers) as advance:
            for (start, stop), rank in zip(self._groups, self._ranks, strict=True):
                moment = _joint_moment(opened, work.store, start, stop, settings.batch_size)
                basis = shared_basis(moment, self._metrics[start:stop], rank)
                reports.append(_run_stages(opened, start, stop, basis, runs, settings))
                for place, (down, up) in enumerate(zip(basis.down, basis.up, strict=True)):
                    prefix = ATTENTION_PREFIX.format(layer=start + place)
                    writer.write(prefix + "basis_down", down.to(dtype).contiguous())
                    writer.write(prefix + "basis_up", up.to(dtype).contiguous())
                advance(stop - start)
        return Outcome(
            config=self._config,
            target=cross_layer_target(settings, self._groups, self._ranks),
            layers=reports,
            scores=runs.scores(),
            simulated=runs.hidden[SHARED],
            own_class=True,
            shape=SourceShape.of_config(opened.config, dtype, kv_bytes_of(opened.reader.config, dtype)(1)),
        )


def _planned(
    opened: LatentSource,
    groups: Sequence[tuple[int, int]],
    ranks: Sequence[int],
    dtype: torch.dtype,
    settings: CrossLayerSettings,
) -> tuple[dict[str, Any], dict[str, TensorSpec]]:
    """Return config.json and tensor specs of the result."""
    reader = opened.reader
    tensors = {name: TensorSpec(reader.info(name).dtype, reader.info(name).shape) for name in reader.names()}
    layers = []
    for (start, stop), rank in zip(groups, ranks, strict=True):
        for index in range(start, stop):
            latent = entries_of(opened.config)[index]
            entry = SharedLatentEntry(
                kv_lora_rank=latent.kv_lora_rank,
                rope_inv_freq=latent.rope_inv_freq,
                key_norm_eps=latent.key_norm_eps,
                group_size=stop - start,
                place=index - start,
                rank=rank,
                block=settings.block,
                sinks=settings.sinks,
                window=settings.window,
            )
            layers.append(entry.to_entry())
            prefix, width = ATTENTION_PREFIX.format(layer=index), opened.rank(index)
            tensors[prefix + "basis_down"] = TensorSpec(dtype, (rank, width))
            tensors[prefix + "basis_up"] = TensorSpec(dtype, (width, rank))
    return {**reader.config, "attention_layers": layers}, tensors


def _metrics(
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
def _joint_moment(opened: LatentSource, store: BoundaryStore, start: int, stop: int, batch_size: int) -> Tensor:
    """Compute ``E[z zᵀ]`` of the stacked latents, float64 [Σ r, Σ r]."""
    stream = opened.stream
    inputs = [store.load(index) for index in range(start, stop)]
    maps = []
    for index in range(start, stop):
        parts = (*(stream.input_norm(index) or (None, None)), *opened.down(index))
        maps.append([None if part is None else part.to(stream.device, stream.dtype) for part in parts])

    def cached(place: int, hidden: Tensor) -> Tensor:
        scale, shift, weight, bias = maps[place]
        x = hidden.to(stream.device, stream.dtype)
        return nn.functional.linear(x if scale is None else stream.normalize(x, scale, shift), weight, bias)

    return moment_of(inputs, batch_size, cached)


@torch.no_grad()
def _run_stages(
    opened: LatentSource,
    start: int,
    stop: int,
    basis: SharedBasis,
    runs: StageTracker,
    settings: CrossLayerSettings,
) -> GroupReport:
    """Run both stages through a group and report its errors."""
    stream, hidden = opened.stream, runs.hidden
    with stream.block(start, stop) as layers:
        recent = (settings.block, settings.sinks, settings.window)
        members = [SimulatedLatents(layer.self_attn, *recent) for layer in layers.model.layers]
        group = SimulatedGroup(members, basis.to(stream.device, stream.dtype).rebuild)
        sample = runs.sample()
        expected = layers(sample)
        error = float((group.run(layers, sample) - expected).norm() / (expected - sample).norm())
        (group_error,) = group.errors()
        for rows in hidden[SHARED].split(settings.batch_size):
            rows.copy_(group.run(layers, rows.to(stream.device, stream.dtype)))
        stream.run_layer(layers, hidden["source"], settings.batch_size)
    return GroupReport(
        f"{start}-{stop - 1}", (len(basis.down[0]),), 0, group_error, group_error, basis.error, {SHARED: error}
    )


class SimulatedLatents(SimulatedMember):
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
        read, place, visible = self._read(latent)
        positional = self._positional[:, place]

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
