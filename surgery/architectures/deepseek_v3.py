"""MLA as a dense stock ``deepseek_v3``: names, shapes and config that transformers and other engines load.

Constraints of the stock class, and how a converted layer satisfies them:

- softmax scale ``(nope + rope)^-1/2``: folded into the up-projection of the keys and the rotary queries;
- an RMS norm on the latent: neutralized (:mod:`surgery.architectures.neutral_norm`);
- a tiny latent, whose weights alone would be too small for float16 and for the scales of quantized weights: the norm
  before the attention is scaled down instead, and queries and rotary keys are scaled up;
- interleaved rotary pairs: rows are permuted;
- one frequency grid: default RoPE of another base if that fits, else explicit frequencies as longrope factors;
- no query bias: a full-rank query latent with a constant channel adds it;
- ``rms_norm_eps`` 1e-6 for the tiny-latent norm: another eps is matched exactly by rescaling the residual stream;
- head sizes that an engine's kernels support: zero padding, which adds weights and, in the rotary dimensions only,
  cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surgery.architectures.neutral_norm import TINY_EPS, NeutralNorm, neutral_norm
from surgery.architectures.spec import MLASpec
from surgery.checkpoint import TensorSpec
from surgery.families.base import ATTENTION_PREFIX
from surgery.families.rope import default_theta
from surgery.transforms.latent_layer import LatentLayer, interleaving

MODEL_TYPE = "deepseek_v3"
INPUT_NORM = "model.layers.{layer}.input_layernorm.weight"

ROPE_SCALE = 2.0**-4
"""Scale of rotary keys next to a tiny latent: one tensor projects both, and must suit one fp8 scale."""
LARGEST_QUERY = 2.0**15
"""Limit of query weights, half of float16's; the scale of rotary keys grows where queries would exceed it."""


def obstacles(
    config: dict, spec: MLASpec, *, experts: bool, mlp_bias: bool, extra_parts: str | None = None
) -> list[str]:
    """Return the reasons why the stock class cannot hold a conversion; empty if it can.

    The source's feed-forward layers may have experts or biases, and its layers extra parts that the stock class lacks.
    """
    reasons = [] if extra_parts is None else [f"the source has {extra_parts}"]
    if spec.key_norm_eps is not None:
        reasons.append("the source normalizes queries and keys per head (q/k-norm)")
    if experts:
        reasons.append("the source is a mixture of experts with another router")
    if mlp_bias:
        reasons.append("the source's feed-forward layers have biases")
    limit = config.get("max_position_embeddings") or 0
    if any(window is not None and window < limit for window in spec.windows):
        reasons.append("the source has sliding windows")
    if spec.kept:
        reasons.append("some layers keep their attention")
    elif not spec.uniform:
        reasons.append("ranks or frequencies differ between layers")
    if any((f == 0).any() for f in spec.inv_freq):
        reasons.append("some of the source's rotary pairs have frequency 0")
    if min(len(f) for f in spec.inv_freq) == 0:
        reasons.append("no rotary dimensions are left")
    return reasons


