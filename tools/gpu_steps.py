"""Steps of `tools/gpu.py run`, in order of value, and two of their programs.

Each step is one process: arguments of the Python interpreter, and files to which it writes rows while it runs.
``python tools/gpu_steps.py facts|shape ...`` runs the programs of two steps.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FORMS = "mla,gqa,lowrank"
"""Conversion targets whose decoding is measured next to the source, with kernels and without."""
ROW_FORMS = "mla-bits"
"""Targets measured with kernels only; without kernels all rows are unpacked at every step."""
ROW_SIZES = ("--kernels", "ours", "--rank", "512", "--rope-dim", "128")
H100 = (90, 132)
"""Compute capability and multiprocessors to compile kernels for if no device was detected."""
CASES = str(ROOT / "tools" / "gpu_cases.py")
HEALED = ("healed/heal.jsonl|healed.healing/trained.run/heal.jsonl", "healed/heal.json")
QUARTER = ("--kv-ratio", "0.25")
SPARE = 12.0
"""Seconds between the limit that a step is told and the one at which it is terminated."""


@dataclass(frozen=True)
class Setup:
    """Machine and size of a run, with checkpoints and records in ``work``; ``tiny``: rehearsal at tiny shapes.

    ``model`` is a GGUF file or folder of a small real model; None if it has not arrived.
    """

    work: Path
    device: str
    tiny: bool
    model: Path | None

    @property
    def shape(self) -> str:
        return "tiny" if self.tiny else "llama3-8b"

    @property
    def contexts(self) -> str:
        return "32" if self.tiny else "4k,32k"

    @property
    def batches(self) -> str:
        return "2" if self.tiny else "1,32"


@dataclass(frozen=True)
class Step:
    """One process of a run, with a time limit that is four times as long in a rehearsal.

    Attributes:
        arguments: function from the setup and the time limit to the arguments of the Python interpreter.
        records: result files below the work folder, see :class:`gpu_run.Records`.
        environment: function from the setup to additional environment variables.
    """

    name: str
    seconds: float
    arguments: Callable[[Setup, float], list[str]]
    records: tuple[str, ...]
    needs_model: bool = False
    environment: Callable[[Setup], dict[str, str]] = lambda setup: {}


def _program(name: str) -> Callable[[Setup, float], list[str]]:
    """Return the arguments function of a program of this file."""

    def arguments(setup: Setup, seconds: float) -> list[str]:
        size = ["--tiny"] if setup.tiny else []
        return [__file__, name, str(setup.work / f"{name}.jsonl"), "--device", setup.device, *size]

    return arguments


def _tests(setup: Setup, seconds: float) -> list[str]:
    selection = ["-m", "not slow and not gpu", "-k", "one_softmax"] if setup.tiny else ["-m", "gpu"]
    workers = min(12, max(1, (os.cpu_count() or 2) - 2))
    folder = ROOT / "tests" / "kernels"
    where = [str(folder / "test_split_kv.py" if setup.tiny else folder)]
    return [*_pytest("gpu_pytest", setup, workers), *selection, *where]


def _compile(setup: Setup, seconds: float) -> list[str]:
    # A rehearsal compiles the kernels of one operation, since every further one would take as long.
    selection = ["-m", "gpu", *(["-k", "test_kernel"] if setup.tiny else [])]
    folder = ROOT / "tests" / "kernels"
    tests = [] if setup.tiny else [str(folder), f"--ignore={folder / 'bench'}"]
    return [*_pytest("gpu_compile", setup, os.cpu_count() or 1), *selection, CASES, *tests]


def _pytest(plugin: str, setup: Setup, workers: int) -> list[str]:
    # `--dist load` distributes single tests; by file they would compile sequentially.
    options = ["-n", "0" if setup.tiny else str(workers), "--dist", "load", "-o", "addopts=", "--import-mode=importlib"]
    return ["-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", *options, "--tb=short", "-q"]


def _compiled(setup: Setup) -> dict[str, str]:
    """Return the environment of the compile step: the device that the first step detected, and cases of later steps."""
    try:
        device = json.loads((setup.work / "facts.jsonl").read_text(encoding="utf-8").splitlines()[-1])["device"]
        target = int("".join(device["capability"].split("."))), device["processors"]
    except (OSError, IndexError, AttributeError):  # not measured, or no GPU
        target = H100
    forms = "-" if setup.tiny else f"{FORMS},{ROW_FORMS}"
    sizes = [_kernel_shapes(setup), setup.contexts, _kernel_batches(setup), setup.shape, forms]
    return {
        "SURGERY_TARGET": ",".join(map(str, target)),
        "SURGERY_CASES": " ".join(sizes),
        "SURGERY_TESTS": str(setup.work / "compile.jsonl"),
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",  # compiling processes must not allocate GPU memory
        **({"SURGERY_OPERATIONS": "mla_decode"} if setup.tiny else {}),
    }


def _kernel_shapes(setup: Setup) -> str:
    return "tiny" if setup.tiny else "llama3-8b,smollm2"


def _kernel_batches(setup: Setup) -> str:
    return "2" if setup.tiny else "1,32,128"


def _kernels(setup: Setup, seconds: float) -> list[str]:
    some = ["--operations", "mla_decode,sdpa", "--device", setup.device] if setup.tiny else []
    sizes = ["--shapes", _kernel_shapes(setup), "--batches", _kernel_batches(setup)]
    return _bench(setup, "kernels", seconds, *sizes, *some)


def _decode(forms: str, folder: str, *options: str) -> Callable[[Setup, float], list[str]]:
    """Return the arguments function of a decode benchmark; a rehearsal ignores the options."""

    def arguments(setup: Setup, seconds: float) -> list[str]:
        sizes = ["--rank", "24", "--rope-dim", "8"] if setup.tiny else options
        where = ["--to", forms, *sizes, "--batches", setup.batches]
        return _bench(setup, "decode", seconds, setup.shape, *where, folder=folder)

    return arguments


def _convert(to: str, *options: str) -> Callable[[Setup, float], list[str]]:
    def arguments(setup: Setup, seconds: float) -> list[str]:
        tokens = ["--calibration-tokens", "128", "--calibration-length", "64", "--held-out", "1"] if setup.tiny else []
        # Sampling calibration text would take most of the time.
        tokens += [] if setup.tiny else ["--calibration", "prose=0.6,code=0.4", "--held-out", "4"]
        out = str(setup.work / f"model-{to}")
        where = ["--device", setup.device, "--out", out, "--overwrite", "--json"]
        return ["-m", "surgery", "convert", str(setup.model), "--to", to, *options, *where, *tokens]

    return arguments


def _decode_model(setup: Setup, seconds: float) -> list[str]:
    models = [str(setup.model), str(setup.work / "model-mla")]
    return _bench(setup, "decode", seconds, *models, "--batches", setup.batches, folder="decode-model")


def _heal(setup: Setup, seconds: float) -> list[str]:
    limit = ["--max-steps", "2", "--length", "64"] if setup.tiny else ["--max-time", str(max(10, int(seconds - 50)))]
    batch = ["--batch-size", "1" if setup.tiny else "16", "--gradient-accumulation", "1"]
    held_out = ["--held-out", "1" if setup.tiny else "16", "--eval-every", "50"]
    data = (
        ["--data", str(ROOT / "surgery" / "assets" / "heldout-stdlib.txt")]
        if setup.tiny
        else ["--config", str(ROOT / "tools" / "gpu_heal.yaml")]
    )
    out = ["--no-measure", "--overwrite", "--out", str(setup.work / "healed"), "--json", "--device", setup.device]
    student = [str(setup.work / "model-mla"), "--teacher", str(setup.model)]
    return ["-m", "surgery", "heal", *student, *data, *batch, *limit, *held_out, *out]


def _bench(setup: Setup, what: str, seconds: float, *options: str, folder: str | None = None) -> list[str]:
    where = ["--out", str(setup.work / (folder or what)), "--overwrite", "--limit", f"{seconds:.0f}"]
    where += ["--contexts", setup.contexts]
    device = ["--device", setup.device] if what == "decode" else []
    if what == "decode" and setup.tiny:  # kernels would need Triton's interpreter
        device += ["--kernels", "stock"]
    return ["-m", "surgery", "bench", what, *options, *where, *device]


def _rows_of_tests(setup: Setup) -> dict[str, str]:
    return {"SURGERY_TESTS": str(setup.work / "tests.jsonl")}


STEPS = (
    Step("facts", 40, _program("facts"), ("facts.jsonl",)),
    Step("compile", 60, _compile, ("compile.jsonl",), environment=_compiled),
    Step("tests", 80, _tests, ("tests.jsonl",), environment=_rows_of_tests),
    Step("kernels", 110, _kernels, ("kernels/kernels.json",)),
    Step("decode-rows", 45, _decode(ROW_FORMS, "decode-rows", *ROW_SIZES), ("decode-rows/decode.json",)),
    Step("decode", 100, _decode(FORMS, "decode"), ("decode/decode.json",)),
    Step("convert-shape", 60, _program("shape"), ("shape.jsonl",)),
    Step("convert-mla", 240, _convert("mla", *QUARTER, "--bits", "auto"), ("model-mla/surgery_report.json",), True),
    Step("decode-model", 45, _decode_model, ("decode-model/decode.json",), True),
    Step("heal", 130, _heal, HEALED, True),
    Step("convert-lowrank", 60, _convert("lowrank", *QUARTER), ("model-lowrank/surgery_report.json",), True),
)


def facts(out: Path, device_name: str, tiny: bool) -> None:
    """Append the machine's versions and ceilings to a file: copy bandwidth, matmul rate, fp64 eigendecomposition."""
    import torch

    from surgery.common.machine import machine_facts
    from surgery.kernels.bench.measure import ceilings, device_facts

    device = torch.device(device_name)
    row: dict[str, Any] = {**machine_facts(gpu=True), "device": device_facts(device)}
    if device.type == "cuda":
        row["ceilings"] = ceilings(device)
    width = 64 if tiny else 2048
    matrix = torch.randn(width, width, dtype=torch.float64)
    matrix = matrix @ matrix.T
    for target_device in dict.fromkeys((torch.device("cpu"), device)):
        row[f"eigh_{width}_fp64_{target_device.type}_seconds"] = _seconds(
            lambda at=target_device: torch.linalg.eigh(matrix.to(at)), target_device
        )
    _append(out, row)


