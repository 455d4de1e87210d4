"""The one exception that users are meant to see."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.visible import visible

if TYPE_CHECKING:
    from typing_extensions import Self

_LONGEST = 1500


class SurgeryError(Exception):
    """Bad input or an impossible request.

    The message is one line that says what is wrong, where, and what to do. The command line prints it without a
    traceback and exits with 1. What it repeats of a file cannot break that line, command a terminal or fill it.

    Attributes:
        setting: name of the setting that is wrong, without dashes; None if it is none.
        flag: that setting's flag, where the command line gave it.
        path: the file or folder that is wrong.
        hint: what to write instead, as far as it is known.
        shared: whether several processes raise it at once, of which the main one tells it.
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
        """The message for the command line: the flag in front, in the place of the setting's name, and the hint."""
        line = str(self)
        if self.flag is not None and not line.startswith(self.flag):
            rest = line.removeprefix(self.setting)
            line = f"{self.flag}{rest}" if rest != line else f"{self.flag}: {line}"
        return line if self.hint is None or self.hint in line else f"{line}; try {self.hint}"

    @classmethod
    def at(cls, path: str | Path, message: str, **fields: Any) -> Self:
        """Build the error of a file or folder, whose message begins with it."""
        return cls(f"{path}: {message}", path=path, **fields)


class ProcessLost(SurgeryError):
    """One of several processes has ended before their work was done: the same work, asked for again, may go on."""
