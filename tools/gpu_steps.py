"""Steps of `tools/gpu.py run`, in order of value, and the programs of two of them: `gpu_steps.py facts|kernels ...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Setup:
    """Output folder, device and size of a run; ``tiny``: rehearsal at tiny shapes."""

    out: Path
    device: str
    tiny: bool


@dataclass(frozen=True)
class Step:
    """One process of a run.

    Attributes:
        seconds: time limit, four times as long in a rehearsal.
        rows: file below the output folder with the rows: a record with "rows", or pytest's XML.
        arguments: function from the setup and the time limit to the arguments of the Python interpreter.
    """

    name: str
    seconds: float
    rows: str
    arguments: Callable[[Setup, float], list[str]]


def _program(setup: Setup, seconds: float, *, name: str) -> list[str]:
    size = ["--tiny"] if setup.tiny else []
    return [__file__, name, str(setup.out), "--device", setup.device, "--limit", f"{seconds:.0f}", *size]


def _tests(setup: Setup, seconds: float) -> list[str]:
    folder = ROOT / "tests" / "kernels"
    some = ["-k", "one_softmax", str(folder / "test_split_kv.py")] if setup.tiny else ["-m", "gpu", str(folder)]
    workers = 0 if setup.tiny else min(12, max(1, (os.cpu_count() or 2) - 2))
    # `--dist load` distributes single tests; by file they would compile sequentially.
    options = ["-n", str(workers), "--dist", "load", "-o", "addopts=", "--import-mode=importlib", "--tb=short", "-q"]
    return ["-m", "pytest", *options, f"--junitxml={setup.out / 'tests.xml'}", *some]


def _decode(setup: Setup, seconds: float, *, folder: str, forms: str, options: tuple[str, ...] = ()) -> list[str]:
    """Return the arguments of a decode benchmark; a rehearsal ignores the options."""
    shape, contexts, batches = ("tiny", "32", "2") if setup.tiny else ("llama3-8b", "4k,32k", "1,32")
    # In a rehearsal kernels would need Triton's interpreter.
    sizes = ["--rank", "24", "--rope-dim", "8", "--kernels", "stock"] if setup.tiny else options
    where = ["--out", str(setup.out / folder), "--overwrite", "--limit", f"{seconds:.0f}", "--device", setup.device]
    what = [shape, "--to", forms, "--contexts", contexts, "--batches", batches, *sizes]
    return ["-m", "surgery", "bench", "decode", *what, *where]


# Without kernels all rows in bits would be unpacked at every step.
_bits = partial(
    _decode, folder="decode-rows", forms="mla-bits", options=("--kernels", "ours", "--rank", "512", "--rope-dim", "128")
)

STEPS = (
    Step("facts", 40, "facts.json", partial(_program, name="facts")),
    Step("tests", 120, "tests.xml", _tests),
    Step("kernels", 240, "kernels.json", partial(_program, name="kernels")),
    Step("decode-rows", 90, "decode-rows/decode.json", _bits),
    Step("decode", 180, "decode/decode.json", partial(_decode, folder="decode", forms="mla,gqa,lowrank")),
)


def facts(out: Path, device_name: str, tiny: bool, limit: float) -> None:
    """Write the machine's versions and device to `facts.json`."""
    import torch

    from surgery.common.machine import machine_facts
    from surgery.kernels.bench.measure import device_facts
    from surgery.kernels.bench.run import write_json

    row = {**machine_facts(gpu=True), "device": device_facts(torch.device(device_name))}
    write_json(out / "facts.json", {"rows": [row]})


def kernels(out: Path, device_name: str, tiny: bool, limit: float) -> None:
    """Check and time all kernels, and write the record to `kernels.json` after each case."""
    import torch

    from surgery.kernels.bench.registry import OPERATIONS, cases
    from surgery.kernels.bench.run import Bench

    if tiny:
        selection = cases(["mla_decode", "sdpa"], ["tiny"], [32], [2], torch.float32)
    else:
        selection = cases(OPERATIONS, ["llama3-8b", "smollm2"], [4096, 32_768], [1, 32, 128], torch.bfloat16)
    Bench(torch.device(device_name), out / "kernels.json", seconds=limit).run(selection)


def main() -> None:
    """Run one of the programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("facts", "kernels"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=float("inf"))
    options = parser.parse_args()
    {"facts": facts, "kernels": kernels}[options.program](options.out, options.device, options.tiny, options.limit)


if __name__ == "__main__":
    sys.exit(main())
