"""Our reading of OSCAR's 2-bit cache (`--kv-cache-dtype int2` of its SGLang, #32129).

Zhou et al., "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", arXiv:2605.17757, as
in FutureMLS-Lab/OSCAR (`rotation/compute_kv_rotation.py`, `QuantKernel/oscar_rotation_clip_int2_kv.py`). Keys of a KV
head are rotated by the eigenvectors of its queries' second moment and a Hadamard matrix; values by those of their own,
in which a token counts by the energy of its key under the queries. The largest 4% and 8% of a rotated head are clipped
and the rest has four even steps; scale and zero are 16 bits each, as the paper's 2.28 bits count. The first 64 and the
last 256 tokens stay unchanged. Each head has rotations of its own, which the authors found better than one a layer.

Left out: the bit-reversed order of channels, which changes nothing where a head is one group (up to 128 channels), and
the Lloyd-Max steps of newer branches. Its rotations are of 30k tokens of GPQA with answers, ours of 4k of other text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel

from surgery.eval.logits import evaluation_mode
from surgery.eval.variants.coded_cache import CodedLayer, Coder, Parts, hadamard, packed, unpacked
from surgery.running.attention_tap import AttentionCall, tapped

FIRST, RECENT = 64, 256
KEY_CLIP, VALUE_CLIP = 0.96, 0.92
CHUNK = 64
"""Tokens of a pass: a query sees between 256 and 319 tokens before it as they came."""


class RotatedInt2(Coder):
    """Two bits after a rotation of each head."""

    def __init__(self, rotation: Tensor, clip: float) -> None:
        """`rotation`: orthogonal [H, d, d]; `clip`: share of a head's values, by size, that keep theirs."""
        self.weights, self.clip = nn.ParameterList([nn.Parameter(rotation, requires_grad=False)]), clip

    @property
    def rotation(self) -> Tensor:
        """Rotation, held in a module as weights are: a walk over the cache for its bytes must not count it."""
        return self.weights[0]

    def encode(self, tokens: Tensor) -> Parts:
        values = tokens.float() @ self.rotation.to(tokens.device)
        limit = values.abs().sort(-1).values[..., int(self.clip * values.shape[-1]), None]
        values = values.clamp(-limit, limit)
        least = values.amin(-1, keepdim=True)
        scale = (values.amax(-1, keepdim=True) - least).clamp(min=1e-8) / 3
        zero = -least / scale
        codes = (values / scale + zero + 0.5).trunc().clamp(0, 3)
        return packed(codes, 2), scale.half(), zero.half()

    def decode(self, parts: Parts) -> Tensor:
        codes, scale, zero = unpacked(parts[0], 2), parts[1].float(), parts[2].float()
        return (codes - zero) * scale @ self.rotation.to(codes.device).transpose(-1, -2)


def oscar_layers(rotations: list[tuple[Tensor, Tensor]]) -> list[CodedLayer]:
    """The layers of a cache, of the rotations of their keys and values."""
    return [
        CodedLayer(RotatedInt2(keys, KEY_CLIP), RotatedInt2(values, VALUE_CLIP), FIRST, RECENT)
        for keys, values in rotations
    ]


@torch.no_grad()
def oscar_rotations(model: PreTrainedModel, tokens: LongTensor) -> list[tuple[Tensor, Tensor]]:
    """Rotations [H, d, d] of each layer's keys and values, float32, from sequences [N, T] in two passes.

    Raises:
        SurgeryError: the model takes no attention function.
        ValueError: its heads have no Hadamard matrix.
    """

    def of_queries(call: AttentionCall) -> Tensor:
        queries = call.query.double().unflatten(1, (call.kv_heads, -1))
        return torch.einsum("bgrti,bgrtj->gij", queries, queries)

    query_moments = _summed(model, tokens, of_queries)

    def of_values(call: AttentionCall) -> Tensor:
        keys, values = call.key.double(), call.value.double()
        energy = torch.einsum("bgti,gij,bgtj->bgt", keys, query_moments[call.layer], keys)
        return torch.einsum("bgt,bgti,bgtj->gij", energy, values, values)

    value_moments = _summed(model, tokens, of_values)
    return [(_rotation(keys), _rotation(value_moments[layer])) for layer, keys in sorted(query_moments.items())]


def _summed(model: PreTrainedModel, tokens: LongTensor, moment: Callable[[AttentionCall], Tensor]) -> dict[int, Tensor]:
    """The sum of `moment` over sequences, by layer."""
    sums: dict[int, Tensor] = {}

    def add(call: AttentionCall) -> Tensor:
        sums[call.layer] = sums.get(call.layer, 0) + moment(call)
        return call.output()

    device = model.get_input_embeddings().weight.device
    with evaluation_mode(model), tapped(model, add):
        for sequence in tokens.split(1):
            model.base_model(input_ids=sequence.to(device), use_cache=False)
    return sums


def _rotation(moment: Tensor) -> Tensor:
    vectors = torch.linalg.eigh(moment).eigenvectors
    return (vectors @ hadamard(len(moment[0])).to(vectors)).float()
