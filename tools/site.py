"""A hook of mkdocs: links from pages to files of the repository that are no pages.

They work where the repository is browsed. The site has no such files and the repository no public address, so there the
text of the link stays, with the path; a link to a file that does not exist stops the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page, **_) -> str:
    """Called by mkdocs for every page."""
    return without_outside_links(markdown, page.file.src_uri)


def without_outside_links(markdown: str, uri: str) -> str:
    """A page of ``docs/`` whose links leave ``docs/`` for existing files only, as text.

    Args:
        uri: of the page, below ``docs/``.

    Raises:
        ValueError: a link to what does not exist.
    """

    def replacement(link: re.Match) -> str:
        text, target, _ = link.groups()
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        place = posixpath.normpath(posixpath.join("docs", posixpath.dirname(uri), target))
        if place.startswith("docs/"):
            return link[0]  # mkdocs looks at these
        if not (ROOT / place).exists():
            raise ValueError(f"docs/{uri}: links to {place}, which does not exist")
        return text if place in text else f"{text} (`{place}`)"

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replacement, part) for part in parts)
