"""Inline SVG figures for the HTML page."""

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
    """Convert a figure to inline SVG; elements that can be hidden get the class "rest" or "faint".

    Args:
        prefix: prefix of all ids and references, so that they are unique among the figures of a page.
        title: title for screen readers.
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
    # 1 pt is 4/3 CSS pixels.
    root.attrib |= {"role": "img", "aria-label": title, "class": "plot", "style": f"max-width: {width * 4 / 3:.0f}px"}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _themed(value: str) -> str:
    for color, name in THEME.items():
        value = value.replace(color, name)
    return value
