"""Comparison of a model's logits before and after acceleration."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.model.cache_argument import CACHE, returned_cache

PROMPT, STEPS = 37, 3
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Tolerance of `step_error` by dtype: rounding differences from another order of summation in each layer."""


@torch.no_grad()
def step_error(model: PreTrainedModel, before: Tensor | None) -> Tensor | float:
    """Return logits of random tokens from a prefill and single decode steps, or their difference from earlier ones.

    A batch of two rows, one with left padding, uses the model's own cache, so prefill, decode and masks are covered.

    Args:
        before: logits from an earlier call, to compare with; None to return the logits.

    Returns:
        Logits [2, 1 + STEPS, V] in fp32, or the root mean square of the difference over that of `before`.
    """
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, PROMPT + STEPS), generator=generator).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    training = model.training
    model.eval()
    cache, logits = None, []
    for start, stop in [(0, PROMPT), *((PROMPT + step, PROMPT + step + 1) for step in range(STEPS))]:
        output = model(input_ids=tokens[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache})
        cache = returned_cache(output)
        logits.append(output.logits[:, -1].float())
    model.train(training)
    stepwise = torch.stack(logits, dim=1)
    if before is None:
        return stepwise
    return float((stepwise - before).square().mean().sqrt() / before.square().mean().sqrt())
