"""Figures inside of a page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.figure import Figure

from surgery.eval.report.style import FAINT, GRID, INK, MUTED, PAPER, REST, to_svg

SVG = "{http://www.w3.org/2000/svg}"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
THEME = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"}
TOGGLED = re.compile(f"({REST}|{FAINT})-[0-9]+")


def inline(figure: Figure, prefix: str, title: str) -> Markup:
    """A figure as inline SVG for a page that holds several; what can be turned off has the class of its id.

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
                if toggled := TOGGLED.fullmatch(value):
                    element.attrib["class"] = toggled[1]
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
    for color, name in THEME.items():
        value = value.replace(color, name)
    return value