def shape(out: Path, device: str, tiny: bool) -> None:
    """Convert two layers of a Llama-3-8B shape in closed form and append time and memory to a file."""
    import torch
    from scale import make_random

    from surgery.bench.shapes import DECODE_SHAPES

    config = DECODE_SHAPES["tiny" if tiny else "llama3-8b"] | {"num_hidden_layers": 2, "dtype": "bfloat16"}
    if tiny:  # the vocabulary of the demo model's tokenizer
        config = config | {"vocab_size": 4096}
    source, layers = out.parent / "shape", 32
    if not source.exists():
        make_random(source, config)
    tokens = "512" if tiny else "8192"
    options = ["--to", "mla", "--kv-ratio", "0.28125" if not tiny else "0.5", "--held-out", "1"]
    options += ["--calibration-tokens", tokens, "--calibration-length", "128" if tiny else "1024", "--device", device]
    began = time.perf_counter()
    report = _surgery("convert", source, "--out", out.parent / "shape-mla", "--overwrite", *options)
    seconds, spent = time.perf_counter() - began, report["seconds"]
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident
    _append(
        out,
        {
            "shape": "tiny" if tiny else "llama3-8b",
            "layers": config["num_hidden_layers"],
            "calibration_tokens": int(tokens),
            "seconds": seconds,
            "phases": spent,
            "peak_memory_bytes": report.get("peak_memory_bytes", peak),
            "projected_seconds_of_all_layers": sum(spent.values()) * layers / config["num_hidden_layers"],
        },
    )


def _surgery(*arguments: object) -> dict[str, Any]:
    """Return the --json output of a command, run in this process to avoid importing everything again."""
    from surgery.cli import main as surgery

    sys.argv[:] = ["surgery", *map(str, arguments), "--json"]
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            surgery()
        except SystemExit as end:
            if end.code:
                raise
    return json.loads(printed.getvalue())


def _seconds(function: Callable[[], object], device: Any) -> float:
    from surgery.eval.session import synchronize

    function()
    synchronize(device)
    began = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - began


def _append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def main() -> None:
    """Run one of the programs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", choices=("facts", "shape"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    {"facts": facts, "shape": shape}[options.program](options.out, options.device, options.tiny)


if __name__ == "__main__":
    sys.exit(main())
