"""Our reading of KVTC (arXiv:2511.01815): storage of a cache, measured as a conversation that is stored and resumed.

The keys of a token before RoPE, of all layers and heads, are one vector, and so are its values.
`transform_coding` codes each by principal components of its own. The first 4 tokens and the last 112 to 128 stay in
full precision.

KVTC is a format for caches between turns: the model decodes from the decompressed cache. So the live cache here holds
all tokens in the model's dtype, and its bytes are those of the source. Only `Storage` is smaller: serialized bytes
after DEFLATE, and tokens in full precision. DEFLATE depends on the text, so these bytes are counted on the windows
whose loss is measured. The basis is not counted, as in the paper's ratios; it belongs to the model.

The protocol is that of the paper's evaluation: when the window has 128 tokens, the oldest 16 are encoded and replaced
by what they decode to. A pass over a text is cut into chunks of 16 tokens. So every token is read as if it were
decoded, and its own keys and values follow from states that read decoded tokens; in the paper only those of tokens
after the prompt do.

Other differences from the paper, in addition to those in `transform_coding`:

- It calibrates on 160k to 200k tokens of FineWeb and OpenR1-Math, here on fewer tokens of other text (see `rows.py`).
- It allocates bits by the errors of up to 32k of these tokens, here of 128.
- It counts the first tokens in FP8, here they are in full precision.
- Models with sliding windows are refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.variants.cache_hook import NoVariant, check_model, install
from surgery.eval.variants.coded_cache import in_chunks
from surgery.eval.variants.transform_coding import Spectrum, TransformCoder, deflated
from surgery.model.cache_argument import CACHE
from surgery.model.cache_layer import Call, own_cache
from surgery.model.plain_cache import PlainLayer
from surgery.model.rotary import rotation_of

PRESETS = {"kvtc_8x": 8, "kvtc_16x": 16, "kvtc_32x": 32, "kvtc_64x": 64}
"""Ratio of 16 bits per value to the bits that are allocated, before DEFLATE, by name."""

FIRST, RECENT, STEP = 4, 112, 16
"""Tokens in full precision at the start and, at least, at the end; tokens between two encodings."""

SAMPLE = 128
"""Calibration tokens on which the errors of groups are computed."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of one sequence in storage.

    Attributes:
        exact: tokens in full precision.
        packed: coded tokens before DEFLATE.
        deflated: coded tokens after it.
    """

    exact: int
    packed: int
    deflated: int


class KeysAndValues:
    """Keys before RoPE and values of all layers and heads of a token, as one vector each.

    Attributes:
        heads, width: KV heads of a layer and their size.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the rotation of a model. Raises NoVariant: the decoder has no rotary embedding."""
        config, decoder = model.config.get_text_config(decoder=True), model.base_model
        if not callable(getattr(decoder, "rotary_emb", None)):
            raise NoVariant(f"{type(model).__name__} has no rotary embedding, which KVTC undoes")
        self.heads = config.num_key_value_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._rotate = [rotation_of(layer.self_attn) for layer in decoder.layers]

    def gather(self, cache: Cache, tokens: slice, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the vectors of keys and of values of `tokens` of a cache: [B, n, layers · heads · width], float32."""
        cos, sin = angles
        norm = cos.square() + sin.square()  # 1, or the square of RoPE's attention factor
        keys, values = [], []
        for layer, rotate in zip(cache.layers, self._rotate, strict=True):
            keys.append(rotate(layer.keys[:, :, tokens].float(), cos / norm, -sin / norm))
            values.append(layer.values[:, :, tokens].float())
        return tuple(torch.cat(part, 1).transpose(1, 2).flatten(2) for part in (keys, values))

    def scatter(self, cache: Cache, tokens: slice, angles: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> None:
        """Write vectors of keys and values over `tokens` of a cache."""
        keys, values = (
            part.unflatten(-1, (-1, self.heads, self.width)).permute(2, 0, 3, 1, 4) for part in (keys, values)
        )
        for index, (layer, rotate) in enumerate(zip(cache.layers, self._rotate, strict=True)):
            layer.keys[:, :, tokens] = rotate(keys[index], *angles).to(layer.keys.dtype)
            layer.values[:, :, tokens] = values[index].to(layer.values.dtype)


class Storage(nn.Module):
    """Coded tokens of a cache of B rows. A module, which the count of a live cache's bytes skips.

    ``positions`` [B or 1, T] are of all tokens; ``parts`` are the coders' tensors by encoding, for keys and values.
    """

    def __init__(self, coders: tuple[TransformCoder, TransformCoder]) -> None:
        super().__init__()
        self.coders = coders
        self.rows = 0
        self.positions: Tensor | None = None
        self.parts: tuple[list, list] = ([], [])
        self.coded = 0

    def sizes(self, token_bytes: int) -> list[StoredBytes]:
        """Return the bytes of each sequence; a token in full precision takes `token_bytes`."""
        exact = (self.positions.shape[1] - self.coded) * token_bytes
        return [StoredBytes(exact, *self._coded_bytes(row)) for row in range(self.rows)]

    def _coded_bytes(self, row: int) -> tuple[int, int]:
        if not self.coded:
            return 0, 0
        streams = []
        for coder, encodings in zip(self.coders, self.parts, strict=True):
            runs = zip(*encodings, strict=True)  # by run of groups, over encodings
            joined = [tuple(torch.cat([part[i][row] for part in run]) for i in range(3)) for run in runs]
            streams.append(coder.serialize(joined))
        stream = b"".join(streams)
        return len(stream), deflated(stream)

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply `change`, which acts on dimension 0, to all tensors."""
        if len(self.positions) > 1:
            self.positions = change(self.positions)
        self.parts = tuple(
            [[tuple(map(change, run)) for run in encoding] for encoding in encodings] for encodings in self.parts
        )


class RestoredLayer(PlainLayer):
    """Cache layer in full precision, whose older tokens are replaced by what storage keeps of them.

    Attributes:
        storage: coded tokens of all layers, in the first layer; None in the others.
    """

    form = "a cache that is restored from storage"

    def __init__(self, coders: tuple[TransformCoder, TransformCoder], first: bool) -> None:
        super().__init__()
        self.coders, self.first = coders, first
        self.storage = Storage(coders) if first else None

    def settings(self) -> tuple:
        """Return the coders, and whether this is the first layer."""
        return self.coders, self.first

    def reset(self) -> None:
        """Drop all tokens."""
        self.keys = self.values = None
        self.is_initialized = False
        if self.first:
            self.storage = Storage(self.coders)

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_rows(change)
        if self.is_initialized and self.first:
            self.storage.map_rows(change)


class StoredTurns:
    """Forward pass of a decoder that encodes the tokens which leave the window, after each chunk of a text.

    Attributes:
        last: storage of the latest pass; None before the first.
    """

    def __init__(self, decoder: nn.Module, tokens: KeysAndValues) -> None:
        self._forward, self._rotary, self._tokens = decoder.forward, decoder.rotary_emb, tokens
        self.last: Storage | None = None

    def __call__(self, **call: Any) -> Any:
        """Run the pass, of at most `STEP` tokens, and encode."""
        cache = call[CACHE]
        past = cache.get_seq_length()
        output = self._forward(**call)
        layer = cache.layers[0]
        length, device = layer.get_seq_length(), layer.keys.device
        positions = call.get("position_ids")
        if positions is None:
            positions = torch.arange(past, length, device=device)[None]
        if positions.ndim != 2 or positions.shape[1] != length - past:
            raise SurgeryError(f"KVTC needs positions [batch, tokens], not {list(positions.shape)}")
        storage = self.last = layer.storage
        storage.rows = len(layer.keys)
        storage.positions = positions if storage.positions is None else torch.cat([storage.positions, positions], 1)
        if length % STEP == 0 and length - RECENT > FIRST + storage.coded:
            self._encode(cache, storage, slice(FIRST + storage.coded, length - RECENT))
        return output

    def _encode(self, cache: Cache, storage: Storage, tokens: slice) -> None:
        positions = storage.positions[:, tokens]
        angles = self._rotary(torch.empty(0, device=positions.device), positions)
        restored = []
        vectors = self._tokens.gather(cache, tokens, angles)
        for coder, encodings, part in zip(storage.coders, storage.parts, vectors, strict=True):
            encodings.append(coder.encode(part))
            restored.append(coder.decode(encodings[-1]).expand_as(part))
        self._tokens.scatter(cache, tokens, angles, *restored)
        storage.coded += tokens.stop - tokens.start


def kvtc_cache(model: PreTrainedModel, format: str, spectra: tuple[Spectrum, Spectrum]) -> PreTrainedModel:
    """Let `model` read older tokens as they are restored from storage, as the module describes; return it.

    Sets `model.stored_bytes()`: the `StoredBytes` of each sequence of the latest pass. `spectra` are of `kvtc_spectra`.

    Raises:
        NoVariant: the model has layers without full attention, or no rotary embedding.
        SurgeryError: the format is unknown, or the model is a variant already.
    """
    if format not in PRESETS:
        raise SurgeryError(f"unknown storage format {format!r}; choose one of {', '.join(PRESETS)}")
    name = f"storage in {format}"
    check_model(model, name)
    tokens, decoder = KeysAndValues(model), model.base_model
    coders = tuple(TransformCoder(each, each.allocate(16 * len(each.mean) // PRESETS[format])) for each in spectra)

    def empty() -> list[RestoredLayer]:
        return [RestoredLayer(coders, index == 0) for index in range(len(decoder.layers))]

    def prepare(module: nn.Module, call: Call) -> None:
        own_cache(module, call, empty())

    install(model, name, prepare, empty())
    turns = StoredTurns(decoder, tokens)
    decoder.forward = wraps(decoder.forward)(partial(in_chunks, turns, STEP))
    token_bytes = model.kv_bytes(1)
    model.stored_bytes = lambda: turns.last.sizes(token_bytes)
    return model


@torch.no_grad()
def kvtc_spectra(model: PreTrainedModel, sequences: LongTensor) -> tuple[Spectrum, Spectrum]:
    """Compute the spectra of keys and of values from sequences [N, T], without the first tokens of each.

    Raises NoVariant: the model has layers without full attention, or no rotary embedding.
    """
    check_model(model, "KVTC")
    tokens, decoder = KeysAndValues(model), model.base_model
    device = model.get_input_embeddings().weight.device
    count, length = sequences.shape
    positions = torch.arange(FIRST, length, device=device)[None]
    angles = decoder.rotary_emb(torch.empty(0, device=device), positions)
    indices = torch.linspace(0, length - FIRST - 1, -(-SAMPLE // count), device=device).long()
    sums: list[tuple[Tensor, Tensor]] = []
    samples: tuple[list, list] = ([], [])
    with evaluation_mode(model):
        for sequence in sequences.split(1):
            cache = decoder(input_ids=sequence.to(device), use_cache=True)[CACHE]
            vectors = [part[0] for part in tokens.gather(cache, slice(FIRST, length), angles)]
            moments = [(each.sum(0).double(), (each.T @ each).double()) for each in vectors]
            for sample, each in zip(samples, vectors, strict=True):
                sample.append(each[indices])
            if not sums:
                sums = moments
                continue
            for (total, square), (part, own) in zip(sums, moments, strict=True):
                total += part
                square += own
    spectra = []
    for (total, square), sample in zip(sums, samples, strict=True):
        mean = total / (count * (length - FIRST))
        covariance = square / (count * (length - FIRST)) - mean[:, None] * mean
        spectra.append(Spectrum.of(mean, covariance, torch.cat(sample)))
    return tuple(spectra)
