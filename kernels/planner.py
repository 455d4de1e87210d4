r"""How long the attention of a decoding step takes, from bytes, FLOPs and launches: what a conversion can gain at all.

A layer's attention moves bytes, multiplies and launches kernels; its time is

    seconds = launches · launch_seconds + max(bytes / copy rate, FLOPs / matmul rate)

Counted are the cache that a step reads, once for all heads that share it, fp32 parts of split rows (written, then read
by the merge), the products of the attention and of rebuilding keys. Left out: projections, norms and the feed-forward
layers, which a conversion hardly changes; arithmetic of dequantising; caches that fit in L2. Kernels that reach their
ceilings are assumed on both sides, so a ratio of two predictions compares structures, not implementations.

Pure Python: nothing here imports torch, and all sizes are plain numbers.

Shapes: B rows, T new tokens of each, S tokens of the cache, H query heads, G KV heads, r rank, ρ rotary dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from surgery.kernels.gpus import GPU
from surgery.kernels.split_count import split_count

LEAST_GAIN = 1.1
"""A conversion is called faster from this ratio on: less is lost in what is left out here."""


@dataclass(frozen=True)
class Work:
    """What one layer's attention does in one way.

    Attributes:
        way: "read" the cache as it is; "absorb" up-projections into queries and outputs; "rebuild" keys tile by tile in
            the kernel; "reconstruct" keys and values in memory first.
    """

    way: str
    bytes: float
    flops: float
    launches: int

    def seconds(self, gpu: GPU) -> float:
        return self.launches * gpu.launch_seconds + max(self.memory(gpu), self.compute(gpu))

    def memory(self, gpu: GPU) -> float:
        return self.bytes / gpu.bytes_per_second

    def compute(self, gpu: GPU) -> float:
        return self.flops / gpu.flops_per_second

    def bound(self, gpu: GPU) -> str:
        """What takes the most: "memory", "compute" or "launches"."""
        parts = {
            "memory": self.memory(gpu),
            "compute": self.compute(gpu),
            "launches": self.launches * gpu.launch_seconds,
        }
        return max(parts, key=parts.get)


class Attention(Protocol):
    """The structure of one layer: what it caches and how it attends."""

    def token_bytes(self, context: int) -> float:
        """Bytes that a step reads for each token of a context, on average."""

    def ways(self, context: int, batch: int, new_tokens: int, gpu: GPU) -> list[Work]:
        """What the last `new_tokens` of `context` tokens in each of `batch` rows take, in every way that there is."""


def quantised(bits: int, group: int, *, scale_bytes: float = 2.0, zeros: bool = True) -> float:
    """Bytes of a quantised number: its code and its share of the scale and, of integers, of the zero point."""
    return bits / 8 + scale_bytes * (2 if zeros else 1) / group


@dataclass(frozen=True)
class Grouped:
    """Grouped-query attention (multi-head and multi-query too) over cached keys and values.

    Attributes:
        window: latest tokens that a query sees; None: all.
        streaming_heads: of the KV heads, how many see `streaming_tokens` tokens only (sinks and a window).
        key_bytes, value_bytes: of a cached number, scales included.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    streaming_heads: int = 0
    streaming_tokens: int = 0
    key_bytes: float = 2.0
    value_bytes: float = 2.0

    def _entries(self, context: int) -> float:
        """(KV head, token) pairs that are read."""
        seen = context if self.window is None else min(context, self.window)
        streamed = min(seen, self.streaming_tokens)
        return (self.kv_heads - self.streaming_heads) * seen + self.streaming_heads * streamed

    def token_bytes(self, context: int) -> float:
        per_entry = self.key_dim * self.key_bytes + self.value_dim * self.value_bytes
        return self._entries(context) * per_entry / context

    def ways(self, context: int, batch: int, new_tokens: int, gpu: GPU) -> list[Work]:
        parts, merges = _parts(batch, self.kv_heads, context, self.heads * new_tokens * self.value_dim, gpu)
        pairs = self.heads / self.kv_heads * self._entries(context) * _causal(context, new_tokens)
        return [
            Work(
                "read",
                batch * context * self.token_bytes(context) + parts,
                2 * batch * pairs * (self.key_dim + self.value_dim),
                1 + merges,
            )
        ]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: one latent and one rotated key for all heads (DeepSeek-V2, arXiv:2405.04434).

    Attributes:
        nope_dim, value_dim: of keys and values where they are reconstructed; in numbers of a head.
        extra_bytes: of a token beside the two, such as key gains.
        latent_bytes, rope_bytes: of a cached number, scales included.
    """

    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    window: int | None = None
    extra_bytes: float = 0.0
    latent_bytes: float = 2.0
    rope_bytes: float = 2.0

    def token_bytes(self, context: int) -> float:
        each = self.rank * self.latent_bytes + self.rope_dim * self.rope_bytes + self.extra_bytes
        return each * min(context, self.window or context) / context

    def ways(self, context: int, batch: int, new_tokens: int, gpu: GPU) -> list[Work]:
        seen = min(context, self.window or context)
        cached = batch * context * self.token_bytes(context)
        pairs = batch * self.heads * seen * _causal(context, new_tokens)
        up = 2 * batch * self.heads * self.rank * (self.nope_dim + self.value_dim)  # of one token
        parts, merges = _parts(batch, 1, context, self.heads * new_tokens * self.rank, gpu)
        absorb = 2 * pairs * (2 * self.rank + self.rope_dim) + up * new_tokens
        # Expanded keys and values are written and read again, in 16 bits.
        width = self.nope_dim + self.rope_dim + self.value_dim
        expanded = 2 * 2 * batch * seen * self.heads * width
        return [
            Work("absorb", cached + parts, absorb, 1 + merges),
            Work("reconstruct", cached + expanded, 2 * pairs * width + up * seen, 4),
        ]


@dataclass(frozen=True)
class Block:
    """A latent and what is rebuilt from it.

    Attributes:
        rank: numbers cached of a token, those of other layers that are read too included.
        keys, values: KV heads that are rebuilt from it.
        tokens: sinks and window, where it is kept for those only; None: all.
    """

    rank: int
    keys: int
    values: int
    tokens: int | None = None

    def seen(self, tokens: int) -> int:
        return tokens if self.tokens is None else min(tokens, self.tokens)


@dataclass(frozen=True)
class LowRank:
    """Keys rebuilt from latents before their rotation; values stay in the latent.

    Rebuilding a key of d numbers from a latent of r takes 2·r·d FLOPs a KV head and does not shrink with fewer queries,
    so latents that serve many KV heads leave the memory-bound side of the roofline.

    Attributes:
        exact_tokens: sinks and window, read as the source's keys and values beside the latents.
        number_bytes: of a cached number of a latent, scales included.
        window: latest tokens that a query sees at all; None: all.
    """

    heads: int
    kv_heads: int
    head_dim: int
    blocks: tuple[Block, ...]
    exact_tokens: int = 0
    number_bytes: float = 2.0
    window: int | None = None

    def token_bytes(self, context: int) -> float:
        seen = min(context, self.window or context)
        latents = sum(block.rank * block.seen(seen) for block in self.blocks) * self.number_bytes
        return (latents + min(seen, self.exact_tokens) * 4 * self.kv_heads * self.head_dim) / context

    def rebuild_intensity(self) -> float:
        """FLOPs of rebuilding keys for each byte of latents."""
        flops = sum(2 * block.rank * self.head_dim * block.keys for block in self.blocks)
        return flops / (sum(block.rank for block in self.blocks) * self.number_bytes)

    def ways(self, context: int, batch: int, new_tokens: int, gpu: GPU) -> list[Work]:
        causal, every = _causal(context, new_tokens), min(context, self.window or context)
        keys = values = scores = mixed = expanded = 0.0
        for block in self.blocks:
            tokens = batch * block.seen(every)
            keys += 2 * tokens * block.rank * self.head_dim * block.keys
            values += 2 * tokens * block.rank * self.head_dim * block.values
            queries = self.heads / self.kv_heads * causal  # of a KV head
            scores += 2 * tokens * queries * block.keys * self.head_dim
            mixed += 2 * tokens * queries * block.values * block.rank
            # Rebuilt keys and values are written and read again, in 16 bits.
            expanded += 2 * 2 * tokens * (block.keys + block.values) * self.head_dim
        cached = batch * context * self.token_bytes(context)
        width = max(block.rank for block in self.blocks) * self.heads * new_tokens
        parts, merges = _parts(batch, self.kv_heads, context, width, gpu)
        return [
            Work("rebuild", cached + parts, keys + scores + mixed, 1 + merges),
            Work("reconstruct", cached + expanded, keys + values + 2 * scores, 6),
        ]


@dataclass(frozen=True)
class Prediction:
    """Attention of all layers in one step.

    Attributes:
        seconds: in all.
        bytes, flops, launches: of the ways that were chosen.
        ways: how many layers go which way.
        bound: what takes the most time.
    """

    seconds: float
    bytes: float
    flops: float
    launches: int
    ways: dict[str, int]
    bound: str


@dataclass(frozen=True)
class Comparison:
    """A conversion beside its source.

    Attributes:
        speedup: of the attention of a decoding step.
        bytes_ratio: how many times fewer bytes of cache a step reads: what the speed-up tends to.
        faster: whether it is worth calling so, `LEAST_GAIN`.
        reason: what keeps it from being faster, in words; None where it is.
    """

    source: Prediction
    converted: Prediction
    speedup: float
    bytes_ratio: float
    faster: bool
    reason: str | None


def choose(layer: Attention, context: int, batch: int, gpu: GPU, *, new_tokens: int = 1) -> Work:
    """The fastest way to attend: absorb or reconstruct, for instance.

    Raises:
        ValueError: a size below 1, or more new tokens than the context has.
    """
    if min(context, batch, new_tokens) < 1 or new_tokens > context:
        raise ValueError(f"cannot plan {batch} rows of {context} tokens, {new_tokens} of them new: 1 of each is least")
    return min(layer.ways(context, batch, new_tokens, gpu), key=lambda work: work.seconds(gpu))


def predict(
    layers: Iterable[Attention], context: int, batch: int, gpu: GPU, *, new_tokens: int = 1, way: str | None = None
) -> Prediction:
    """Time of the attention of some layers in one step.

    Args:
        way: instead of the fastest, for layers that have it: "reconstruct" is what stock transformers does with MLA.

    Raises:
        ValueError: as `choose`.
    """
    chosen: Counter[Work] = Counter()
    for layer, count in Counter(layers).items():
        best = choose(layer, context, batch, gpu, new_tokens=new_tokens)
        named = [work for work in layer.ways(context, batch, new_tokens, gpu) if work.way == way]
        chosen[(named or [best])[0]] += count
    ways: Counter[str] = Counter()
    bounds: Counter[str] = Counter()
    for work, count in chosen.items():
        ways[work.way] += count
        bounds[work.bound(gpu)] += count * work.seconds(gpu)
    return Prediction(
        sum(count * work.seconds(gpu) for work, count in chosen.items()),
        sum(count * work.bytes for work, count in chosen.items()),
        sum(count * work.flops for work, count in chosen.items()),
        sum(count * work.launches for work, count in chosen.items()),
        dict(ways),
        max(bounds, key=bounds.get),
    )


def compare(
    source: Sequence[Attention],
    converted: Sequence[Attention],
    context: int,
    batch: int,
    gpu: GPU,
    *,
    new_tokens: int = 1,
    way: str | None = None,
) -> Comparison:
    """Predicts both and says whether decoding gets faster, and if not, why.

    Raises:
        ValueError: as `choose`, or the two have other numbers of layers.
    """
    if len(source) != len(converted):
        raise ValueError(f"a conversion keeps the layers: {len(source)} of the source, {len(converted)} of the result")
    before = predict(source, context, batch, gpu, new_tokens=new_tokens)
    after = predict(converted, context, batch, gpu, new_tokens=new_tokens, way=way)
    speedup = before.seconds / after.seconds
    sizes = [sum(layer.token_bytes(context) for layer in layers) for layers in (source, converted)]
    faster = speedup >= LEAST_GAIN
    reason = None if faster else _why_not(converted, before, after, sizes, context * batch, gpu)
    return Comparison(before, after, speedup, sizes[0] / sizes[1], faster, reason)


def _parts(batch: int, programs: int, context: int, numbers: int, gpu: GPU) -> tuple[float, int]:
    """Bytes of fp32 parts, written and read, and launches of a merge; `numbers` are those of one row's outputs."""
    splits = split_count(batch * programs, context, gpu.processors)
    return (8.0 * batch * splits * numbers, 1) if splits > 1 else (0.0, 0)


