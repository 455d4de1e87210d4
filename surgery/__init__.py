"""Surgery: rewrites the attention of pretrained language models so that the KV cache becomes 2-24x smaller.

Importing the package lets ``AutoModelForCausalLM`` load converted checkpoints without importing torch or transformers:
the custom model class is registered once transformers' auto classes are imported.

``surgery.inspect``, ``plan``, ``convert``, ``slice``, ``heal``, ``evaluate``, ``score_heads`` and ``verify`` are the
commands as functions (:mod:`surgery.api`). They raise ``surgery.SurgeryError`` with a one-line message that says what
to do. ``surgery.register_structure``, ``register_family``, ``register_scorer``, ``register_task`` and
``register_method`` add plugins. ``surgery.accelerate(model)`` lets a loaded model use the Triton kernels,
``surgery.decelerate(model)`` restores its attention. On CUDA the custom model class is accelerated automatically,
except in the command line, whose measurements use the models' PyTorch code.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery import own_program, registration
from surgery.common.errors import SurgeryError
from surgery.version import __version__

if TYPE_CHECKING:
    from surgery.acceleration import accelerate, decelerate
    from surgery.api.measuring import evaluate, inspect, plan, score_heads, verify
    from surgery.api.plugins import register_family, register_method, register_scorer, register_structure, register_task
    from surgery.api.rewriting import convert, heal, slice

# kernels/, training/, eval/, recipes/ and configs/ live at the top of the repository and are linked into this package.
# Without symlinks (a zip download, Windows) they are imported from there.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

if own_program.started_as_module():
    own_program.begin()
registration.register_when_needed()

# Modules of the lazily imported functions. No module of the package may share the name of a function.
_HOMES = {
    **dict.fromkeys(("convert", "heal", "slice"), "surgery.api.rewriting"),
    **dict.fromkeys(("evaluate", "inspect", "plan", "score_heads", "verify"), "surgery.api.measuring"),
    **dict.fromkeys(("accelerate", "decelerate"), "surgery.acceleration"),
    **dict.fromkeys(
        ("register_family", "register_method", "register_scorer", "register_structure", "register_task"),
        "surgery.api.plugins",
    ),
}

__all__ = [
    "SurgeryError",
    "__version__",
    "accelerate",
    "convert",
    "decelerate",
    "evaluate",
    "heal",
    "inspect",
    "plan",
    "register_family",
    "register_method",
    "register_scorer",
    "register_structure",
    "register_task",
    "score_heads",
    "slice",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
