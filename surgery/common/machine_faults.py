"""What machines do to programs, memory that ends and disks that fail, as one line."""

from __future__ import annotations

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT)
# torch has no kinds of errors of its own for these.
_TOO_LARGE = ("can't allocate memory", "out of memory", "not enough memory", "Storage size calculation overflowed")
_FREE = "free some, or choose another --out, beside which those of an output lie, or else another TMPDIR"
_UNWRITTEN = ("PytorchStreamWriter", "unexpected pos", "No space left on device")


def told(error: BaseException) -> str | None:
    """What to say of an error that is the machine's; None for one of the program's own.

    Errors of files that a verb was asked to read or write are told where they happen, with what to do; this is for the
    temporary ones, and for memory, which can end anywhere.
    """
    said = " ".join(str(error).split())
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(part in said for part in _TOO_LARGE)):
        return "out of memory; close other programs, or ask for less: --batch-size, --calibration-length"
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"{error.filename or 'a temporary file'}: no space left on the disk; {_FREE}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a temporary file'}: {error.strerror or said}"
    # safetensors has errors of its own; its name is looked at, as most verbs' mistakes are told without importing it.
    written = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"
    if written and any(part in said for part in _UNWRITTEN):
        return f"a temporary file could not be written; {_FREE}"
    return None
