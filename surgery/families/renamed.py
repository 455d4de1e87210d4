"""Mapping of checkpoints with other tensor names and a fused query-key-value matrix."""

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
    """Mapping of a family's tensor names and config keys to Llama's.

    Attributes:
        names: regular expressions and their replacements, in order; the fused module becomes ``self_attn.qkv_proj``.
        buffers: regular expression of tensors that are not weights.
        config: returns its config.json with sizes under Llama's keys.
        by_head: whether each head's query, key and value rows are adjacent; else all queries come first.
        transposed: whether attention matrices are stored as [in, out].
    """

    names: Mapping[str, str]
    buffers: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    by_head: bool = False
    transposed: bool = False

    def parts(self, config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Rows]]:
        """Map each stored tensor of these shapes to the names that it is read under and their rows; buffers to none."""
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
                name.replace(FUSED, f"self_attn.{part}_proj."): Rows(self._runs(part_index, heads, width), matrix)
                for part_index, part in enumerate("qkv")
            }
        return views

    def _runs(self, part_index: int, heads: int, width: int) -> tuple[tuple[int, int], ...]:
        """Return the row ranges of queries (``part_index`` 0), keys (1) or values (2)."""
        if not self.by_head:
            return ((part_index * heads * width, (part_index + 1) * heads * width),)
        return tuple(((3 * head + part_index) * width, (3 * head + part_index + 1) * width) for head in range(heads))


def whole(config: dict[str, Any], name: str) -> int:
    """Return an entry of config.json that must be a positive integer. Raises SurgeryError: it is not."""
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise SurgeryError(f"config.json: {name} of {config['model_type']} must be a positive integer, not {value!r}")
    return value
