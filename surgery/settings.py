"""What a user can ask of a conversion, with the defaults in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from surgery.engines.limits import ENGINES
from surgery.errors import SurgeryError
from surgery.file_settings import FileSettings

NO_CALIBRATION = "none"
METHODS = ("fisher", "transmla", "mha2mla")
KV_HEADS_CARRIERS = ("auto", "own", "decilm")
KV_HEADS_METHODS = ("fisher", "kv-heads", "procrustes", "mean-pool", "key-norm")
LOW_RANK_METHODS = ("fisher", "separate", "svd-llm", "asvd", "cskv", "palu", "think")
CROSS_LAYER_METHODS = ("xkv", "cascade", "xkv-prompt", "minicache")
CARRIERS = ("auto", "stock", "own")
LATENT_NORMS = ("auto", "tiny", "constant")
FREQUENCIES = ("free", "grid")
ALLOCATIONS = ("uniform", "spectrum")
RANK_ALLOCATIONS = ("auto", "uniform", "spectrum", "greedy")


@dataclass(frozen=True)
class ConversionSettings(FileSettings):
    """What all conversions can be asked for.

    Attributes:
        kv_ratio: share of the source's KV bytes per token to keep.
        calibration: builtin, self, a file, a datasets name, shares of several such as "prose=0.5,code=0.3,chat=0.2", or
            none for weights only.
        recall: share of calibration sequences that carry planted recalls.
        held_out_text: a file or a datasets name that the held-out sequences are from; None: text that belongs to the
            calibration's, other documents.
        held_out: sequences for choices between results and for the report's losses, and as many recall prompts.
        device: where layers run; "auto" is a CUDA device if there is one, otherwise the CPU.
        dtype: in which layers run during calibration and measurement.
        keep_statistics: a folder in which statistics of the source are kept, and taken from where those of the same
            source, text, seed, dtype and batch size are there already.
    """

    kv_ratio: float | None = None
    calibration: str = "builtin"
    calibration_tokens: int = 24_576
    calibration_length: int = 1_024
    text_field: str = "text"
    recall: float = 0.5
    held_out: int = 8
    held_out_text: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    batch_size: int = 4
    max_shard_size: str = "5GB"
    keep_statistics: str | None = None

    def __post_init__(self) -> None:
        self._check_choice("dtype", ("float32", "bfloat16", "float64"))
        if self.kv_ratio is not None and not 0 < self.kv_ratio < 1:
            raise SurgeryError(f"kv_ratio {self.kv_ratio} must lie between 0 and 1, such as 0.25")
        self._check_positive("calibration_tokens", "calibration_length", "batch_size", "held_out")
        if self.held_out_text in ("builtin", "self", NO_CALIBRATION, self.calibration):
            raise SurgeryError(f"held_out_text {self.held_out_text}: name a text that is not the calibration's own")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise SurgeryError(f"{name} {getattr(self, name)!r} is unknown: choose {', '.join(allowed)}")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SurgeryError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class StructureSettings(ConversionSettings):
    """What conversions can be asked for whose result may keep its cache as codes of a few bits.

    Attributes:
        bits: of a cached number: 8, 4, 2, or "fp8" (e4m3); None: those of the weights. ``kv_ratio`` and what else fixes
            the structure count numbers, so the bytes are less by these bits.
        sinks: first tokens that stay exact.
        group, keys, hadamard: as for ``--to quantized``, :class:`QuantizedSettings`; with bits only. A group of None is
            32, and 64 where bits are "auto", whose scales would otherwise take as much as many of the codes.
    """

    bits: int | str | None = None
    group: int | None = None
    keys: str = "channel"
    hadamard: bool = False
    sinks: int | None = 0

    BITS: ClassVar[tuple[str, ...]] = ("8", "4", "2", "fp8")
    SINKS_OF_CODES: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group is None:
            object.__setattr__(self, "group", 64 if self.bits == "auto" else 32)
        self._check_choice("keys", ("channel", "token"))
        self._check_positive("group")
        if self.sinks is not None and self.sinks < 0:
            raise SurgeryError(f"sinks must be at least 0, not {self.sinks}")
        if self.bits is None:
            if (self.group, self.keys, self.hadamard) != (32, "channel", False):
                raise SurgeryError("group, keys and hadamard are of a quantised cache: give bits too")
            if self.sinks and self.SINKS_OF_CODES:
                raise SurgeryError("sinks are the first tokens that a quantised cache keeps exact: give bits too")
            return
        self._check_bits("bits")
        least = {"fp8": 1, "8": 1, "4": 2}.get(str(self.bits), 4)
        if self.group % least:
            raise SurgeryError(f"group {self.group} of {self.bits} bits fills no whole bytes: choose a multiple of 4")

    def _check_bits(self, name: str, *more: str) -> None:
        allowed = (*(self.BITS if name == "bits" else StructureSettings.BITS), *more)
        if str(getattr(self, name)) not in allowed:
            raise SurgeryError(f"{name} {getattr(self, name)!r}: choose {', '.join(allowed[:-1])} or {allowed[-1]}")

    @property
    def quantizes(self) -> bool:
        """Whether the result keeps its cache as codes."""
        return self.bits is not None

    @property
    def format(self) -> str:
        """Of a code, as the cache layers call it."""
        return _format(self.bits)

    @property
    def suffix(self) -> str:
        """What bits add to the default name of the output."""
        if not self.quantizes:
            return ""
        return "-mixed" if self.bits == "auto" else f"-{self.format}"

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        said = {"format": self.format, "group": self.group, "window": 0, "keys": self.keys}
        return {**said, "sinks": self.sinks} if self.sinks and self.SINKS_OF_CODES else said


@dataclass(frozen=True)
class ConvertSettings(StructureSettings):
    """Settings of ``surgery convert --to mla``; configs/mla.yaml holds the same with comments.

    Attributes:
        method: named variant of the transform.
        kv_lora_rank, rope_dim: the budget spelled out instead of a ratio; with one, one of them fixes the split.
        rope_frequencies: "free" lets any frequencies keep RoPE; "grid" only the highest ones, once each, so that the
            result is a default-RoPE model that every engine loads.
        freqfold: neighbouring frequencies that TransMLA takes for one; None tries several.
        allocate: "uniform" ranks, or ranks per layer by "spectrum" at the same bytes in all, which only the own class
            holds; method fisher with text only.
        carrier: "stock" deepseek_v3, the project's "own" class, or "auto": stock where it can.
        latent_norm: how a stock class's latent norm is neutralised.
        rope_bits: with bits, those of the rotated numbers, which are quantised by token: 16 leaves them as they are,
            None takes ``bits``.
        engine: write what this engine carries ("all": each of them): sizes, frequencies and norm follow from it.
        fit_steps, fit_iterations, fit_queries: Gauss-Newton steps of the least-squares fit of each layer (0: none),
            conjugate-gradient iterations in each, and query positions sampled from each sequence; method fisher only.
            Their defaults were chosen on the demo model alone.
    """

    method: str = "fisher"
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    rope_frequencies: str = "free"
    freqfold: int | None = None
    allocate: str = "uniform"
    carrier: str = "auto"
    latent_norm: str = "auto"
    rope_bits: int | str | None = None
    engine: str | None = None
    fit_steps: int = 3
    fit_iterations: int = 8
    fit_queries: int = 256

    def __post_init__(self) -> None:
        for name, allowed in (
            ("method", METHODS),
            ("carrier", CARRIERS),
            ("latent_norm", LATENT_NORMS),
            ("rope_frequencies", FREQUENCIES),
            ("allocate", ALLOCATIONS),
        ):
            self._check_choice(name, allowed)
        super().__post_init__()
        if self.quantizes:
            _refuse_engine(self)
            if self.carrier == "stock":
                raise SurgeryError("bits: stock deepseek_v3 keeps a plain cache; drop --carrier stock")
            object.__setattr__(self, "carrier", "own")
        elif self.engine is not None:
            self._check_engine()
        _check_rope_bits(self)
        self._check_positive("kv_lora_rank", "freqfold", "fit_iterations", "fit_queries")
        if self.rope_dim is not None and (self.rope_dim < 0 or self.rope_dim % 2):
            raise SurgeryError(f"rope_dim must be even and not negative, not {self.rope_dim}")
        if self.allocate == "spectrum" and (self.method != "fisher" or self.calibration == NO_CALIBRATION):
            raise SurgeryError("allocate spectrum compares layers by the loss: it needs method fisher and text")
        if self.calibration == NO_CALIBRATION and self.method == "transmla":
            raise SurgeryError("method transmla needs calibration text: drop --calibration none")

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        return _with_formats(super().kv_cache(), rope_format=self.rope_bits)

    def _check_engine(self) -> None:
        self._check_choice("engine", ENGINES)
        for name, allowed in (("carrier", ("auto", "stock")), ("allocate", ("uniform",)), ("method", ("fisher",))):
            if getattr(self, name) not in allowed:
                raise SurgeryError(f"engine {self.engine} takes {name} {allowed[0]}, not {getattr(self, name)}")
        # Frozen; a result for an engine is a model of default RoPE, whatever else is asked for.
        object.__setattr__(self, "rope_frequencies", "grid")


@dataclass(frozen=True)
class KVHeadsSettings(StructureSettings):
    """Settings of ``surgery convert --to gqa``; configs/gqa.yaml holds the same with comments.

    Attributes:
        method: named variant of the transform.
        kv_heads: KV heads to keep in every layer, instead of a ratio; without either, half of the source's.
        allocate: "uniform", or by "spectrum": numbers of heads by layer whose predicted errors are least in all, where
            kv_heads or the ratio is the average; method fisher with text only.
        carrier: "own": the project's class; "decilm": DeciLM, whose layers may differ too (Llama only); "auto": the
            source's family if all layers keep the same number of heads, otherwise own.
        engine: refuse what this engine ("all": each of them) does not carry; layers that differ become DeciLM's.
        fit_steps, fit_iterations, fit_queries: as for MLA; method fisher with text only.
    """

    method: str = "fisher"
    kv_heads: int | None = None
    allocate: str = "uniform"
    carrier: str = "auto"
    engine: str | None = None
    fit_steps: int = 3
    fit_iterations: int = 8
    fit_queries: int = 256

    def __post_init__(self) -> None:
        self._check_choice("method", KV_HEADS_METHODS)
        self._check_choice("allocate", ALLOCATIONS)
        self._check_choice("carrier", KV_HEADS_CARRIERS)
        super().__post_init__()
        self._check_positive("kv_heads", "fit_iterations", "fit_queries")
        if self.kv_heads is not None and self.kv_ratio is not None:
            raise SurgeryError("give kv_heads or kv_ratio, not both")
        if self.allocate == "spectrum" and (self.method != "fisher" or self.calibration == NO_CALIBRATION):
            raise SurgeryError("allocate spectrum compares layers by the loss: it needs method fisher and text")
        if self.quantizes:
            _refuse_engine(self)
        if self.quantizes and self.carrier == "decilm":
            raise SurgeryError("bits: DeciLM keeps a plain cache; drop --carrier decilm")
        if self.method == "key-norm" and self.carrier != "auto":
            raise SurgeryError("method key-norm is written in the source's family: leave carrier auto")
        if self.engine is not None:
            self._check_choice("engine", ENGINES)
            if self.carrier == "own":
                raise SurgeryError(f"engine {self.engine} knows no own class: leave carrier auto")


@dataclass(frozen=True)
class LowRankSettings(StructureSettings):
    """Settings of ``surgery convert --to lowrank``; configs/lowrank.yaml holds the same with comments.

    Attributes:
        method: named variant of the transform.
        rank: numbers per token and layer, instead of a ratio; without either, a quarter of the source's.
        allocate: how the budget is spread over layers (and keys and values, where a method has them apart): "uniform",
            by the "spectrum" of what is dropped, or "greedy", by measured loss; "auto" is the spectrum where that
            compares layers by the loss (fisher, separate) and uniform elsewhere. Method palu has its own way.
        rank_multiple: every rank is one of it.
        window: tokens that a query reads exactly, its own included; 0: none. Counted in the bytes.
        sinks: first tokens that are read exactly too, with a window; with bits and none, whose latents stay exact.
        bits: "auto" chooses between 8, 4, 2 and none for every latent, by what it is worth, and ``kv_ratio`` is then
            the share of the bytes; method fisher with text only.
        fit_steps, fit_iterations, fit_queries: as for MLA; method fisher with text only.
    """

    method: str = "fisher"
    rank: int | None = None
    allocate: str = "auto"
    rank_multiple: int = 1
    window: int = 0
    fit_steps: int = 3
    fit_iterations: int = 8
    fit_queries: int = 256

    METHODS: ClassVar[tuple[str, ...]] = LOW_RANK_METHODS
    BITS: ClassVar[tuple[str, ...]] = ("8", "4", "2", "fp8", "auto")
    SINKS_OF_CODES: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self._check_choice("method", self.METHODS)
        self._check_choice("allocate", RANK_ALLOCATIONS)
        super().__post_init__()
        self._check_positive("rank", "rank_multiple", "fit_iterations", "fit_queries")
        if self.rank is not None and self.kv_ratio is not None:
            raise SurgeryError("give rank or kv_ratio, not both")
        if self.window < 0 or (self.sinks and not self.window and not self.quantizes):
            raise SurgeryError(f"{self.sinks} sinks and a window of {self.window}: sinks need a window of at least 1")
        if self.bits == "auto":
            chosen = {"rank": self.rank is not None, "rank_multiple": self.rank_multiple != 1}
            chosen |= {"allocate": self.allocate not in ("auto", "spectrum"), "method": self.method != "fisher"}
            chosen |= {"keys": self.keys != "channel", "hadamard": self.hadamard}
            chosen |= {"calibration": self.calibration == NO_CALIBRATION}
            if wrong := [name for name, unlike in chosen.items() if unlike]:
                raise SurgeryError(
                    f"bits auto chooses ranks and bits by the loss, of method fisher on text, with scales by channel: "
                    f"leave {', '.join(wrong)} at the default"
                )

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        said = super().kv_cache()
        return {**said, "sinks": self.sinks} if self.sinks and not self.window else said


@dataclass(frozen=True)
class CrossLayerSettings(LowRankSettings):
    """Settings of ``surgery convert --to crosslayer``; configs/crosslayer.yaml holds the same with comments.

    Attributes:
        method: "xkv": one basis for the group, a token stored once it has left the group; "cascade": every layer caches
            its own latents and reads those of the group's earlier layers too; "xkv-prompt": the paper's basis, from
            each prompt; "minicache": adjacent pairs of layers merged.
        group_size: adjacent layers in a group.
        block: tokens that stay exact until they are as many, in all methods but cascade; see docs/cross-layer.md.
        fit_steps, fit_iterations, fit_queries: method cascade only.
    """

    method: str = "xkv"
    allocate: str = "uniform"
    group_size: int = 3
    block: int = 64

    METHODS: ClassVar[tuple[str, ...]] = CROSS_LAYER_METHODS
    BITS: ClassVar[tuple[str, ...]] = StructureSettings.BITS

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("block")
        if self.quantizes and self.method != "cascade":
            raise SurgeryError(f"bits: the store that layers share in method {self.method} holds no codes; use cascade")
        if self.group_size < 2:
            raise SurgeryError(f"group_size {self.group_size}: a group has two layers at least; --to lowrank has one")
        if self.allocate != "uniform":
            raise SurgeryError("allocate: ranks of cross-layer groups are uniform")


@dataclass(frozen=True)
class HybridSettings(StructureSettings):
    """Settings of ``surgery convert --to hybrid``; configs/hybrid.yaml holds the same with comments.

    Calibration text serves to measure the loss only; nothing is fitted.

    Attributes:
        heads: pattern file of ``surgery heads``, or of DuoAttention or PruLong; only a plan in which all heads stream
            needs none.
        kv_ratio: share of the source's KV bytes to keep at ``context`` tokens; without it and ``streaming``, a half.
        context: tokens at which the ratio is counted; None: the model's limit. Streaming heads cost the same at any.
        streaming: share of the heads that stream, instead of a ratio; 1 is StreamingLLM.
        sinks, recent: first tokens that streaming heads keep, and last ones with the query's own among them; None:
            those that the pattern was made for.
        compensated: share of the streaming heads, the best of them, that also read the mean of what they dropped.
        heads_multiple: every layer's full heads are a multiple of it, for tensor parallelism over so many devices.
        streaming_bits: of what streaming heads keep; None: as many as of the others.
    """

    heads: str | None = None
    context: int | None = None
    streaming: float | None = None
    sinks: int | None = None
    recent: int | None = None
    compensated: float = 0.0
    heads_multiple: int = 1
    streaming_bits: int | str | None = None

    SINKS_OF_CODES: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming_bits is not None:
            self._check_bits("streaming_bits")
            if not self.quantizes:
                raise SurgeryError("streaming_bits are of a quantised cache: give bits too")
        self._check_positive("context", "recent", "heads_multiple")
        if self.kv_ratio is not None and self.streaming is not None:
            raise SurgeryError("give kv_ratio or streaming, not both")
        for name in ("streaming", "compensated"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise SurgeryError(f"{name} {share}: a share of heads lies between 0 and 1")

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        return _with_formats(super().kv_cache(), streaming_format=self.streaming_bits)


@dataclass(frozen=True)
class QuantizedSettings(StructureSettings):
    """Settings of ``surgery convert --to quantized``; configs/quantized.yaml holds the same with comments.

    Calibration text serves to measure the loss only; nothing is fitted.

    Attributes:
        bits: of a cached number: 8, 4, 2, or "fp8" (e4m3).
        group: tokens that share a scale in a channel of the keys, channels that do in a token of values and latents.
        window: of the most recent tokens, how many stay exact at least.
        keys: what shares a scale of keys, or of latents in their place: the tokens of a "channel" or the channels of a
            "token". By channel is better for latents too, at fewer bytes: some of them are much larger than others.
        hadamard: fold a rotation into the weights that spreads outliers of values and latents over their channels.
        sinks: first tokens that stay exact.
        streaming_bits: of hybrid models, bits of what streaming heads keep; None: as many as of the others.
        rope_bits: of MLA, bits of the rotated numbers, which are quantised by token: 16 leaves them as they are, None
            takes ``bits``.
    """

    bits: int | str = 4
    window: int = 0
    streaming_bits: int | str | None = None
    rope_bits: int | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits is None:
            raise SurgeryError("bits: choose 8, 4, 2 or fp8")
        if self.kv_ratio is not None:
            raise SurgeryError("kv_ratio: the bytes of a quantised cache follow from bits, group and window")
        if self.window < 0:
            raise SurgeryError(f"window must be at least 0, not {self.window}")
        if self.streaming_bits is not None:
            self._check_bits("streaming_bits")
        _check_rope_bits(self)

    @property
    def suffix(self) -> str:
        """Nothing: the target's own name says it."""
        return ""

    def kv_cache(self) -> dict[str, int | str]:
        """What config.json of the own class says."""
        said = {**super().kv_cache(), "window": self.window}
        return _with_formats(said, streaming_format=self.streaming_bits, rope_format=self.rope_bits)


def _refuse_engine(settings: ConvertSettings | KVHeadsSettings) -> None:
    if settings.engine is not None:
        raise SurgeryError(
            f"bits: {settings.engine} cannot read a quantised cache of ours; drop --bits and give the engine its own "
            "cache dtype, which surgery doctor names"
        )


def _check_rope_bits(settings: ConvertSettings | QuantizedSettings) -> None:
    if settings.rope_bits is not None:
        settings._check_bits("rope_bits", "16")
        if not settings.quantizes:
            raise SurgeryError("rope_bits are of a quantised cache: give bits too")


def _with_formats(kv_cache: dict[str, int | str], **bits: int | str | None) -> dict[str, int | str]:
    return kv_cache | {name: _format(each) for name, each in bits.items() if each is not None}


def _format(bits: int | str) -> str:
    """What the cache layers call it; where formats are chosen by latent, that of all others."""
    return {"fp8": "fp8", "auto": "int4", "16": "exact"}.get(str(bits), f"int{bits}")
