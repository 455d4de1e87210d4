"""The model's own samples as calibration text: no data needed, and just what the model expects to see."""

import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import SurgeryError
from surgery.eval.loss import evaluation_mode


@torch.no_grad()
def sample_from_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: int,
    length: int,
    batch_size: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
) -> LongTensor:
    """Samples sequences from the model itself, from its bos on (its eos, where it has no bos).

    The full distribution is sampled, whatever the checkpoint's generation config says of top-k, top-p or stopping: the
    model goes on after an eos, as in the packed text it was trained on. Draws are made on the CPU from `seed`, so equal
    arguments give equal samples as far as the logits are equal.

    Args:
        tokens: tokens wanted; rounded up to whole sequences.
        length: tokens T of a sequence, the first included.
        batch_size: sequences sampled at once.
        temperature: above 1 flattens, below 1 sharpens the model's distribution.

    Returns:
        Token ids [N, T], int64, on the CPU.

    Raises:
        SurgeryError: an argument is out of its range, the tokenizer has neither bos nor eos, or the model's logits are
            not finite.
    """
    if tokens < 1 or length < 2 or batch_size < 1:
        raise SurgeryError(f"cannot sample {tokens} tokens in sequences of {length}, {batch_size} at once")
    if not temperature > 0:
        raise SurgeryError(f"temperature {temperature}: it must be above 0")
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise SurgeryError(f"samples of {length} tokens are longer than the model's {longest} positions")
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if first is None:
        raise SurgeryError("the tokenizer has neither a bos nor an eos token to start samples from")

    generator = torch.Generator().manual_seed(seed)
    starts = torch.full((-(-tokens // length), 1), first)
    with evaluation_mode(model):
        batches = [_sample(model, start, length, temperature, generator) for start in starts.split(batch_size)]
    return torch.cat(batches)


def _sample(
    model: PreTrainedModel, start: LongTensor, length: int, temperature: float, generator: torch.Generator
) -> LongTensor:
    """Continues `start` [B, 1] to [B, length]."""
    device = next(model.parameters()).device
    drawn, cache = [start], None
    while len(drawn) < length:
        output = model(input_ids=drawn[-1].to(device), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        drawn.append(_draw(output.logits[:, -1], temperature, generator))
    return torch.cat(drawn, dim=1)


def _draw(logits: Tensor, temperature: float, generator: torch.Generator) -> LongTensor:
    """One token [B, 1] from each row of logits [B, vocabulary]."""
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    if not probabilities.isfinite().all():
        raise SurgeryError("the model's logits are not finite: nothing can be sampled from it")
    return torch.multinomial(probabilities, 1, generator=generator)
