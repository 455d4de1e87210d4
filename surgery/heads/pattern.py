"""A pattern: the scores of a model's KV heads with where they came from, and the one file that it is kept in."""

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
"""Entry of a file's metadata that holds the header, and the number of its form."""
PART = "part."


@dataclass(frozen=True, eq=False)
class HeadPattern:
    """Scores of L layers and G KV heads, and all that decided them.

    Attributes:
        scores: [L, G] float32, finite; the higher, the more a head needs its whole context.
        method: what they were found with.
        sinks, recent: tokens that a streaming head is meant to see, the recent ones with the query's own; None where
            nobody said.
        spread: [L, G] float32, standard deviation of the scores over the seeds; None for one seed.
        parts: what the scores were made of, by name.
        settings: of the scoring, by name: plain values.
        facts: what the method had to say: plain values.
        data_sha256: hash of the tokens that heads were scored on.
        model: ``name``, ``sha256`` of the weights and ``config_sha256``, as far as known.
        seeds: what was random.
        seconds: that the scoring took.
        versions: of packages, by name.
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
        """Raises SurgeryError for scores or a spread of another shape or dtype, or that are not finite."""
        shape = list(self.scores.shape)
        for name, tensor in (("scores", self.scores), ("spread", self.spread)):
            if tensor is None:
                continue
            if tensor.dtype != torch.float32 or list(tensor.shape) != shape or len(shape) != 2 or not tensor.numel():
                raise SurgeryError(
                    f"{name} of heads are {tensor.dtype} {list(tensor.shape)}: float32 [layers, KV heads] are needed"
                )
            if not tensor.isfinite().all():
                layer, head = (~tensor.isfinite()).nonzero()[0].tolist()
                raise SurgeryError(
                    f"{name} of layer {layer}, KV head {head}: {tensor[layer, head]} is no number to rank"
                )
        for name in ("settings", "facts", "model", "versions", "parts"):
            if not isinstance(getattr(self, name), Mapping):
                raise SurgeryError(f"{name} of a pattern are {getattr(self, name)!r}, not names with values")
        for name, least in (("sinks", 0), ("recent", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise SurgeryError(f"{name} of a pattern: {value!r} is not a whole number of at least {least}")

    @property
    def layers(self) -> int:
        """L."""
        return self.scores.shape[0]

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.scores.shape[1]

    @property
    def sha256(self) -> str:
        """Hash of the scores and their shape: equal hashes rank heads equally."""
        values = self.scores.cpu().contiguous().numpy().astype("<f4").tobytes()
        return hashlib.sha256(json.dumps(list(self.scores.shape)).encode() + values).hexdigest()

    def identity(self) -> dict[str, Any]:
        """Return the origin of the scores, as plain values."""
        names = ("method", "sinks", "recent", "settings", "facts", "data_sha256", "model", "seeds", "seconds")
        return {"sha256": self.sha256, **{name: getattr(self, name) for name in names}}

    def ranking(self) -> list[tuple[int, int]]:
        """All heads as (layer, KV head), best first; of equal ones that of the lower layer, then the lower number."""
        order = self.scores.cpu().flatten().argsort(descending=True, stable=True)
        return [divmod(head, self.kv_heads) for head in order.tolist()]

    def full_heads(self, share: float) -> BoolTensor:
        """The best heads [L, G]: as many as are nearest to ``share`` of all, the higher number at a half.

        Raises:
            SurgeryError: the share is not between 0 and 1.
        """
        if not 0 <= share <= 1:
            raise SurgeryError(f"share {share}: a share of heads lies between 0 and 1")
        full = torch.zeros(self.layers, self.kv_heads, dtype=torch.bool)
        for layer, head in self.ranking()[: count_of(share, full.numel())]:
            full[layer, head] = True
        return full

    def save(self, path: str | Path, overwrite: bool = False) -> Path:
        """Writes the pattern as one safetensors file whose metadata holds a JSON header; whole or not at all.

        Raises:
            SurgeryError: there is a file that may not be replaced, or it cannot be written, or a value of the header is
                not plain.
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
        """Reads what `save` wrote.

        Raises:
            SurgeryError: there is no such file, it is no pattern, or its scores are none.
        """
        path = Path(path).expanduser()
        if not path.is_file():
            raise SurgeryError.at(path, "no such file; name a pattern that `surgery heads` wrote")
        try:
            with disk_errors(path), safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get(KEY, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a mapping
        except (SafetensorError, ValueError, RecursionError) as error:
            raise SurgeryError.at(path, f"not a readable pattern ({' '.join(str(error).split())[:200]})") from None
        if not isinstance(header, dict) or "scores" not in tensors:
            raise SurgeryError.at(
                path, "a safetensors file, but no pattern of heads; name one that `surgery heads` wrote"
            )
        if header.pop("format", None) != FORMAT:
            raise SurgeryError.at(path, f"a pattern of another form than {FORMAT}; update surgery to read it")
        parts = {name.removeprefix(PART): tensor for name, tensor in tensors.items() if name.startswith(PART)}
        try:
            header["seeds"] = tuple(header.get("seeds", ()))
            return cls(scores=tensors["scores"], spread=tensors.get("spread"), parts=parts, **header)
        except TypeError as error:
            raise SurgeryError.at(path, f"damaged header of a pattern ({error}); score the model again") from None
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
            raise SurgeryError(f"the header of a pattern holds something other than plain values ({error})") from None


def count_of(share: float, heads: int) -> int:
    """Heads that are nearest to a share of all, the higher number at a half."""
    return int(share * heads + 0.5)
