"""Surgery: rewrites the attention of pretrained language models so that the KV cache becomes 2-20x smaller.

Importing the package lets ``AutoModelForCausalLM`` load converted checkpoints, and loads neither torch nor
transformers: its model class is registered when transformers' auto classes are there.

``surgery.accelerate(model)`` puts the project's kernels under a loaded model, ``surgery.decelerate(model)`` takes them
away. Models of the project's own class take them by themselves on CUDA, but not under the command line, whose figures
are those of the models' own code.
"""

from pathlib import Path
from typing import Any

from surgery import own_program, registration
from surgery.version import __version__

# kernels/, training/, eval/, recipes/ and configs/ live at the top of the repository and are linked into this package.
# Where links do not exist (a zip download, Windows), find them there.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

if own_program.started_as_module():
    own_program.begin()
registration.register_when_needed()

__all__ = ["__version__", "accelerate", "decelerate"]


def __getattr__(name: str) -> Any:
    if name in ("accelerate", "decelerate"):
        import surgery.acceleration

        return getattr(surgery.acceleration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
