"""Pattern of a model: scores of its KV heads with their provenance, in one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import BoolTensor, Tensor

from surgery.checkpoint.disk import disk_errors, written_whole
from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file

KEY, FORMAT = "surgery_heads", 1
"""Metadata key of the header, and the version of its format."""
PART = "part."


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """Scores of L layers and G KV heads, and their provenance, as plain values by name.

    Attributes:
        scores: [L, G] float32, finite; the higher, the more a head needs its whole context.
        sinks, recent: first and last tokens that a streaming head sees, the query's own included; None if unknown.
        spread: [L, G] float32, standard deviation of the scores over the seeds; None for one seed.
        parts: intermediate tensors of the scores, by name.
        data_sha256: hash of the tokens that heads were scored on.
        model: ``name``, ``sha256`` of the weights and ``config_sha256``, as far as known.
    """

    scores: Tensor
    method: str
    sinks: int | None = None
    recent: int | None = None
    spread: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    data_sha256: str | None = None
    model: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    seconds: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise SurgeryError for scores or a spread of wrong shape or dtype, or not finite, and for invalid fields."""
        shape = list(self.scores.shape)
        for name, tensor in (("scores", self.scores), ("spread", self.spread)):
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or list(tensor.shape) != shape or len(shape) != 2 or not tensor.numel():
                raise SurgeryError(
                    f"{name} must be float32 [layers, KV heads], not {tensor.dtype} {list(tensor.shape)}"
                )
            if not tensor.isfinite().all():
                layer, head = (~tensor.isfinite()).nonzero()[0].tolist()
                raise SurgeryError(f"{name} of layer {layer}, KV head {head}: {tensor[layer, head]} is not finite")
        for name in ("settings", "facts", "model", "versions", "parts"):
            if not isinstance(getattr(self, name), Mapping):
                raise SurgeryError(f"{name} of a pattern must be a mapping, not {getattr(self, name)!r}")
        for name, least in (("sinks", 0), ("recent", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise SurgeryError(f"{name} of a pattern must be a whole number of at least {least}, not {value!r}")

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return self.scores.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of KV heads per layer, G."""
        return self.scores.shape[1]

    @property
    def sha256(self) -> str:
        """Hash of the scores and their shape: equal hashes rank heads equally."""
        values = self.scores.cpu().contiguous().numpy().astype("<f4").tobytes()
        return hashlib.sha256(json.dumps(list(self.scores.shape)).encode() + values).hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return the hash and provenance of the scores, as plain values."""
        names = ("method", "sinks", "recent", "settings", "facts", "data_sha256", "model", "seeds", "seconds")
        return {"sha256": self.sha256, **{name: getattr(self, name) for name in names}}

    def ranking(self) -> list[tuple[int, int]]:
        """Return all heads as (layer, KV head), highest score first; ties by layer, then by head."""
        order = self.scores.cpu().flatten().argsort(descending=True, stable=True)
        return [divmod(head, self.kv_heads) for head in order.tolist()]

    def full_heads(self, share: float) -> BoolTensor:
        """Return the mask [L, G] of the best heads, ``share`` of all, rounded half up.

        Raises SurgeryError: the share is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise SurgeryError(f"share of heads must be from 0 to 1, not {share}")
        full = torch.zeros(self.layers, self.kv_heads, dtype=torch.bool)
        for layer, head in self.ranking()[: count_of(share, full.numel())]:
            full[layer, head] = True
        return full

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Write the pattern atomically as a safetensors file with a JSON header in its metadata.

        Raises SurgeryError: an existing file may not be replaced, writing fails, or a header value is not plain.
        """
        path = Path(path).expanduser()
        check_file(path, overwrite=overwrite)
        tensors = {"scores": self.scores, **({} if self.spread is None else {"spread": self.spread})}
        tensors |= {PART + name: part for name, part in self.parts.items()}
        content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, {KEY: self._header()})
        with written_whole(path) as part:
            part.write_bytes(content)
        return path

    @classmethod
    def load(cls, path: str | Path) -> HeadPattern:
        """Read a pattern file. Raises SurgeryError: the file is missing, not a pattern, or its fields are invalid."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise SurgeryError.at(path, "no such file; pass a pattern that `surgery heads` wrote")
        try:
            with disk_errors(path), safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get(KEY, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
        except (SafetensorError, ValueError, RecursionError) as error:
            raise SurgeryError.at(path, f"not a readable pattern ({' '.join(str(error).split())[:200]})") from None
        if not isinstance(header, dict) or "scores" not in tensors:
            raise SurgeryError.at(
                path, "a safetensors file, but not a head pattern; pass one that `surgery heads` wrote"
            )
        if header.pop("format", None) != FORMAT:
            raise SurgeryError.at(path, f"unknown pattern format, not {FORMAT}; update surgery to read it")
        parts = {name.removeprefix(PART): tensor for name, tensor in tensors.items() if name.startswith(PART)}
        try:
            header["seeds"] = tuple(header.get("seeds", ()))
            return cls(scores=tensors["scores"], spread=tensors.get("spread"), parts=parts, **header)
        except TypeError as error:
            raise SurgeryError.at(path, f"damaged pattern header ({error}); score the model again") from None
        except SurgeryError as error:
            raise SurgeryError.at(path, f"{error}") from None

    def _header(self) -> str:
        header: dict[str, Any] = {"format": FORMAT, "method": self.method, "sinks": self.sinks, "recent": self.recent}
        for name in ("settings", "facts", "model", "versions"):
            header[name] = dict(getattr(self, name))
        header |= {"data_sha256": self.data_sha256, "seeds": list(self.seeds), "seconds": self.seconds}
        try:
            return json.dumps(header, ensure_ascii=False, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise SurgeryError(f"the pattern header contains values that JSON cannot hold ({error})") from None


def count_of(share: float, heads: int) -> int:
    """Return a share of all heads as a number, rounded half up."""
    return int(share * heads + 0.5)
