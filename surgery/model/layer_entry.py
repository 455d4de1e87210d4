"""Entries of `attention_layers` in config.json: the base class, and the entry of a family's own attention.

Every kind has a dataclass in `<kind>_entry.py`, see `parts.KINDS`. No torch here: engines and the vLLM plugin read
entries without a model.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class LayerEntry:
    """Abstract base class of a layer's entry. A `config` is any object with the attributes of a `SurgeryConfig`.

    Attributes:
        kind: value of `kind`; None for the family's own attention, whose entry is `null`.
        attention: names of the part and of the attention class in it.
        nested: dataclasses of fields that are dictionaries in config.json.
        has_gate: whether the attention applies the output gate of families that have one.
        has_rope_part: whether rotated keys are cached apart from latents, so that `kv_cache` may set their format.
        streams: whether some heads or latents are cached for sinks and a window only.
        gives_weights: whether the attention can return weights over all tokens.
        has_window: whether full-precision tokens are cached next to latents.
        joined: whether the layer reads the cached latents of the layer before it.
        quantizes: whether the entry itself defines a quantization token by token.
        ranks: latent elements of each block; the leading ones alone form a smaller layer.
    """

    kind: ClassVar[str | None] = None
    attention: ClassVar[tuple[str, str]]
    nested: ClassVar[Mapping[str, type]] = {}
    has_gate = has_rope_part = streams = has_window = joined = quantizes = False
    gives_weights = True
    ranks = ()
    codes = None

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> "LayerEntry":
        """Parse an entry of config.json; ValueError for missing or unknown keys."""
        values = {name: value for name, value in entry.items() if name != "kind"}
        try:
            return cls(**{name: _frozen(value, cls.nested.get(name)) for name, value in values.items()})
        except TypeError as error:
            raise ValueError(f"has keys {sorted(entry)}: {error}") from None

    def to_entry(self) -> dict[str, Any] | None:
        """Return the entry for config.json, without options that are None."""
        options = {field.name for field in fields(self) if field.default is None}
        values = {name: value for name, value in asdict(self).items() if value is not None or name not in options}
        return json.loads(json.dumps({"kind": self.kind, **values}))  # tuples as lists

    def problem(self, config: Any, index: int, entries: Sequence["LayerEntry"]) -> str | None:
        """Validate the entry of layer `index` among all `entries`; return an error message, or None if valid."""

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the heads of a token in the cache, and their elements in the key and in the value tensor."""
        return kv_heads_of(config), head_dim_of(config), head_dim_of(config)

    def width(self, config: Any) -> int:
        """Count the elements that the layer caches of a token."""
        heads, key, value = self.cached_shape(config)
        return heads * (key + value)

    def key_width(self, config: Any) -> int:
        """Return the elements of a key as attention reads it."""
        rope = getattr(config, "qk_rope_head_dim", None)
        return head_dim_of(config) if rope is None else config.qk_nope_head_dim + rope


@dataclass(frozen=True, kw_only=True)
class StockEntry(LayerEntry):
    """The family's own attention."""

    def to_entry(self) -> None:
        """Return None, its entry in `attention_layers`."""

    def cached_shape(self, config: Any) -> tuple[int, int, int]:
        """Return the shape of keys and values; MLA has the latent as key and the rotated key as value."""
        latent = caches_latents(config)
        return (1, config.kv_lora_rank, config.qk_rope_head_dim) if latent else super().cached_shape(config)


def window_problem(sinks: int, recent: int) -> str | None:
    """Validate a window of the first and the last tokens; return an error message, or None if valid."""
    message = f"recent must be at least 1 and sinks at least 0, not {recent} and {sinks}"
    return message if sinks < 0 or recent < 1 else None


def codes_problem(entry: LayerEntry) -> str | None:
    """Validate the `codes` of a layer that caches latents; return an error message, or None if valid."""
    if entry.codes and entry.streams:
        return "codes are not supported with streaming blocks"
    counts, rank = [channels for _, channels in entry.codes or ()], sum(entry.ranks)
    wrong = counts and (sum(counts) != rank or min(counts) < 1)
    return f"codes {entry.codes} must add up to {rank} latents" if wrong else None


def caches_latents(config: Any) -> bool:
    """Return whether a family's own attention is MLA."""
    return getattr(config, "kv_lora_rank", None) is not None


def kv_heads_of(config: Any) -> int:
    """Return the number of KV heads of a family's own attention."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_dim_of(config: Any) -> int:
    """Return the head dimension of a family's own attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _frozen(value: Any, part: type | None) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(each, part) for each in value)
    return part(**{name: _frozen(each, None) for name, each in value.items()}) if part and value else value
