"""HTML in which everything is text unless this module made it: reports hold names, paths and what models wrote."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from surgery.eval.report.style import GRID, INK, MUTED, PAPER, to_svg

SVG = "{http://www.w3.org/2000/svg}"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"}
VOID = frozenset({"br", "meta"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. Children that are not `Markup` are escaped, None is left out; ``class_`` stands for ``class``.

    Attributes that are None or False are left out; of True only the name is written.
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(*children)}</{name}>")


def joined(*children: object) -> Markup:
    """Children one after the other, escaped unless they are `Markup`."""
    return Markup("".join(c if isinstance(c, Markup) else _escaped(c) for c in children if c is not None))


def svg(figure: Figure, prefix: str, title: str) -> Markup:
    """A figure as inline SVG for a page that holds several.

    Args:
        prefix: put before every id and every reference to one, so that two figures of a page do not mix.
        title: what a screen reader says.
    """
    root = ElementTree.fromstring(to_svg(figure))
    for parent in root.iter():
        for child in list(parent):
            if child.tag == f"{SVG}style" or "metadata" in child.tag:
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(SVG)
        for key, value in list(element.attrib.items()):
            if key == "id":
                value = f"{prefix}-{value}"
            elif key == XLINK_HREF:
                del element.attrib[key]
                key, value = "href", re.sub(r"^#", f"#{prefix}-", value)
            element.attrib[key] = _themed(re.sub(r"url\(#", f"url(#{prefix}-", value))
    width = float(root.attrib.pop("width").removesuffix("pt"))
    del root.attrib["height"]
    # A point is 4/3 of a pixel of CSS.
    root.attrib |= {"role": "img", "aria-label": title, "class": "plot", "style": f"max-width: {width * 4 / 3:.0f}px"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _themed(value: str) -> str:
    for colour, name in THEME.items():
        value = value.replace(colour, name)
    return value


def _escaped(value: object) -> str:
    # A lone surrogate, which JSON can hold, cannot be written as UTF-8.
    return html.escape(str(value).encode("utf-8", "replace").decode("utf-8"), quote=True)
