"""Escaping of untrusted text for display on terminals and pages, in Markdown, tables and logs."""

from __future__ import annotations

import json
import re

_HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline, which terminals interpret
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, breaks, zero width
    "\ud800-\udfff"  # lone surrogates, as in file names that are not UTF-8
    "\U000e0000-\U000e007f"  # tags
    "]"
)


def visible(text: object) -> str:
    """Escape control, bidirectional and invisible characters as JSON does.

    The zero-width joiners of emoji and Persian are kept. JSON text keeps its value, since the escapes are JSON's.
    """
    return _HIDDEN.sub(lambda match: json.dumps(match[0])[1:-1], str(text))
