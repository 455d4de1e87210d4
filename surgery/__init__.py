"""Surgery: rewrites the attention of pretrained language models so that the KV cache becomes 2-20x smaller.

Importing the package registers its model class with transformers, so that ``AutoModelForCausalLM`` loads converted
checkpoints. The command line skips that to answer ``--help`` at once, and registers when it needs to.

``surgery.accelerate(model)`` puts the project's kernels under a loaded model, ``surgery.decelerate(model)`` takes them
away. Models of the project's own class take them by themselves on CUDA, but not under the command line, whose figures
are those of the models' own code.
"""

import os
import sys
from pathlib import Path
from typing import Any

from surgery.threads import wait_passively
from surgery.version import __version__

# kernels/, training/, eval/, recipes/ and configs/ live at the top of the repository and are linked into this package.
# Where links do not exist (a zip download, Windows), find them there.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_root / "kernels").is_dir():
    __path__.append(str(_root))


def _accelerate_on_cuda(model: Any) -> None:
    """What models of the project's own class do before they first decode on a GPU; SURGERY_KERNELS=0 leaves it out."""
    if os.environ.get("SURGERY_KERNELS") != "0":
        from surgery.acceleration import accelerate

        accelerate(model)


if Path(sys.argv[0]).stem in ("surgery", "-m"):
    wait_passively()  # a program of ours, launched trainings too, that has not loaded torch yet
else:
    from surgery.model import SurgeryForCausalLM, register

    register()
    SurgeryForCausalLM.on_device = staticmethod(_accelerate_on_cuda)

__all__ = ["__version__", "accelerate", "decelerate"]


def __getattr__(name: str) -> Any:
    if name in ("accelerate", "decelerate"):
        import surgery.acceleration

        return getattr(surgery.acceleration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
