"""Batched greedy generation, distributed over processes.

Prompts are sorted by length, batched and padded on the left. The composition of a batch and its padding affect
floating-point rounding, so the completion of a prompt may depend on its batch. Batches are therefore formed before
they are distributed: the results do not depend on the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.common.errors import SurgeryError
from surgery.eval.logits import evaluation_mode
from surgery.eval.session import Session, device_of

CACHE_POLICY = ("cache_implementation", "cache_config")
"""Fields kept from the checkpoint's generation config: the cache belongs to the model, not to the sampling."""


def complete(
    model: PreTrainedModel, session: Session, prompts: Sequence[Sequence[int]], new_tokens: int, label: str
) -> list[list[int]]:
    """Complete every prompt by greedy decoding.

    The sampling parameters of the checkpoint's generation config are ignored. Prompts may exceed the model's context
    length.

    Args:
        prompts: token ids of each prompt; used unchanged, no bos is added.
        new_tokens: maximum number of decoded tokens per prompt.
        label: label of the progress bar.

    Returns:
        Token ids of the completions, in the order of `prompts`, on every process: without the prompt, cut before the
        first eos token of the generation config or the tokenizer.

    Raises:
        SurgeryError: a prompt is empty.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise SurgeryError(f"{label}: the prompt is empty; pass at least one token")
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches = [
        [list(map(int, prompts[index])) for index in order[first : first + session.batch_size]]
        for first in range(0, len(order), session.batch_size)
    ]
    config = _greedy_config(model, session.tokenizer, new_tokens)
    sizes = iter([len(batch) for batch in batches])
    with session.progress.phase(label, len(prompts), "prompt") as advance, evaluation_mode(model):
        completions = session.processes.map(partial(_generate, model, config), batches, lambda: advance(next(sizes)))
    results: list[list[int]] = [[] for _ in prompts]
    for index, completion in zip(order, (row for batch in completions for row in batch), strict=True):
        results[index] = completion
    return results


def _greedy_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, new_tokens: int) -> GenerationConfig:
    own = getattr(model, "generation_config", None) or GenerationConfig()
    token_ids = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    eos = sorted({int(token) for token in [*token_ids, tokenizer.eos_token_id] if token is not None})
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


def _generate(model: PreTrainedModel, config: GenerationConfig, batch: list[list[int]]) -> list[list[int]]:
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
    """Replace `model.generation_config`, from which `generate` fills the fields that its argument leaves unset."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own
