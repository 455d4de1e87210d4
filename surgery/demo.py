"""``surgery demo``: converts the built-in model and lets stock transformers, in another process, compare the two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from surgery.errors import SurgeryError

BUILTIN = "builtin"
WINDOWS, PROMPTS, LENGTH, SEED = 8, 16, 1024, 2
NEW_TOKENS = 48
PROMPT = """def read_lines(path):
    with open(path, encoding="utf-8") as"""


@dataclass(frozen=True)
class Measured:
    """What stock transformers says of one checkpoint.

    Attributes:
        model_class: the class it was loaded as.
        kv_bytes_per_token: growth of the live cache, in the checkpoint's dtype.
        loss: nats per token on held-out text, in float32.
        recall: share of planted five-digit keys found.
        completion: the greedy continuation of the demo's prompt.
    """

    model_class: str
    kv_bytes_per_token: float
    loss: float
    recall: float
    completion: str


@dataclass(frozen=True)
class Demo:
    """The demo's outcome: where the converted model is, and both models measured."""

    path: Path
    source: Measured
    converted: Measured
    seconds: float

    def to_dict(self) -> dict:
        return {**asdict(self), "path": str(self.path), "prompt": PROMPT}


def demo_model() -> Path:
    """The folder of the built-in model."""
    return _asset("demo-model")


def model_named(name: str) -> str:
    """A checkpoint as it is given, a path or hub id; of `builtin` the folder of the built-in model."""
    return str(demo_model()) if name == BUILTIN else name


def run_demo(out: str | Path, *, kv_ratio: float = 0.25, overwrite: bool = False, as_json: bool = False) -> Demo:
    """Converts the built-in model into ``out``, measures both in a process without this package and prints the result.

    Raises:
        SurgeryError: the conversion's, or the measuring process failed.
    """
    from surgery.console import show_demo
    from surgery.convert import convert_to_mla
    from surgery.progress import Progress
    from surgery.settings import ConvertSettings

    start = time.perf_counter()
    progress = Progress()
    conversion = convert_to_mla(
        demo_model(),
        out,
        # Less held-out text and a shorter fit than by default, for the sake of two minutes on two cores.
        ConvertSettings(kv_ratio=kv_ratio, held_out=4, fit_steps=2, fit_queries=128),
        overwrite=overwrite,
        command=f"surgery demo --kv-ratio {kv_ratio:g}",
        progress=progress,
    )
    progress.note("loading both models with stock transformers in a process of their own")
    source, converted = measure_with_stock_transformers([demo_model(), conversion.path])
    demo = Demo(conversion.path, source, converted, time.perf_counter() - start)
    show_demo(demo, as_json=as_json)
    return demo


def measure_with_stock_transformers(
    checkpoints: list[Path], *, windows: int = WINDOWS, prompts: int = PROMPTS, length: int = LENGTH
) -> list[Measured]:
    """Measures checkpoints of the demo model's tokenizer in a process where this package cannot be imported.

    Args:
        windows, prompts: held-out windows for the loss and recall prompts, each of ``length`` tokens.

    Raises:
        SurgeryError: the process failed, with its last line.
    """
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(prefix="surgery-demo-") as folder:
        tokens, request = Path(folder, "tokens.safetensors"), Path(folder, "request.json")
        save_file(_held_out_tokens(windows, prompts, length), tokens)
        wanted = {
            "tokens": str(tokens),
            "checkpoints": [str(Path(path).resolve()) for path in checkpoints],
            "prompt": PROMPT,
            "new_tokens": NEW_TOKENS,
        }
        request.write_text(json.dumps(wanted), encoding="utf-8")
        lines = _run_measuring(request)
    found = [json.loads(line) for line in lines]
    return [Measured(model_class=item.pop("class"), **item) for item in found]


def _held_out_tokens(windows: int, prompts: int, length: int) -> dict:
    """Windows of the shipped held-out text and recall prompts in it, the same on every machine."""
    from surgery.eval.recall import recall_prompts
    from surgery.eval.sequences import random_windows, tokenize
    from surgery.texts import load_tokenizer

    tokenizer = load_tokenizer(demo_model())
    ids = tokenize(tokenizer, _asset("heldout-stdlib.txt").read_text(encoding="utf-8"))
    asked = recall_prompts(tokenizer, ids, prompts, length, SEED)
    return {
        "windows": random_windows(ids, windows, length, SEED, tokenizer.bos_token_id),
        "prompts": asked.tokens,
        "answers": asked.answer_mask,
    }


def _run_measuring(request: Path) -> list[str]:
    # -I: neither the working folder, nor this package's, nor PYTHONPATH is searched for modules.
    command = [sys.executable, "-I", str(Path(__file__).with_name("demo_measure.py")), str(request)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=offline, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise SurgeryError(f"stock transformers could not run the models: {reason}")
    return done.stdout.strip().splitlines()


def _asset(name: str) -> Path:
    # A real path, as the child process and transformers open it themselves.
    path = Path(__file__).parent / "assets" / name
    if not path.exists():
        raise SurgeryError(f"{path}: missing from this installation; install model-surgery from a wheel or a checkout")
    return path
