"""C++ kernels for CPUs, compiled on the machine that runs them by PyTorch's own build of extensions.

`torch.ops.surgery_cpu.<operation>` has the signature of the operation's reference. `lowrank_decode_packed` has none and
states its arguments in its source. The library is stored in PyTorch's cache of extensions (`TORCH_EXTENSIONS_DIR`),
under a name that depends on the sources, the instruction set and the version of PyTorch. It is written at once, so that
an interrupted build leaves no lock behind.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from surgery.kernels.backend import interpreted
from surgery.kernels.plan import forget_plans

OPERATIONS = {
    "lowrank_decode_packed": "lowrank_decode/lowrank_decode_packed.cpp",
    "mla_decode_packed": "mla_decode/mla_decode_packed.cpp",
    "pack_rows": "pack_rows/pack_rows.cpp",
}
"""Operations with a C++ kernel, and its source."""

ARCHITECTURES = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
"""Compiler flags by PyTorch's name of the instruction set; a build for `native` might not run on another machine."""

logger = logging.getLogger("surgery.kernels")
_loaded = False


def runs(operation: str, *tensors: Tensor | None) -> bool:
    """Return whether `operation` runs in C++ on these tensors: they are on the CPU, and the library is loaded."""
    if not _loaded or operation not in OPERATIONS or interpreted():
        return False
    return all(each is None or each.device.type == "cpu" for each in tensors)


@cache
def load() -> str | None:
    """Load the library, compiled first if it is not in the cache, which takes about 20 seconds.

    Returns:
        The reason why there are no kernels on this machine; None if they are loaded.
    """
    global _loaded
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-O3", "-fopenmp", *ARCHITECTURES.get(capability, ())]
    sources = [Path(__file__).parent / source for source in OPERATIONS.values()]
    headers = [Path(__file__).parent / "packed_rows.h"]
    facts = [torch.__version__, *flags, *(source.read_text() for source in (*headers, *sources))]
    name = f"surgery_cpu_{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:16]}"
    try:
        library = _folder() / f"{name}.so"
        if library.exists():
            torch.ops.load_library(library)
        else:
            _build(name, sources, flags, library)
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError) as error:
        return f"the C++ kernels cannot be compiled: {str(error).strip().splitlines()[0]}"
    _loaded = True
    forget_plans()  # of calls that ran on the reference
    return None


def _folder() -> Path:
    """Return PyTorch's folder of compiled extensions."""
    from torch.utils.cpp_extension import get_default_build_root  # imports setuptools

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def _build(name: str, sources: list[Path], flags: list[str], library: Path) -> None:
    """Compile and load the library, and move it to its place."""
    from torch.utils import cpp_extension

    logger.info("compiling kernels for this CPU, once; this takes about 20 seconds")
    library.parent.mkdir(parents=True, exist_ok=True)
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), path))  # ninja, if not activated
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{name}_") as folder:
            cpp_extension.load(
                name,
                list(map(str, sources)),
                extra_cflags=flags,
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                is_python_module=False,
            )
            os.replace(Path(folder) / library.name, library)
    finally:
        os.environ["PATH"] = path
