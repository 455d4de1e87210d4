"""Draw docs/pictures/*.svg: the cache bytes per token of one layer, or of a group of layers.

    python tools/cache_pictures.py

Widths are proportional to bytes. The shape is Llama-3-8B's: keys and values of 8 heads of 128 elements in bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from surgery.bench.shapes import SHAPES

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SHAPE = SHAPES["llama3-8b"]
HEADS, WIDTH = SHAPE["num_key_value_heads"], SHAPE["head_dim"]
ELEMENTS = HEADS * WIDTH
"""Elements of a token's keys, or values, in one layer."""
LAYERS = 3
"""Layers of a group of `--to crosslayer`."""

BAR, MARGIN = 456, 12
COLORS = {"keys": "#2f6fb2", "values": "#c2571a", "latent": "#2a7f62", "rotated key": "#7a4fa3"}


class Part(NamedTuple):
    """Segment of a bar: a number of elements with `bits` bits each."""

    kind: str
    elements: int
    bits: float = 16
    note: str = ""

    @property
    def bytes(self) -> float:
        return self.elements * self.bits / 8


Rows = list[tuple[str, list[Part]]]


def _heads(count: int, bits: int = 16) -> list[Part]:
    return [Part(kind, count * WIDTH, bits, f", of {count} heads") for kind in ("keys", "values")]


def pictures() -> dict[str, Rows]:
    """Return the rows of every picture, by name."""
    quarter, rope = 2 * ELEMENTS // 4, WIDTH // 2
    source, latent = _heads(HEADS), Part("latent", quarter)
    by_rank = [Part("latent", quarter - rope), Part("rotated key", rope)]
    in_bits = [Part(kind, ELEMENTS, 4) for kind in ("latent", "rotated key")]
    all_layers = [part._replace(elements=LAYERS * ELEMENTS, note=f", of {LAYERS} layers") for part in source]
    row = Part("latent", quarter, 8)
    return {
        "mla": [("source", source), ("MLA by rank", by_rank), ("MLA in 4 bits on average", in_bits)],
        "kv-heads": [("source", source), ("two KV heads", _heads(2))],
        "low-rank": [("source", source), ("low rank", [latent])],
        "cross-layer": [
            (f"source, {LAYERS} layers", all_layers),
            *((f"cascade, layer {each + 1}", [row]) for each in range(LAYERS)),
        ],
        "hybrid": [("first and recent tokens, all heads", source), ("other tokens, two full heads", _heads(2))],
        "quantized": [("source", source), ("3 bits on average", _heads(HEADS, 3))],
    }


def drawn(rows: Rows) -> str:
    """Render a picture as SVG: each row has a title, a bar, and a legend line per part."""
    scale, parts, y = BAR / max(sum(part.bytes for part in row) for _, row in rows), [], MARGIN
    for title, row in rows:
        size = f"{sum(part.bytes for part in row):,.0f} B per token"
        parts.append(f'<text x="{MARGIN}" y="{y + 14}" font-weight="bold">{title}: {size}</text>')
        x, y = float(MARGIN), y + 22
        for part in row:
            box = f'x="{x:.1f}" y="{y}" width="{part.bytes * scale:.1f}" height="20" stroke="#f6f7f9"'
            parts.append(f'<rect {box} fill="{COLORS[part.kind]}"/>')
            x += part.bytes * scale
        y += 26
        for kind, elements, bits, note in row:
            parts.append(f'<rect x="{MARGIN}" y="{y + 2}" width="11" height="11" fill="{COLORS[kind]}"/>')
            text = f"{kind}: {elements:,} × {bits:g} bits{note}"
            parts.append(f'<text x="{MARGIN + 18}" y="{y + 12}">{text}</text>')
            y += 18
        y += 10
    box = f"0 0 {BAR + 2 * MARGIN} {y}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="sans-serif" font-size="14">'
    return "\n".join([head, '<rect width="100%" height="100%" rx="8" fill="#f6f7f9"/>', *parts, "</svg>\n"])


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, rows in pictures().items():
        (FOLDER / f"{name}.svg").write_text(drawn(rows), encoding="utf-8")
