"""Execution of a causal language model one decoder layer at a time, directly from its checkpoint.

Memory is bounded by one layer and one slice of the vocabulary, or by `SMALL`, whatever the model's size. Each layer
runs as a one-layer model of its transformers class, so masks, position embeddings and expert kernels are those of
transformers, for source and converted checkpoints alike.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from surgery.common.errors import SurgeryError
from surgery.families import Family, family_around
from surgery.families.base import LAYER_PREFIX, per_layer
from surgery.families.llama import LLAMA
from surgery.families.rope import unchanged_length
from surgery.model.attention_functions import own_softmax
from surgery.model.cache_argument import CACHE
from surgery.model.logit_factor import logit_cap, logit_factor
from surgery.model.parts import entries_of
from surgery.running.activations import trim_allocator
from surgery.running.equal_widths import use_equal_widths
from surgery.running.loading import causal_class, loading, with_standard_names, without_initial_values
from surgery.running.overflow import check_hidden, check_sizes, overflow, size_of

SMALL = 2**26
"""Bytes of all layers up to which they stay loaded, since loading takes longer than running."""
VOCABULARY_SLICE = 16_384
TOKEN_SLICE = 2_048
NORM_BIAS = "model.norm.bias"
POSITIONS = "model.embed_positions.weight"
"""Learned position embeddings, added to token embeddings."""


class LayerStream:
    """Causal model whose layers are loaded to run and then dropped, except those of a model up to `SMALL`.

    ``single_layer_config`` returns the config of a one-layer model with layer ``i``; weights are cast to ``dtype``.
    """

    def __init__(
        self,
        reader,
        config,
        single_layer_config: Callable[[object, int], object],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.reader, self.config = reader, config
        self.device, self.dtype = torch.device(device), dtype
        self._single_layer_config = single_layer_config
        self.family = source_family(config)
        names = [name for name in reader.names() if name.startswith(LAYER_PREFIX.partition("{")[0])]
        size = sum(math.prod(reader.info(name).shape) for name in names) * dtype.itemsize
        self._loaded: dict[tuple[int, int], nn.Module] | None = {} if size <= SMALL else None

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed token ids [N, T] to [N, T, D].

        Raises SurgeryError: the texts are so long that query scaling, other LongRoPE frequencies or a second attention
        chunk would apply, which are not simulated.
        """
        unchanged = unchanged_length(self.config)
        if unchanged is not None and tokens.shape[1] > unchanged:
            raise SurgeryError(
                f"{tokens.shape[1]:,} tokens: longrope changes its frequencies beyond {unchanged:,} tokens, which is "
                f"not simulated; use shorter sequences (--calibration-length {unchanged})"
            )
        first_scaled = self.family.first_scaled(self.config)
        if first_scaled is not None and tokens.shape[1] > first_scaled:
            raise SurgeryError(
                f"{tokens.shape[1]:,} tokens: {self.family.model_type} changes its attention from token "
                f"{first_scaled:,} on, which is not simulated; use shorter sequences (--calibration-length "
                f"{first_scaled})"
            )
        ids, inverse = tokens.unique(return_inverse=True)
        rows = self.reader.rows("model.embed_tokens.weight", ids)
        scale = self.family.embedding_scale(self.config)
        rows = rows.to(self.device, self.dtype) if scale == 1.0 else rows.to(self.device, self.dtype) * scale
        embedded = rows[inverse.to(self.device)]
        check_hidden(rows, self.reader, "token embeddings")
        if POSITIONS not in self.reader:
            return embedded
        return embedded + self.reader.rows(POSITIONS, torch.arange(tokens.shape[1])).to(embedded)

    def layer(self, index: int) -> contextlib.AbstractContextManager[StreamedLayer]:
        """Load layer ``index`` for a ``with`` block."""
        return self.block(index, index + 1)

    @contextlib.contextmanager
    def block(self, start: int, stop: int) -> Iterator[StreamedLayer]:
        """Load layers [start, stop) as one model for a ``with`` block.

        Required for layers that share a cross-layer basis or latents. Their entries in ``attention_layers`` must refer
        to each other by index in the group, not in the model.
        """
        streamed = StreamedLayer(self._model(start, stop))
        try:
            yield streamed
        finally:
            streamed.model = None  # the caller's variable outlives the block and would keep the layers in memory
            if self._loaded is None:
                trim_allocator()

    def _model(self, start: int, stop: int) -> nn.Module:
        if self._loaded is None:
            model = self._load(start, stop)
            trim_allocator()  # temporaries of reading and casting
            return model
        if (start, stop) not in self._loaded:
            self._loaded[start, stop] = self._load(start, stop)
        return self._loaded[start, stop]

    def _load(self, start: int, stop: int) -> nn.Module:
        """Load a decoder of layers [start, stop), without vocabulary and final norm."""
        state: dict[str, Tensor] = {}
        for index in range(start, stop):
            prefix, renumbered = LAYER_PREFIX.format(layer=index), LAYER_PREFIX.format(layer=index - start)
            tensors = self.reader.tensors(prefix)
            if not tensors:
                raise SurgeryError.at(
                    self.reader.source, f"layer {index} has no tensors; download the checkpoint again"
                )
            state |= {renumbered + name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        hidden = self.config.hidden_size
        state["model.embed_tokens.weight"] = torch.zeros(1, hidden)
        state["model.norm.weight"] = torch.ones(hidden)
        if NORM_BIAS in self.reader:
            state[NORM_BIAS] = torch.zeros(hidden)
        if POSITIONS in self.reader:  # `embed` adds them
            state[POSITIONS] = torch.zeros(self.reader.info(POSITIONS).shape)
        state["lm_head.weight"] = torch.zeros(1, hidden)
        config = _joined_config([self._single_layer_config(self.config, index) for index in range(start, stop)])
        causal = _model_from_state(config, state, self.dtype)
        if self.device.type == "cpu":
            use_equal_widths(causal)
        model = causal.model.to(self.device)
        state.clear()  # otherwise cast weights would be in memory twice
        return model

    def run_layer(self, layer: StreamedLayer, hidden: Tensor, batch_size: int, attention=None) -> Tensor:
        """Apply a layer to hidden states [N, T, D] in batches, in place."""
        sizes = []
        with torch.no_grad():
            for start in range(0, len(hidden), batch_size):
                batch = hidden[start : start + batch_size].to(self.device, self.dtype)
                output = layer(batch, attention)
                if attention is None:  # simulated attention may overflow although the model does not
                    sizes.append(size_of(output))
                hidden[start : start + batch_size] = output.to(hidden)
        check_sizes(sizes, self.reader, "hidden states")
        return hidden

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm to hidden states [..., D], and the family's scale of the logits."""
        weight = self.reader.tensor("model.norm.weight").to(self.device, self.dtype)
        bias = self.reader.tensor(NORM_BIAS).to(weight) if NORM_BIAS in self.reader else None
        normed = self.normalize(hidden, weight + self.family.norm_offset, bias)
        factor = logit_factor(self.config)
        return normed if factor == 1.0 else normed * factor

    def normalize(self, hidden: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Apply a LayerNorm or RMSNorm, as in the family, to hidden states [..., D]."""
        if self.family.layer_norm:
            eps = getattr(self.config, self.family.norm_eps)
            return nn.functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
        return nn.functional.rms_norm(hidden, hidden.shape[-1:], weight, self.config.rms_norm_eps)

    def input_norm(self, layer: int) -> tuple[Tensor, Tensor | None] | None:
        """Return weight (with the family's offset) and bias [D] of the norm before attention; None without a norm."""
        norm = LAYER_PREFIX.format(layer=layer) + self.family.input_norm
        weight, bias = f"{norm}.weight", f"{norm}.bias"
        if weight not in self.reader:
            return None
        weights = self.reader.tensor(weight) + self.family.norm_offset
        return weights, self.reader.tensor(bias) if bias in self.reader else None

    @property
    def output_name(self) -> str:
        """Name of the output projection's tensor; that of the embeddings if they are tied."""
        return "lm_head.weight" if "lm_head.weight" in self.reader else "model.embed_tokens.weight"

    def output_slices(self) -> Iterator[tuple[int, Tensor]]:
        """Yield slices of the output projection: (first token id, weight [n, D])."""
        vocabulary = self.reader.info(self.output_name).shape[0]
        for start in range(0, vocabulary, VOCABULARY_SLICE):
            ids = torch.arange(start, min(start + VOCABULARY_SLICE, vocabulary))
            yield start, self.reader.rows(self.output_name, ids).to(self.device, self.dtype)

    def slice_logits(self, normed: Tensor, weight: Tensor) -> Tensor:
        """Compute softcapped logits [..., n] of normed states [..., D] for rows [n, D] of the output projection."""
        logits, cap = normed @ weight.T, logit_cap(self.config)
        return logits if cap is None else (logits / cap).tanh() * cap

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., D] before the norm; meant for few tokens."""
        normed = self.final_norm(hidden)
        logits = torch.cat([self.slice_logits(normed, weight) for _, weight in self.output_slices()], dim=-1)
        check_hidden(logits, self.reader, "logits")
        return logits

    @torch.no_grad()
    def loss(self, hidden: Tensor, tokens: Tensor) -> float:
        """Compute the mean cross-entropy in nats per predicted token of final states [N, T, D] before the norm."""
        loss = self.token_losses(hidden, tokens).mean().item()
        if not math.isfinite(loss):
            raise overflow(self.reader, "logits")
        return loss

    @torch.no_grad()
    def token_losses(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Compute cross-entropies [N (T - 1)] in nats, float64, of final states [N, T, D] before the norm."""
        normed = self.final_norm(hidden[:, :-1].to(self.device, self.dtype)).flatten(0, 1)
        labels = tokens[:, 1:].flatten().to(self.device)
        normalizer = torch.full((len(labels),), -torch.inf, device=self.device)
        label_logits = torch.zeros(len(labels), device=self.device)
        for first, weight in self.output_slices():
            for rows in torch.arange(len(labels), device=self.device).split(TOKEN_SLICE):
                logits = self.slice_logits(normed[rows], weight).float()
                normalizer[rows] = torch.logaddexp(normalizer[rows], logits.logsumexp(-1))
                local = labels[rows] - first
                inside = (local >= 0) & (local < len(weight))
                own = logits.gather(1, local.clamp(0, len(weight) - 1)[:, None])[:, 0]
                label_logits[rows] = torch.where(inside, own, label_logits[rows])
        return normalizer.double() - label_logits.double()

    @torch.no_grad()
    def sampled_loss_gradient(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Compute the gradient of the summed cross-entropy at ``hidden`` [N, T, D], with labels sampled from the model.

        With sampled labels the second moment of gradients is the true Fisher information, not the empirical one. One
        pass over the vocabulary in slices, so that full logits never exist: the softmax is accumulated online, as in
        FlashAttention (arXiv:2205.14135), and each slice replaces the sampled label with the probability of its share
        of the softmax mass so far.
        """
        with torch.enable_grad():
            leaf = hidden.to(self.device, self.dtype).detach().requires_grad_()
            normed = self.final_norm(leaf)
        flat, cap = normed.detach().flatten(0, 1), logit_cap(self.config)
        chance, quantile = torch.rand(2, len(flat), generator=generator, dtype=torch.float64).to(self.device)
        expected = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        drawn, maximum = torch.zeros_like(expected), torch.full((len(flat),), -torch.inf, device=self.device)
        for _, weight in self.output_slices():
            for rows in torch.arange(len(flat), device=self.device).split(TOKEN_SLICE):
                logits = self.slice_logits(flat[rows], weight).float()
                before, own = maximum[rows], logits.logsumexp(-1)
                maximum[rows] = torch.logaddexp(before, own)
                probability = (logits - maximum[rows, None]).exp_()
                share = (own - maximum[rows]).double().exp()
                takes = chance[rows] < share
                # Given the decision, the number is uniform within its bounds; rescale it to [0, 1).
                low, width = torch.where(takes, 0, share), torch.where(takes, share, 1 - share)
                chance[rows] = (chance[rows] - low) / width
                cumulative = probability.cumsum(-1)
                threshold = quantile[rows, None].to(cumulative) * cumulative[:, -1:]
                label = torch.searchsorted(cumulative, threshold, right=True).clamp_max(len(weight) - 1)
                row = weight[label[:, 0]].to(drawn)
                if cap is not None:
                    slope = 1 - (logits / cap).square()
                    row *= slope.gather(1, label)
                    probability *= slope
                drawn[rows] = torch.where(takes[:, None], row, drawn[rows])
                correction = (before - maximum[rows]).exp()[:, None]
                expected[rows] = expected[rows] * correction + (probability.to(weight) @ weight).to(expected)
        normed.backward((expected - drawn).to(normed).view_as(normed))
        if not leaf.grad.isfinite().all():
            raise overflow(self.reader, "gradients of the loss")
        return leaf.grad


@dataclass
class StreamedLayer:
    """A loaded decoder layer, or several that run together; callable on hidden states [B, T, D] while loaded."""

    model: nn.Module | None

    def __call__(self, hidden: Tensor, attention: nn.Module | None = None) -> Tensor:
        """Compute the output for a causal prompt; ``attention`` replaces the attention module of a single layer."""
        if attention is None:
            return self.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        (layer,) = self.model.layers
        own, layer.self_attn = layer.self_attn, attention
        try:
            return self(hidden)
        finally:
            layer.self_attn = own

    def attention_inputs(self, hidden: Tensor) -> Tensor:
        """Return the attention inputs [B, T, D], after the input norm if the family has one."""
        norm = getattr(self.model.layers[0], source_family(self.config).input_norm, None)
        return hidden if norm is None else norm(hidden)

    def decode(self, hidden: Tensor, prompt: int, cache) -> Tensor:
        """Compute the layer's output with a KV cache: prefill of ``prompt`` tokens, then one decode step per token."""
        pieces = [hidden[:, :prompt], *hidden[:, prompt:].split(1, dim=1)]
        outputs = [
            self.model(inputs_embeds=piece, use_cache=True, **{CACHE: cache}) for piece in pieces if piece.shape[1]
        ]
        return torch.cat([output.last_hidden_state for output in outputs], dim=1)

    @property
    def config(self):
        return self.model.config


def _joined_config(singles: list):
    """Merge single-layer configs to a config of several layers."""
    config, count = singles[0], len(singles)
    own = [name for name in ("attention_layers", "kv_cache") if isinstance(getattr(config, name, None), list)]
    for name in (*per_layer(config), *own):
        setattr(config, name, [entry for single in singles for entry in getattr(single, name)])
    if getattr(config, "mlp_only_layers", None) is not None:
        config.mlp_only_layers = [index for index, single in enumerate(singles) if single.mlp_only_layers]
    if getattr(config, "first_k_dense_replace", None) is not None:  # dense layers come first
        config.first_k_dense_replace = sum(bool(single.first_k_dense_replace) for single in singles)
    if hasattr(config, "scale_depth"):  # MiniCPM3 divides it by the square root of the number of layers
        config.scale_depth *= math.sqrt(count)
    config.num_hidden_layers = count
    return config


def source_family(config) -> Family:
    """Return the family of a config, or of the source of a custom-class config; Llama if unknown."""
    return family_around(getattr(config, "base_model_type", config.model_type)) or LLAMA


def single_layer_config(config, layer: int):
    """Return a one-layer copy of a converted checkpoint's config (stock MLA or the custom model class)."""
    single = source_family(config).single_layer_config(config, layer)
    if getattr(config, "attention_layers", None):
        single.attention_layers = [config.attention_layers[layer]]
    if isinstance(getattr(config, "kv_cache", None), list):
        single.kv_cache = [config.kv_cache[layer]]
    return single


def _model_from_state(config, state: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build a model without final norm from ``state`` by transformers' loading rules."""
    from transformers.utils import logging

    # from_pretrained applies checkpoint conversions (fused experts) that load_state_dict would miss. Its progress bar
    # would print once per layer.
    config = with_standard_names(config)
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with loading("a layer of this config.json"), without_initial_values():
            causal, info = causal_class(config).from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=dtype,
                output_loading_info=True,
                attn_implementation="eager" if own_softmax(config) else "sdpa",
            )
    finally:
        if bars:
            logging.enable_progress_bar()
    problems = {kind: sorted(map(str, names)) for kind, names in info.items() if names}
    if problems:
        listing = "; ".join(f"{kind.replace('_', ' ')} {', '.join(names)}" for kind, names in problems.items())
        why = "the layers have other modules than the registered Family describes"
        raise SurgeryError(f"a layer cannot be loaded into {type(causal).__name__}: {listing}; {why}")
    causal.model.norm = nn.Identity()
    return causal.eval().requires_grad_(False)


def blocks_of(config) -> list[tuple[int, int]]:
    """Return ranges [start, stop) of layers that must run together.

    These are single layers, except in custom-class models whose layers share latents or a cache.
    """
    starts = [layer for layer, entry in enumerate(entries_of(config)) if not entry.joined]
    return list(zip(starts, [*starts[1:], config.num_hidden_layers], strict=True))
