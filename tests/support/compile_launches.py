"""Compiles the launches that `module:function` gives, for the capabilities after it, and prints facts as JSON."""

import importlib
import inspect
import json
import sys
from collections import defaultdict
from dataclasses import asdict

from compilation import compile_launch

module, function = sys.argv[1].split(":")
launches = getattr(importlib.import_module(module), function)
facts = defaultdict(dict)
for capability in map(int, sys.argv[2:]):
    arguments = (capability,) if inspect.signature(launches).parameters else ()
    for name, launch in launches(*arguments).items():
        compilation = asdict(compile_launch(launch, capability))
        del compilation["ptx"]
        facts[name][str(capability)] = {**compilation, "mma": sorted(compilation["mma"])}
json.dump(facts, sys.stdout)
