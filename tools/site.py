"""MkDocs hook for links from pages to files of the repository outside ``docs/``.

These links work in a repository browser. The site has no such files and the repository no public address, so the site
shows the text of the link with the path. A link to a file that does not exist stops the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page, **_) -> str:
    """Replace links of a page; called by MkDocs for every page."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, uri: str) -> str:
    """Return a page with links to files outside ``docs/`` replaced by text.

    Args:
        uri: path of the page below ``docs/``.

    Raises:
        ValueError: a link to a file that does not exist.
    """

    def replacement(link: re.Match) -> str:
        text, target, _ = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target))
        if path.startswith("docs/"):
            return link[0]  # checked by MkDocs
        if not (ROOT / path).exists():
            raise ValueError(f"docs/{uri}: links to {path}, which does not exist")
        return text if path in text else f"{text} (`{path}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replacement, part) for part in parts)
