"""The data of a training, as its settings name it."""

from surgery.training.open_data import HealingData, open_data
from surgery.training.settings import HealSettings


def opened_data(data, tokenizer, folder, length, *, teacher=None, **asked) -> HealingData:
    """Opened data of one source, or of a list of them."""
    sources = (data,) if isinstance(data, str) else tuple(data)
    return open_data(HealSettings(data=sources, length=length, **asked), tokenizer, folder, teacher=teacher)
