"""The exception that reports errors to users."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.visible import visible

if TYPE_CHECKING:
    from typing_extensions import Self

_LONGEST = 1500


class SurgeryError(Exception):
    """Invalid input or an impossible request.

    The message is one line: what is wrong, where, and what to do. The command line prints it without a traceback and
    exits with 1. Control characters are escaped and long messages are shortened.

    Attributes:
        setting, flag: name of the invalid setting, without dashes, and its flag, if it came from the command line.
        path: the file or folder at fault.
        hint: a valid value or command to use instead, if known.
        shared: whether all processes of a distributed run raise it; only the main one prints it.
    """

    shared = False
    flag: str | None = None

    def __init__(
        self, message: str, *, setting: str | None = None, path: str | Path | None = None, hint: str | None = None
    ):
        self.setting, self.path, self.hint = setting, None if path is None else Path(path), hint
        line = visible(message).replace("\n", "\\n").replace("\t", "\\t")
        super().__init__(line if len(line) <= _LONGEST else f"{line[:1000]} … {line[-400:]}")

    @property
    def line(self) -> str:
        """Message for the command line: begins with the flag instead of the setting's name and ends with the hint."""
        line = str(self)
        if self.flag is not None and not line.startswith(self.flag):
            rest = line.removeprefix(self.setting)
            line = f"{self.flag}{rest}" if rest != line else f"{self.flag}: {line}"
        return line if self.hint is None or self.hint in line else f"{line}; try {self.hint}"

    @classmethod
    def at(cls, path: str | Path, message: str, **fields: Any) -> Self:
        """Build an error about a file or folder; the message begins with its path."""
        return cls(f"{path}: {message}", path=path, **fields)


class ProcessLost(SurgeryError):
    """Failure of one of several processes before its work was done; the same command may resume the work."""
