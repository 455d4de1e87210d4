"""Removal of folder names from paths in published reports: they reveal how a user's machine is organized."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from typing import Any

# Absolute paths of all systems: /home/me, ~/x, C:\x, \\server\x, file:///x.
_START = r"(?:file:(?://)?(?=/)|~[\w.-]*(?=/)|[A-Za-z]:(?=[\\/])|(?=\\\\))"
_WHOLE = re.compile(rf"\s*(?:{_START}|(?=/))[\\/].*")
# In running text at least two components: /think is a token.
_DEEP = re.compile(rf"\s*(?:{_START}[\\/]|/[^/]+/).+")
_QUOTED = re.compile(rf"(['\"`])((?:{_START}[\\/]|/[^/'\"`\n]+/)[^'\"`\n]*)\1")
# After a space, a quote or a separator of values.
_INSIDE = re.compile(rf"(?<![\w.:/\\<~-])(?:{_START}[\\/]+|/(?=[^\s/]+/))[^\s\"'`,;:|<>()\[\]{{}}=*]+")
_RELATIVE = re.compile(r"\.{1,2}[\\/].*", re.DOTALL)
# More components than org/name, or a text, data or settings file in a folder.
_SUFFIXES = "txt|jsonl?|parquet|csv|ya?ml|gguf|safetensors|arrow"
_NESTED = re.compile(rf"[^\\/]+[\\/][^\\/]+[\\/].*|[^:]*[\\/][^\\/]*\.(?:{_SUFFIXES})")
_BACKSLASHED = re.compile(r"[A-Za-z]:\\|\\\\")
"""Windows paths, in which a backslash is not an escape."""
_URL = re.compile(r"(?!file:)[a-z][a-z0-9+.-]+://\S+")
PATH_FIELDS = frozenset(
    {"calibration", "held_out_text", "keep_statistics", "heads", "tokenizer", "data", "held_out_data", "source", "path"}
)
"""Fields whose values may be relative paths."""


def without_folders(value: Any, field: str = "") -> Any:
    """Remove the folders from paths in a JSON value, of key ``field``: ``/home/me/text.txt`` becomes ``text.txt``."""
    if isinstance(value, dict):
        return {text_without_folders(str(name)): without_folders(each, str(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [without_folders(each, field) for each in value]
    if not isinstance(value, str):
        return value
    if field == "command":
        return command_without_folders(value)
    if field in PATH_FIELDS:
        return _in_parts(value, _short_word)
    return text_without_folders(value)


def settings_without_folders(value: Any) -> Any:
    """Remove the folders from values that are absolute paths; texts that contain a path, as templates do, stay."""
    if isinstance(value, dict):
        return {name: settings_without_folders(each) for name, each in value.items()}
    if isinstance(value, list):
        return [settings_without_folders(each) for each in value]
    return _last_component(value) if isinstance(value, str) and _DEEP.fullmatch(value) else value


def text_without_folders(text: str) -> str:
    """Remove the folders from the absolute paths in a text."""
    if _DEEP.fullmatch(text):
        return _last_component(text)
    text = _QUOTED.sub(lambda match: f"{match[1]}{_last_component(match[2])}{match[1]}", text)
    return _INSIDE.sub(lambda match: _last_component(match[0]), text)


def command_without_folders(command: str) -> str:
    """Remove the folders from every path in a command line."""
    if not any(mark in command for mark in "/\\~"):
        return command
    lexer = shlex.shlex(command, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    if re.search(_BACKSLASHED, command):
        lexer.escape = ""
    try:
        words = list(lexer)
    except ValueError:  # a quote that does not end
        words = command.split()
    names = [_in_parts(word, _short_word) for word in words]
    return command if names == words else shlex.join(names)


def _in_parts(value: str, change: Callable[[str], str]) -> str:
    """Apply a function to the values of ``--option=value`` and ``a=0.5,b=0.5``, or to the whole text."""
    if _is_absolute(value) and not re.search(r"[=,]", value):
        return change(value)
    return "".join(change(each) if each not in (",", "=") else each for each in re.split(r"([=,])", value))


def _short_word(word: str) -> str:
    if _is_absolute(word) or _RELATIVE.fullmatch(word):
        return _last_component(word)
    if _URL.match(word):
        return word
    return _last_component(word) if _NESTED.fullmatch(word) or _exists(word) else text_without_folders(word)


def _exists(word: str) -> bool:
    """Return whether a word such as ``models/mine`` is an existing path and not a Hub id ``org/name``."""
    try:
        return ("/" in word or os.sep in word) and os.path.exists(word)
    except (OSError, ValueError):
        return False


def _is_absolute(text: str) -> bool:
    """Return whether the whole text is one absolute path on one line."""
    return _WHOLE.fullmatch(text) is not None


def _last_component(path: str) -> str:
    """Return the last component of a path; the drive letter or "." for a root."""
    return re.split(r"[\\/]+", path.rstrip("\\/ "))[-1].removesuffix(":") or "."
