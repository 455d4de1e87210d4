"""Greedy completions of many prompts: batched, shared between processes, and resumable.

Prompts are batched by length and padded on the left. A batch's other rows and its padding decide in which order sums
are rounded, so a prompt may complete differently in other company. That is why batches are formed before anything is
looked up or dealt out, and why the whole batch is the key under which its completions are kept: a run that was
interrupted, or shared by several processes, gives what one undisturbed process gives.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.session import Session, device_of

CACHE_POLICY = ("cache_implementation", "cache_config")
"""What is kept of a checkpoint's generation config: which cache it decodes with is the model's, not the sampling's."""


def complete(
    model: PreTrainedModel, session: Session, prompts: Sequence[Sequence[int]], new_tokens: int, label: str
) -> list[list[int]]:
    """Decodes every prompt greedily.

    Whatever sampling the checkpoint asks for in its generation config is ignored. Prompts longer than the model's
    context are decoded like others. With `session.scratch`, batches finished by an earlier call are not generated
    again if nothing that decides them has changed.

    Args:
        prompts: token ids of each, of any lengths, nothing added to them.
        new_tokens: at most this many are decoded.
        label: what the progress bar says.

    Returns:
        Token ids of each completion, in the order of `prompts`, on every process: without the prompt, cut before the
        first end-of-sequence token, which is any that the generation config or the tokenizer names.

    Raises:
        SurgeryError: a prompt is empty, or `new_tokens` or the batch size is below 1.
    """
    if new_tokens < 1 or session.batch_size < 1:
        raise SurgeryError(f"cannot decode {new_tokens} tokens in batches of {session.batch_size}: at least 1 of each")
    if any(len(prompt) == 0 for prompt in prompts):
        raise SurgeryError(f"{label}: an empty prompt cannot be completed, give it at least one token")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches = [
        [list(map(int, prompts[index])) for index in order[first : first + session.batch_size]]
        for first in range(0, len(order), session.batch_size)
    ]
    config = _greedy_config(model, session.tokenizer, new_tokens)
    finished = FinishedBatches(session.scratch, session.processes.rank)

    def completions(batch: list[list[int]]) -> list[list[int]]:
        key = _key(model, batch, config)
        if key not in finished:
            finished.add(key, _generate(model, batch, config))
        return finished[key]

    sizes = iter([len(batch) for batch in batches])
    with session.progress.phase(label, len(prompts), "prompt") as advance, evaluation_mode(model):
        done = session.processes.map(completions, batches, lambda: advance(next(sizes)))
    results: list[list[int]] = [[] for _ in prompts]
    for index, completion in zip(order, (row for batch in done for row in batch), strict=True):
        results[index] = completion
    return results


class FinishedBatches:
    """Completions of finished batches by key, kept in `completions-<rank>.jsonl` of a folder, or in memory only.

    Every process reads the files of all and appends to its own, so that a run can go on with another number of them.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        """Reads what is there; a line that was cut off when a run was stopped does not count."""
        self._file = None if folder is None else folder / f"completions-{rank}.jsonl"
        self._completions: dict[str, list[list[int]]] = {}
        for file in sorted(folder.glob("completions-*.jsonl")) if folder is not None else []:
            for line in file.read_text(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self._completions[record["key"]] = record["completions"]

    def __contains__(self, key: str) -> bool:
        return key in self._completions

    def __getitem__(self, key: str) -> list[list[int]]:
        return self._completions[key]

    def add(self, key: str, completions: list[list[int]]) -> None:
        """Keeps the completions [prompts of the batch, tokens] of one batch."""
        self._completions[key] = completions
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:
                # The newline comes first: it ends a torn line, which would swallow this record otherwise.
                file.write("\n" + json.dumps({"key": key, "completions": completions}))


def _greedy_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> GenerationConfig:
    own = getattr(model, "generation_config", None) or GenerationConfig()
    named = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    eos = sorted({int(token) for token in [*named, tokenizer.eos_token_id] if token is not None})
    pad = next((token for token in (tokenizer.pad_token_id, *eos) if token is not None), 0)
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=new_tokens,
        eos_token_id=eos or None,
        pad_token_id=pad,
        use_cache=True,
        **{name: value for name in CACHE_POLICY if (value := getattr(own, name, None)) is not None},
    )


def _key(model: PreTrainedModel, batch: list[list[int]], config: GenerationConfig) -> str:
    """Digest of everything that decides the completions of a batch, given the model."""
    identity = {
        "prompts": batch,
        "config": config.to_dict(),
        "dtype": str(model.dtype),
        "attention": getattr(model.config, "_attn_implementation", None),
        "device": device_of(model).type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _generate(model: PreTrainedModel, batch: list[list[int]], config: GenerationConfig) -> list[list[int]]:
    length = max(map(len, batch))
    ids = torch.full((len(batch), length), config.pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    device = device_of(model)
    with _generation_config(model, config):
        tokens = model.generate(input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=config)
    return [_before_eos(row, config.eos_token_id or []) for row in tokens[:, length:].tolist()]


def _before_eos(tokens: list[int], eos: list[int]) -> list[int]:
    ends = (position for position, token in enumerate(tokens) if token in eos)
    return tokens[: next(ends, len(tokens))]


@contextmanager
def _generation_config(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """Replaces the model's own generation config: `generate` fills from it whatever the one it is given leaves out."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
