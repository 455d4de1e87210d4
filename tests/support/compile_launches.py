"""Compiles the launches that `module:function` returns, for the capabilities behind it, and prints facts as JSON."""

import importlib
import json
import sys
from dataclasses import asdict

from surgery.kernels.compilation import compile_launch

module, function = sys.argv[1].split(":")
facts = {}
for name, launch in getattr(importlib.import_module(module), function)().items():
    facts[name] = {}
    for capability in sys.argv[2:]:
        made = asdict(compile_launch(launch, int(capability)))
        facts[name][capability] = {key: value for key, value in made.items() if key != "ptx"} | {
            "mma": sorted(made["mma"])
        }
json.dump(facts, sys.stdout)
