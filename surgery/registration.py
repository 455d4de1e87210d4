"""The project's model class becomes known to AutoModel once transformers' auto classes are loaded, and not before.

The class needs torch, which ``import surgery`` should not cost. Where the auto classes are there already it is
registered at once; elsewhere at the end of the import that brings them. Imports nest, and some of transformers' own
modules load the auto classes half-way through their own import: the end that counts is the outermost one's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
PACKAGES = ("transformers", "surgery")
"""Packages whose imports are waited for: the class needs both, and may be asked for half-way through either."""

_decode_on_kernels = True


def register_when_needed() -> None:
    """Registers the model class, now or as soon as the auto classes are imported; once a process is enough."""
    if AUTO_CLASSES in sys.modules:
        _register()
    elif not any(isinstance(finder, _OutermostImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OutermostImport(_register))


def keep_off_kernels() -> None:
    """Has models of the project's class decode by their own code on a GPU too; to be called before torch is loaded."""
    global _decode_on_kernels
    _decode_on_kernels = False


def _register() -> None:
    from surgery.model import SurgeryForCausalLM, register

    register()
    if _decode_on_kernels:
        SurgeryForCausalLM.on_device = staticmethod(_accelerate)


def _accelerate(model: Any) -> None:
    """Put a model on kernels before it first decodes on a GPU, unless its attention or SURGERY_KERNELS=0 was chosen."""
    if os.environ.get("SURGERY_KERNELS") != "0" and model.config._attn_implementation == "sdpa":
        from surgery.acceleration import accelerate

        accelerate(model)


class _OutermostImport(MetaPathFinder):
    """Calls a function at the end of the first outermost import after which the auto classes are there."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then, self._depth = then, 0

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec_of = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec_of is not None and spec_of.loader is not None:
            self._watch(spec_of.loader)
        return spec_of

    def _watch(self, loader: Loader) -> None:
        run = loader.exec_module

        def watched(module: ModuleType) -> None:
            self._depth += 1
            try:
                run(module)
            finally:
                self._depth -= 1
            if self._depth == 0 and AUTO_CLASSES in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                self._then()

        loader.exec_module = watched