def _causal(context: int, new_tokens: int) -> float:
    """Queries that see a token, on average: all new ones, or half of them where the whole context is new."""
    return new_tokens * (context - (new_tokens - 1) / 2) / context


def _why_not(
    layers: Sequence[Attention], before: Prediction, after: Prediction, sizes: list[float], tokens: int, gpu: GPU
) -> str:
    """What keeps a conversion from being faster."""
    per_layer = [size / len(layers) for size in sizes]
    if sizes[0] < LEAST_GAIN * sizes[1]:
        return f"a step reads {per_layer[1]:,.0f} bytes a token and layer, the source {per_layer[0]:,.0f}"
    # Without launches, at the same bytes and FLOPs.
    memory, compute = after.bytes / gpu.bytes_per_second, after.flops / gpu.flops_per_second
    if before.seconds - before.launches * gpu.launch_seconds < LEAST_GAIN * max(memory, compute):
        if "reconstruct" in after.ways:
            return "keys and values are reconstructed in memory at every step"
        rebuilt = [layer for layer in layers if isinstance(layer, LowRank)]
        if rebuilt and compute > memory:
            heads = max(block.keys for layer in rebuilt for block in layer.blocks)
            rate = max(layer.rebuild_intensity() for layer in rebuilt)
            return (
                f"the keys of {heads} KV heads are rebuilt from one latent: {rate:,.0f} FLOPs a byte, "
                f"{gpu.name} does {gpu.ridge:,.0f}; --to mla needs no rebuilding"
            )
        return (
            f"products take {compute * 1e6:,.0f} us, reading {memory * 1e6:,.0f}"
            if compute > memory
            else ("parts of split rows take as many bytes as the cache saves")
        )
    launches = after.launches * gpu.launch_seconds
    return f"launches take {launches / after.seconds:.0%} of the time at {tokens:,} tokens in all"
