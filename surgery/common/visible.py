"""Text of strangers made safe to show: on terminals, pages, in Markdown, tables and logs."""

from __future__ import annotations

import json
import re

_HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline: terminals take them for commands
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, breaks, no width
    "\ud800-\udfff"  # halves of characters, as of file names that are not UTF-8
    "\U000e0000-\U000e007f"  # tags
    "]"
)


def visible(text: object) -> str:
    """Escape characters that would command a terminal, reorder a line or not be seen, as JSON writes them.

    The joiners of emoji and of Persian stay. As the escapes are JSON's, JSON text keeps its value.
    """
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], str(text))
