"""Lazy registration of the custom model class with AutoConfig and AutoModel.

``import surgery`` should not import torch, and reading a config should not import transformers' modeling code. So
configs and models are registered separately, each once its auto classes are imported: immediately if they are imported
already, or else after the import that loads them. Imports nest, and some modules of transformers load the auto classes
halfway through their own import, so registration waits for the end of the outermost import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

AUTO_CONFIGS = "transformers.models.auto.configuration_auto"
AUTO_MODELS = "transformers.models.auto.modeling_auto"
PACKAGES = ("transformers", "surgery")
"""Packages whose imports are watched: the class needs both, and either may load the auto classes halfway."""

_decode_on_kernels = True


def register_when_needed() -> None:
    """Register the classes, now or as soon as the auto classes are imported; repeated calls do nothing."""
    if not any(isinstance(finder, _OutermostImport) for finder in sys.meta_path):
        finder = _OutermostImport({AUTO_CONFIGS: _register_configs, AUTO_MODELS: _register_models})
        sys.meta_path.insert(0, finder)
        finder.call_due()


def disable_kernels() -> None:
    """Keep the custom model class on its PyTorch code on GPUs too; call before torch is imported."""
    global _decode_on_kernels
    _decode_on_kernels = False


def _register_configs() -> None:
    from surgery.model.auto_config import register_configs

    register_configs()


def _register_models() -> None:
    from surgery.model import SurgeryForCausalLM, register

    register()
    if _decode_on_kernels:
        SurgeryForCausalLM.on_device = staticmethod(_accelerate)


def _accelerate(model: Any) -> None:
    """Accelerate a model before it first decodes on a GPU, unless SURGERY_KERNELS=0 or its attention is not sdpa."""
    if os.environ.get("SURGERY_KERNELS") != "0" and model.config._attn_implementation == "sdpa":
        from surgery.acceleration import accelerate

        accelerate(model)


class _OutermostImport(MetaPathFinder):
    """Import hook that calls each module's function after the outermost import that has loaded the module."""

    def __init__(self, then: dict[str, Callable[[], None]]) -> None:
        self._then, self._depth = then, 0

    def call_due(self) -> None:
        """Call the functions whose modules are loaded; remove the hook after the last one."""
        due = [self._then.pop(name) for name in [*self._then] if name in sys.modules]
        if not self._then and self in sys.meta_path:
            sys.meta_path.remove(self)
        for function in due:
            function()

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
            if self._depth == 0:
                self.call_due()

        loader.exec_module = watched
