"""Reimplementation of OSCAR's 2-bit cache (`--kv-cache-dtype int2` of its SGLang, #32129).

Zhou et al., "OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization", arXiv:2605.17757, as
in FutureMLS-Lab/OSCAR (`rotation/compute_kv_rotation.py`, `QuantKernel/oscar_rotation_clip_int2_kv.py`). The keys of a
KV head are rotated by the eigenvectors of the second moment of its queries and a Hadamard matrix; the values likewise
by the second moment of the values, in which a token is weighted by the energy of its key under the queries. The
largest 4% (keys) and 8% (values) of a rotated head are clipped, and the rest is quantized uniformly to four levels;
scale and zero point take 16 bits each, as in the paper's 2.28 bits. The first 64 and at least the last 256 tokens stay
in full precision. Rotations are per head, which the authors found better than per layer.

Not implemented: the bit-reversed channel order, which has no effect if a head is one group (up to 128 channels), and
the Lloyd-Max levels of newer branches. The authors calibrate on 30k tokens of GPQA with answers; here on 4k tokens of
other text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel

from surgery.eval.logits import evaluation_mode
from surgery.eval.variants.coded_cache import CodedLayer, Coder, Parts, hadamard, packed, unpacked
from surgery.running.attention_tap import AttentionCall, tap_attention

FIRST, RECENT = 64, 256
KEY_CLIP, VALUE_CLIP = 0.96, 0.92
CHUNK = 64
"""Tokens per forward pass; a query reads between 256 and 319 tokens before it in full precision."""


class RotatedInt2(Coder):
    """Two-bit quantization after a rotation of each head."""

    def __init__(self, rotation: Tensor, clip: float) -> None:
        """Take an orthogonal `rotation` [H, d, d] and `clip`, the quantile of absolute values that bounds elements."""
        self.weights, self.clip = nn.ParameterList([nn.Parameter(rotation, requires_grad=False)]), clip

    @property
    def rotation(self) -> Tensor:
        """Rotation matrices [H, d, d]; held in a module, which the count of cache bytes skips."""
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


def oscar_layer(keys: Tensor, values: Tensor) -> CodedLayer:
    """Return a cache layer from the rotations of its keys and values."""
    return CodedLayer(RotatedInt2(keys, KEY_CLIP), RotatedInt2(values, VALUE_CLIP), FIRST, RECENT)


@torch.no_grad()
def oscar_rotations(model: PreTrainedModel, tokens: LongTensor) -> list[tuple[Tensor, Tensor]]:
    """Compute rotations [H, d, d], float32, of each layer's keys and values from sequences [N, T] in two passes.

    Raises:
        SurgeryError: the attention function of the model cannot be replaced.
        ValueError: the head size is not a power of two.
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
    sums: dict[int, Tensor] = {}

    def add(call: AttentionCall) -> Tensor:
        sums[call.layer] = sums.get(call.layer, 0) + moment(call)
        return call.output()

    device = model.get_input_embeddings().weight.device
    with evaluation_mode(model), tap_attention(model, add):
        for sequence in tokens.split(1):
            model.base_model(input_ids=sequence.to(device), use_cache=False)
    return sums


def _rotation(moment: Tensor) -> Tensor:
    vectors = torch.linalg.eigh(moment).eigenvectors
    return (vectors @ hadamard(len(moment[0])).to(vectors)).float()
