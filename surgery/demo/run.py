"""``surgery demo``: converts a model, heals a result, and compares all with stock transformers in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from surgery.checkpoint.named_models import BUILTIN, SMOLLM2, asset, model_named
from surgery.common.errors import SurgeryError
from surgery.common.human import origin
from surgery.common.interruption import resumes_from
from surgery.common.temporary import TemporaryFolder

if TYPE_CHECKING:
    from surgery.common.progress import Progress
    from surgery.structures.request import ConversionRequest

SEED = 2
NEW_TOKENS = 48


@dataclass(frozen=True)
class DemoModel:
    """Model of the demo.

    Attributes:
        question: user message in the model's chat template; None prompts for the key of the first recall prompt.
        calibration: its text.
        heal_steps: steps of healing of a second conversion, to the stock MLA class, which needs it.
        windows, prompts: numbers of held-out windows for the loss, and of recall prompts, each of ``length`` tokens.
    """

    question: str | None = None
    calibration: str = "builtin"
    heal_steps: int = 56
    windows: int = 8
    prompts: int = 16
    length: int = 1024


DEMO_MODELS = {
    BUILTIN: DemoModel(),
    # For 15 minutes on two cores: sampling answers for calibration would take one, and ten prompts take two.
    SMOLLM2: DemoModel(
        "What is a cache, and what is it good for?", "prose=0.6,code=0.4", heal_steps=32, windows=4, prompts=10
    ),
}
CALIBRATION_TOKENS = 8192
"""A third of the default, to save time."""


@dataclass(frozen=True)
class Measured:
    """Measurement of one checkpoint by stock transformers: loss in nats per token, in float32, and recall.

    ``kv_bytes_per_token`` is the growth of the live cache, and ``tokens_per_second`` the speed of one thread with
    1,024 tokens in the cache, both in the checkpoint's dtype.
    """

    model_class: str
    kv_bytes_per_token: float
    tokens_per_second: float
    loss: float
    recall: float
    completion: str


@dataclass(frozen=True)
class Demo:
    """Result of the demo: path of the converted model, its source, the prompt, and the measurements of both.

    ``stock`` and ``healed`` are measurements of the conversion to the stock class, before and after healing.
    """

    path: Path
    model: str
    name: str
    prompt: str
    source: Measured
    converted: Measured
    stock: Measured
    healed: Measured
    seconds: float

    def to_dict(self) -> dict:
        return {**asdict(self), "path": str(self.path)}


def run_demo(
    out: str | Path,
    *,
    model: str = BUILTIN,
    kv_ratio: float = 0.25,
    overwrite: bool = False,
    as_json: bool = False,
) -> Demo:
    """Convert a model to ``out``, measure source and result in a process without this package, and print the result.

    The model is also converted to the stock class and healed, in ``<out>-stock`` and ``<out>-stock-healed``. Results
    with the same settings that exist are measured again.

    Args:
        model: a name in ``DEMO_MODELS``.
        kv_ratio: share of the KV bytes to keep.

    Raises:
        SurgeryError: the model is unknown, a conversion or the healing failed, or the measuring process failed.
    """
    from surgery.checkpoint import CheckpointReader
    from surgery.checkpoint.model_folder import model_folder
    from surgery.common.progress import Progress
    from surgery.console.demo import show_demo
    from surgery.structures.made_already import convert_unless_made
    from surgery.structures.mla.settings import ConvertSettings
    from surgery.structures.request import ConversionRequest

    if model not in DEMO_MODELS:
        raise SurgeryError(f"--model {model}: choose {' or '.join(DEMO_MODELS)}")
    demo_model = DEMO_MODELS[model]
    start, out = time.perf_counter(), Path(out)
    progress = Progress()
    reader = CheckpointReader.open(model_named(model))
    source_name = origin(reader.name, reader.dequantised_from)
    progress.note(f"converting {source_name} to MLA with {kv_ratio:.0%} of its KV bytes: minutes on a CPU")
    command = f"surgery demo --model {model} --kv-ratio {kv_ratio:g}"
    calibration = {"calibration": demo_model.calibration, "calibration_tokens": CALIBRATION_TOKENS}
    settings = ConvertSettings(kv_ratio=kv_ratio, held_out=2, **calibration)
    request = ConversionRequest(reader.source, out, settings, overwrite=overwrite, command=command)
    remedy = "pass --overwrite, or choose another --out"
    convert_unless_made(request, progress, remedy=remedy)
    progress.note("converting to the stock class, which needs no code of ours and loses more, and healing it")
    stock = replace(request, out=Path(f"{out}-stock"), settings=replace(settings, carrier="stock"))
    convert_unless_made(stock, progress, remedy=remedy)
    paths = [model_folder(reader), out, stock.out, _healed(stock, demo_model.heal_steps, progress)]
    resumes_from(out)
    progress.note("loading the models with stock transformers in a process of their own")
    prompt, measured = measure_with_stock_transformers(paths, demo_model)
    demo = Demo(out, model, source_name, prompt, *measured, time.perf_counter() - start)
    show_demo(demo, as_json=as_json)
    return demo


def _healed(request: ConversionRequest, steps: int, progress: Progress) -> Path:
    """Heal a conversion with the recipe of ``surgery convert --heal``, unless that was done; return the output."""
    from surgery.calibration.text import BUILTIN as TEXT
    from surgery.healing.convert_and_heal import TRAINING
    from surgery.healing.heal import HealRequest, heal_unless_done

    out = Path(f"{request.out}-healed")
    text = {"source": TEXT, "tokens": 4 * steps * TRAINING["length"]}  # all of it would be tokenized
    values = {**TRAINING, "data": [text], "teacher": str(request.source), "max_steps": steps, "seed": SEED}
    options = {"measure": None, "overwrite": request.overwrite, "command": request.command}
    heal_unless_done(HealRequest(str(request.out), out, overrides=values, **options), progress)
    return out


def measure_with_stock_transformers(checkpoints: list[Path], demo_model: DemoModel) -> tuple[str, list[Measured]]:
    """Measure checkpoints in a process that does not import this package; return the prompt and the measurements.

    All checkpoints are measured with the tokenizer of the first one. Raises SurgeryError: the process failed; the
    message has the last line of its output.
    """
    from safetensors.torch import save_file

    from surgery.running.loading import load_tokenizer

    tokenizer = load_tokenizer(checkpoints[0])
    with TemporaryFolder("demo") as folder:
        tokens, request = Path(folder, "tokens.safetensors"), Path(folder, "request.json")
        held_out = held_out_tokens(tokenizer, demo_model)
        save_file(held_out, tokens)
        shown_prompt = (
            question(tokenizer, demo_model.question) if demo_model.question else first_key(tokenizer, held_out)
        )
        prompt, ids, new_tokens = shown_prompt
        task = {
            "tokens": str(tokens),
            "checkpoints": [str(Path(path).resolve()) for path in checkpoints],
            "prompt": ids,
            "new_tokens": new_tokens,
        }
        request.write_text(json.dumps(task), encoding="utf-8")
        lines = _run_measuring(request)
    results = [json.loads(line) for line in lines]
    return prompt, [Measured(model_class=item.pop("class"), **item) for item in results]


def held_out_tokens(tokenizer, demo_model: DemoModel) -> dict:
    """Build windows and recall prompts from the shipped held-out text, equal on every machine."""
    from surgery.eval.recall import recall_prompts
    from surgery.eval.sequences import random_windows, tokenize

    ids = tokenize(tokenizer, asset("heldout-stdlib.txt").read_text(encoding="utf-8"))
    recall_tokens = recall_prompts(tokenizer, ids, demo_model.prompts, demo_model.length, SEED)
    return {
        "windows": random_windows(ids, demo_model.windows, demo_model.length, SEED, tokenizer.bos_token_id),
        "prompts": recall_tokens.tokens,
        "answers": recall_tokens.answer_mask,
    }


def question(tokenizer, text: str) -> tuple[str, list[int], int]:
    """Return a question for display, its tokens in the chat template, and the number of tokens to generate."""
    from surgery.running.chat_templates import render_chat

    messages = [{"role": "user", "content": text}]
    prompt = render_chat(tokenizer, messages, add_generation_prompt=True)
    return f"{text}\n", tokenizer(prompt, add_special_tokens=False).input_ids, NEW_TOKENS


def first_key(tokenizer, held_out: dict) -> tuple[str, list[int], int]:
    """Return the first recall prompt: planted line and question for display, its tokens, the length of the answer."""
    tokens, answer = held_out["prompts"][0], held_out["answers"][0]
    start = int(answer.nonzero()[0])
    *before, last_line = tokenizer.decode(tokens[:start], skip_special_tokens=True).splitlines()
    name = last_line.removeprefix("# Recall: the ")
    planted = next(line for line in before if name in line)
    return f"{planted}\n... in {start:,} tokens of code ...\n{last_line}", tokens[:start].tolist(), int(answer.sum())


def _run_measuring(request: Path) -> list[str]:
    # -I: no modules from the working directory, this package's folder or PYTHONPATH.
    command = [sys.executable, "-I", str(Path(__file__).with_name("measure.py")), str(request)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, capture_output=True, encoding="utf-8", env=offline, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        raise SurgeryError(f"stock transformers could not run the models: {reason}")
    return process.stdout.strip().splitlines()
