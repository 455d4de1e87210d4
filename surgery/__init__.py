"""Surgery: rewrites the attention of pretrained language models so that the KV cache becomes 2-20x smaller.

Importing the package registers its model class with transformers, so that ``AutoModelForCausalLM`` loads converted
checkpoints. The command line skips that to answer ``--help`` at once, and registers when it needs to.
"""

import sys
from pathlib import Path

from surgery.version import __version__

# kernels/, training/, eval/, recipes/ and configs/ live at the top of the repository and are linked into this package.
# Where links do not exist (a zip download, Windows), find them there.
_root = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

if Path(sys.argv[0]).stem not in ("surgery", "-m"):
    from surgery.model import register

    register()

__all__ = ["__version__"]
