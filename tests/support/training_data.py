"""The data of a training, as its settings name it."""

import torch

from surgery.training.data import IGNORED, Batch, TrainingRow, collate
from surgery.training.open_data import HealingData, open_data
from surgery.training.settings import HealSettings


def opened_data(data, tokenizer, folder, length, **settings) -> HealingData:
    """Opened data of one source, or of a list of them."""
    sources = (data,) if isinstance(data, str) else tuple(data)
    return open_data(HealSettings(data=sources, length=length, **settings), tokenizer, folder)


def packed_batch(vocabulary: int = 64, length: int = 16) -> Batch:
    """Two rows of two documents, of which some tokens are not to be predicted."""
    generator, rows = torch.Generator().manual_seed(0), []
    for _ in range(2):
        tokens = torch.randint(vocabulary, (length,), generator=generator)
        labels = tokens.clone()
        labels[[0, 3, length // 2]] = IGNORED
        rows.append(TrainingRow(tokens, labels, torch.arange(length) // (length // 2)))
    return collate(rows)