@dataclass(frozen=True)
class StockMLA:
    """Writer of MLA as stock ``deepseek_v3``.

    Attributes:
        rescale: factor on the residual stream; 1.0 if the source's eps is kept.
        head_sizes: unrotated, rotary and value dimensions of a head, zero padding included; None: no padding.
        untied: whether tied embeddings are written twice, as embeddings and output head.
    """

    spec: MLASpec
    norm: NeutralNorm
    rescale: float = 1.0
    head_sizes: tuple[int, int, int] | None = None
    untied: bool = False

    @classmethod
    def choose(
        cls,
        config: dict,
        spec: MLASpec,
        head_sizes: tuple[int, int, int] | None = None,
        tied: bool = True,
    ) -> StockMLA:
        """Choose the variant that loads in the most engines.

        A tiny latent if the source's eps is 1e-6. Otherwise a tiny latent with a rescaled residual stream if the
        result then loads everywhere (no biases, default RoPE), else constant channel, which changes no other tensor.
        """
        eps = config.get("rms_norm_eps", TINY_EPS)
        same_eps = math.isclose(eps, TINY_EPS, rel_tol=1e-6)
        portable = not (spec.query_bias or spec.latent_bias or spec.output_bias)
        portable = portable and default_theta(spec.inv_freq[0]) is not None
        norm = neutral_norm("tiny" if same_eps or portable else "constant", spec.ranks[0], spec.dtype)
        rescale = 1.0 if same_eps or norm.kind == "constant" else math.sqrt(TINY_EPS / eps)
        return cls(spec, norm, rescale, head_sizes, untied=not tied and bool(config.get("tie_word_embeddings")))

    @property
    def attention_bias(self) -> bool:
        spec = self.spec
        return spec.query_bias or spec.latent_bias or spec.output_bias or self.norm.kind == "constant"

    @property
    def rank(self) -> int:
        return self.spec.ranks[0] + self.norm.extra

    def input_scale(self, layer: int) -> float:
        """Return the factor on the norm before a layer's attention; 1 without a tiny latent.

        It is a power of two that scales inputs to a length near 1/8. Weights of a tiny latent are then near
        ``8 * norm.scale`` at any hidden size.
        """
        length = self.spec.input_lengths[layer] if self.norm.kind == "tiny" else 0.0
        return 2.0 ** -round(math.log2(8 * length)) if length else 1.0

    @property
    def nope_dim(self) -> int:
        return self.head_sizes[0] if self.head_sizes else self.spec.head_dim

    @property
    def rope_dim(self) -> int:
        return self.head_sizes[1] if self.head_sizes else self._rotated

    @property
    def value_dim(self) -> int:
        return self.head_sizes[2] if self.head_sizes else self.spec.value_dim

    @property
    def _rotated(self) -> int:
        """Rotary dimensions without padding."""
        return 2 * len(self.spec.inv_freq[0])

    @property
    def theta(self) -> float | None:
        """Base for which default RoPE has these frequencies, extended over the zero padding; None if there is none."""
        theta = default_theta(self.spec.inv_freq[0])
        return None if theta is None else theta ** (self.rope_dim / self._rotated)

    def config(self, source: dict) -> dict:
        """Return the config.json of the converted model."""
        spec = self.spec
        limit = source.get("max_position_embeddings", 2048)
        if self.theta is not None:
            rope = {"rope_type": "default", "rope_theta": self.theta}
        else:
            base = 10_000.0
            still = torch.zeros((self.rope_dim - self._rotated) // 2, dtype=torch.float64) + spec.inv_freq[0][-1]
            factors = _frequency_factors(torch.cat([spec.inv_freq[0], still]), base)
            rope = {
                "rope_type": "longrope",
                "rope_theta": base,
                "short_factor": factors,
                "long_factor": factors,
                "factor": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": limit,
            }
        fields = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act "
            "max_position_embeddings use_cache bos_token_id eos_token_id pad_token_id tie_word_embeddings "
            "initializer_range pretraining_tp dtype torch_dtype attention_dropout"
        )
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": MODEL_TYPE,
            **{name: source[name] for name in fields.split() if name in source},
            # Explicit because the classes' defaults differ.
            "tie_word_embeddings": bool(source.get("tie_word_embeddings", False)) and not self.untied,
            "bos_token_id": source.get("bos_token_id"),
            "eos_token_id": source.get("eos_token_id"),
            "num_key_value_heads": spec.heads,
            "kv_lora_rank": self.rank,
            "q_lora_rank": spec.hidden + 1 if spec.query_bias else None,
            "qk_nope_head_dim": self.nope_dim,
            "qk_rope_head_dim": self.rope_dim,
            "v_head_dim": self.value_dim,
            "attention_bias": self.attention_bias,
            "rms_norm_eps": TINY_EPS if self.rescale != 1.0 else source.get("rms_norm_eps", TINY_EPS),
            "rope_interleave": True,
            "rope_theta": rope["rope_theta"],
            "rope_parameters": rope,
            # Dense: no layer has experts, but loaders require the fields. llama.cpp aborts unless groups of experts are
            # fewer than experts.
            "first_k_dense_replace": spec.layers,
            "moe_layer_freq": 1,
            "moe_intermediate_size": source["intermediate_size"],
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 0,
        }

    def copied(self, names: list[str]) -> list[str]:
        """Return the source's attention tensors that are copied unchanged: none."""
        return []

    def plan(self, layer: int) -> dict[str, TensorSpec]:
        """Return the dtypes and shapes of a layer's attention tensors by name."""
        spec, rank, rope = self.spec, self.rank, self.rope_dim
        query_rows = spec.heads * (self.nope_dim + rope)
        shapes: dict[str, tuple[int, ...]] = {}
        if spec.query_bias:
            width = spec.hidden + 1
            shapes |= {
                "q_a_proj.weight": (width, spec.hidden),
                "q_a_proj.bias": (width,),
                "q_a_layernorm.weight": (width,),
                "q_b_proj.weight": (query_rows, width),
            }
        else:
            shapes["q_proj.weight"] = (query_rows, spec.hidden)
        shapes |= {
            "kv_a_proj_with_mqa.weight": (rank + rope, spec.hidden),
            "kv_a_layernorm.weight": (rank,),
            "kv_b_proj.weight": (spec.heads * (self.nope_dim + self.value_dim), rank),
            "o_proj.weight": (spec.hidden, spec.heads * self.value_dim),
        }
        if self.attention_bias:
            shapes |= {"kv_a_proj_with_mqa.bias": (rank + rope,), "o_proj.bias": (spec.hidden,)}
        prefix = ATTENTION_PREFIX.format(layer=layer)
        return {prefix + name: TensorSpec(spec.dtype, shape) for name, shape in shapes.items()}

    def tensors(self, layer: int, converted: LatentLayer) -> dict[str, Tensor]:
        """Return a layer's attention tensors, as planned.

        Args:
            converted: a layer whose latents and rotary keys have mean square one, averaged over channels and tokens.
        """
        spec, rank = self.spec, converted.rank
        source, inputs = converted.source, self.input_scale(layer)
        # Replaces the source's scale of the logits by stock's (nope + rope)^-1/2.
        scale = source.scale * math.sqrt(self.nope_dim + self.rope_dim)
        pairs = interleaving(self._rotated)
        nope, rope, value = self.nope_dim, self.rope_dim, self.value_dim

        key_up = zero_rows(converted.query_up[..., :rank] * scale, nope)  # [H, nope, r]
        rope_up = (converted.query_up[..., rank:] * scale)[..., pairs].mT  # [H, ρ, d]
        rope_scale = self._rope_scale(rope_up @ source.q / inputs)
        rope_up = rope_up / rope_scale
        query = self._query(source.q, rope_up @ source.q) / inputs  # [H, nope + ρ, D]
        up = torch.cat([key_up, zero_rows(converted.value_up, value)], dim=1).flatten(0, 1)

        bias = converted.down_bias
        latent, latent_bias = self.norm.down(converted.down[:rank], None if bias is None else bias[:rank])
        down = torch.cat([latent, zero_rows(converted.down[rank:][pairs] * rope_scale, rope)])
        result = {
            "kv_a_proj_with_mqa.weight": down / inputs,
            "kv_a_layernorm.weight": self.norm.weights(rank),
            "kv_b_proj.weight": self.norm.up(up),
            "o_proj.weight": zero_rows(converted.o.mT, value).mT.flatten(1) * self.rescale,
        }
        if self.attention_bias:
            zeros = torch.zeros(rank + self._rotated, dtype=down.dtype)
            rope_bias = zero_rows((zeros if bias is None else bias)[rank:][pairs, None] * rope_scale, rope)[:, 0]
            latent_bias = zeros[:rank] if latent_bias is None else latent_bias
            result["kv_a_proj_with_mqa.bias"] = torch.cat([latent_bias, rope_bias])
            o_bias = torch.zeros(spec.hidden, dtype=down.dtype) if source.o_bias is None else source.o_bias
            result["o_proj.bias"] = o_bias * self.rescale
        if spec.query_bias:
            query_bias = self._query(source.q_bias[..., None], rope_up @ source.q_bias[..., None])
            result |= query_latent(query.flatten(0, 1), query_bias.flatten(), inputs)
        else:
            result["q_proj.weight"] = query.flatten(0, 1)
        prefix = ATTENTION_PREFIX.format(layer=layer)
        return {prefix + name: tensor.to(spec.dtype).contiguous() for name, tensor in result.items()}

    def _query(self, unrotated: Tensor, rotated: Tensor) -> Tensor:
        """Pad and join the unrotated [H, d, n] and rotary [H, ρ, n] parts of queries: [H, nope + rope, n]."""
        return torch.cat([zero_rows(unrotated, self.nope_dim), zero_rows(rotated, self.rope_dim)], dim=1)

    def _rope_scale(self, rope_query: Tensor) -> float:
        """Return the factor on rotary keys, a power of two; the rotary queries [H, ρ, D] are divided by it."""
        if self.norm.kind != "tiny" or not rope_query.numel():
            return 1.0
        largest = max(float(rope_query.abs().max()), torch.finfo(torch.float32).tiny)
        return max(ROPE_SCALE, 2.0 ** math.ceil(math.log2(largest / LARGEST_QUERY)))

    def rescaled(self, names: list[str]) -> dict[str, float]:
        """Return factors on tensors outside the attention: input norms, and tensors that write to the residual stream.

        ``rms_norm(a h, eps a²) = rms_norm(h, eps)``: all that writes into a stream scaled by a is multiplied by a.
        The final norm's weight is divided by a if the output head is tied to the embeddings.
        """
        scales = {INPUT_NORM.format(layer=layer): self.input_scale(layer) for layer in range(self.spec.layers)}
        factors = {name: scales[name] for name in names if scales.get(name, 1.0) != 1.0}
        if self.rescale == 1.0:
            return factors
        factors["model.embed_tokens.weight"] = self.rescale
        factors |= {name: self.rescale for name in names if name.endswith(".mlp.down_proj.weight")}
        if "lm_head.weight" not in names:
            factors["model.norm.weight"] = 1 / self.rescale
        return factors


