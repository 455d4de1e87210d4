"""Mapping of a checkpoint to llama.cpp's metadata keys and tensor names.

Stock MLA becomes ``deepseek2`` in the absorbed form: one KV head of latent and rotary dimensions, with the
up-projection split into ``attn_k_b`` (transposed) and ``attn_v_b``. Llama models become ``llama``, which applies RoPE
to adjacent elements, so q and k rows are permuted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from surgery.architectures.neutral_norm import OLD_SCALE, recognized_norm
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.gguf_model import IN_LAYER, OUTSIDE, QK_NORMS, llama3_factors
from surgery.common.errors import SurgeryError
from surgery.engines.facts import MLA
from surgery.engines.llama_cpp import LLAMAS
from surgery.transforms.latent_layer import interleaving

ARCHITECTURES = {MLA: "deepseek2", **dict.fromkeys(LLAMAS, "llama")}
NAMES = {name.removesuffix(".weight"): stored.removesuffix(".weight") for stored, name in OUTSIDE.items()}
LAYER_NAMES = {name: stored for stored, name in IN_LAYER.items() if name not in QK_NORMS}
LAYER_NAMES |= {"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm"}
UP = "self_attn.kv_b_proj"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class GGUFTensor:
    """Output tensor that is loaded lazily; ``tiny``: whether values are below the range of f16."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    tiny: bool = False


@dataclass(frozen=True)
class GGUFModel:
    """GGUF view of a checkpoint: architecture, metadata and tensors."""

    reader: CheckpointReader

    @classmethod
    def of(cls, reader: CheckpointReader) -> GGUFModel:
        """Create the view; refuse checkpoints that do not fit one of the two architectures.

        Raises SurgeryError: the model type or a tensor is not supported.
        """
        model, config = cls(reader), reader.config
        kind = config.get("model_type")
        if kind not in ARCHITECTURES:
            choices = ", ".join(ARCHITECTURES)
            raise SurgeryError.at(reader.source, f"model_type {kind!r} cannot be exported (supported: {choices})")
        if config.get("mlp_bias"):
            raise SurgeryError.at(reader.source, "feed-forward layers with biases cannot be exported")
        list(model.tensors())
        return model

    @property
    def architecture(self) -> str:
        return ARCHITECTURES[self.reader.config["model_type"]]

    @property
    def rope(self) -> dict[str, Any]:
        config = self.reader.config
        entry = config.get("rope_parameters") or config.get("rope_scaling") or {}
        entry = {"rope_theta": config.get("rope_theta", 10_000.0), **entry}
        return {**entry, "rope_type": entry.get("rope_type", entry.get("type", "default"))}

    @property
    def _layers(self) -> int:
        return self.reader.config["num_hidden_layers"]

    @property
    def _head_dim(self) -> int:
        config = self.reader.config
        return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]

    def write_keys(self, writer) -> None:
        """Write the hyperparameters to a ``gguf.GGUFWriter``."""
        config = self.reader.config
        writer.add_block_count(self._layers)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(self.rope["rope_theta"])
        self._write_rope_scaling(writer)
        writer.add_vocab_size(config["vocab_size"])
        if self.architecture == "deepseek2":
            self._write_latent_keys(writer)
            return
        heads = config["num_attention_heads"]
        writer.add_head_count(heads)
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_key_length(self._head_dim)
        writer.add_value_length(self._head_dim)
        writer.add_rope_dimension_count(self._head_dim)

    def _write_rope_scaling(self, writer) -> None:
        """Write linear and YaRN scaling as llama.cpp's converter does; llama3's is the tensor of factors."""
        rope, kind = self.rope, self.rope["rope_type"]
        if kind not in ("linear", "yarn"):
            return
        length = self.reader.config["max_position_embeddings"]
        before = rope.get("original_max_position_embeddings") or length
        writer.add_rope_scaling_type(import_module("gguf").RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope.get("factor") or length / before)
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(before)
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
            writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)

    def _write_latent_keys(self, writer) -> None:
        config = self.reader.config
        rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(1)
        writer.add_key_length(rank + rope)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_kv_lora_rank(rank)
        # Required for all but two layer counts; 0 means a plain query projection.
        writer.add_q_lora_rank(0)
        writer.add_rope_dimension_count(rope)
        writer.add_feed_forward_length(config["intermediate_size"])
        # All layers are dense, but keys of experts are required.
        writer.add_leading_dense_block_count(self._layers)
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(0)

    def tensors(self) -> Iterator[GGUFTensor]:
        """Yield all tensors in the order of the file.

        Raises SurgeryError: the architecture lacks a tensor of the checkpoint.
        """
        tied = bool(self.reader.config.get("tie_word_embeddings"))
        if self.rope["rope_type"] == "llama3":
            factors = llama3_factors(self.rope, self._head_dim)
            yield GGUFTensor("rope_freqs.weight", tuple(factors.shape), factors.dtype, lambda: factors)
        for name in self.reader.names():
            if not (tied and name == "lm_head.weight"):
                yield from self._renamed(name)

    def _renamed(self, name: str) -> Iterator[GGUFTensor]:
        info, read = self.reader.info(name), partial(self.reader.tensor, name)
        match = LAYER.fullmatch(name)
        if match is None:
            stem, _, kind = name.rpartition(".")
            if stem not in NAMES:
                raise SurgeryError.at(self.reader.source, f"llama.cpp's {self.architecture} has no tensor for {name}")
            yield GGUFTensor(f"{NAMES[stem]}.{kind}", tuple(info.shape), info.dtype, read)
            return
        layer, part, kind = int(match[1]), match[2], match[3]
        if part == UP:
            yield from self._split_up(layer, info.dtype, read)
            return
        if part not in LAYER_NAMES:
            raise SurgeryError.at(self.reader.source, f"llama.cpp's {self.architecture} has no tensor for {name}")
        if self.architecture != "deepseek2" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            read = partial(self._adjacent_pairs, read)
        new = f"blk.{layer}.{LAYER_NAMES[part]}.{kind}"
        yield GGUFTensor(new, tuple(info.shape), info.dtype, read, self._is_tiny(layer, part))

    def _is_tiny(self, layer: int, part: str) -> bool:
        """Return whether a tensor projects to the tiny latents of earlier versions."""
        if part != "self_attn.kv_a_proj_with_mqa":
            return False
        norm = recognized_norm(self.reader.tensor(f"model.layers.{layer}.self_attn.kv_a_layernorm.weight"), None)
        return norm is not None and norm.scale == OLD_SCALE

    def _adjacent_pairs(self, read: Callable[[], Tensor]) -> Tensor:
        """Permute the rows of each head from half-split to adjacent RoPE pairs."""
        tensor = read()
        rows = tensor.unflatten(0, (-1, self._head_dim))
        return rows[:, interleaving(self._head_dim)].flatten(0, 1)

    def _split_up(self, layer: int, dtype: torch.dtype, read: Callable[[], Tensor]) -> Iterator[GGUFTensor]:
        config = self.reader.config
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]

        def keys() -> Tensor:
            return read().unflatten(0, (heads, nope + value))[:, :nope].mT

        def values() -> Tensor:
            return read().unflatten(0, (heads, nope + value))[:, nope:]

        yield GGUFTensor(f"blk.{layer}.attn_k_b.weight", (heads, rank, nope), dtype, keys)
        yield GGUFTensor(f"blk.{layer}.attn_v_b.weight", (heads, value, rank), dtype, values)
