"""Checkpoints whose tensors have other names, and queries, keys and values in one matrix: how they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.common.errors import SurgeryError
from surgery.common.rows import Rows

FUSED = "self_attn.qkv_proj."


@dataclass(frozen=True)
class Renamed:
    """Other spellings of a family's tensors and config.

    Attributes:
        names: patterns of its names, and the other families' names for them, applied one after the other. What holds
            queries, keys and values is ``self_attn.qkv_proj``.
        buffers: a pattern of tensors that are no weights.
        config: from its config.json the same with sizes under the names that other families have for them.
        by_head: whether rows of a head's query, key and value stand together; else those of all queries come first.
        transposed: whether matrices of its attention are stored as [in, out].
    """

    names: Mapping[str, str]
    buffers: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    by_head: bool = False
    transposed: bool = False

    def parts(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Rows]]:
        """Map stored tensors, by their shapes, to the names that they are read under and their rows.

        Args:
            config: what :attr:`config` gives.
        """
        heads, width = config["num_attention_heads"], config["hidden_size"] // config["num_attention_heads"]
        views: dict[str, dict[str, Rows]] = {}
        for stored, shape in shapes.items():
            if re.search(self.buffers, stored):
                views[stored] = {}
                continue
            name = stored
            for pattern, replacement in self.names.items():
                name = re.sub(pattern, replacement, name)
            matrix = self.transposed and ".self_attn." in name and len(shape) == 2
            if FUSED not in name:
                rows = shape[-1 if matrix else 0]
                views[stored] = {name: Rows(((0, rows),), matrix)}
                continue
            views[stored] = {
                name.replace(FUSED, f"self_attn.{part}_proj."): Rows(self._runs(place, heads, width), matrix)
                for place, part in enumerate("qkv")
            }
        return views

    def _runs(self, place: int, heads: int, width: int) -> tuple[tuple[int, int], ...]:
        """Rows of queries, keys or values, which are the first, second or third."""
        if not self.by_head:
            return ((place * heads * width, (place + 1) * heads * width),)
        return tuple(((3 * head + place) * width, (3 * head + place + 1) * width) for head in range(heads))


def whole(config: dict[str, Any], name: str) -> int:
    """An entry of config.json that has to be a whole number above 0.

    Raises:
        SurgeryError: it is not.
    """
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise SurgeryError(f"config.json: {name} of {config['model_type']} is {value!r}, not one whole number above 0")
    return value