def zero_rows(tensor: Tensor, rows: int) -> Tensor:
    """Zero-pad the rows of ``tensor`` [..., n, m] to [..., rows, m]."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, rows - tensor.shape[-2]))


def _frequency_factors(inv_freq: Tensor, base: float) -> list[float]:
    """Return the longrope factors for which transformers computes these float32 frequencies bit for bit."""
    grid = base ** (torch.arange(0, 2 * len(inv_freq), 2, dtype=torch.int64).float() / (2 * len(inv_freq)))
    target = inv_freq.float()
    factor = (1.0 / (inv_freq.double() * grid.double())).float()
    for _ in range(4):
        scaled = 1.0 / (factor * grid)
        direction = torch.where(scaled > target, torch.inf, -torch.inf)
        factor = torch.where(scaled == target, factor, torch.nextafter(factor, direction))
    return [float(f) for f in factor.double()]


CONSTANT = 2.0**15
"""Constant channel for unscaled inputs: the norm's relative error is |x|²/2^31."""
LARGEST_WEIGHT = 2.0**14
"""Largest weight of the norm at the constant channel; its inverse is the smallest."""


def query_latent(query: Tensor, bias: Tensor, input_scale: float) -> dict[str, Tensor]:
    """Return tensors that compute ``query x + bias``, [n, D] and [n], through a latent [x ; 1].

    The norm's weight at the constant is chosen so that no bias exceeds the largest weight of its row in ``q_b_proj``,
    as weight quantizers use one scale for both. ``input_scale`` is already applied to the inputs x.
    """
    width = query.shape[1] + 1
    constant = CONSTANT * input_scale
    rms = constant / math.sqrt(width)
    weight = 2.0 ** round(math.log2(rms))
    gain, unit = weight / rms, constant / rms
    query, tiny = query / gain, torch.finfo(torch.float32).tiny
    largest = query.abs().amax(1)
    ratio = float((bias.abs() / largest)[largest > tiny].max()) if bool((largest > tiny).any()) else 1.0
    exponent = math.ceil(math.log2(max(ratio / unit, 1 / LARGEST_WEIGHT)))
    weights = torch.full((width,), weight)
    weights[-1] = min(2.0**exponent, LARGEST_WEIGHT)
    return {
        "q_a_proj.weight": torch.eye(width, width - 1, dtype=query.dtype),
        "q_a_proj.bias": torch.nn.functional.pad(query.new_full((1,), constant), (width - 1, 0)),
        "q_a_layernorm.weight": weights,
        "q_b_proj.weight": torch.cat([query, bias[:, None] / (float(weights[-1]) * unit)], dim=1),
    }
