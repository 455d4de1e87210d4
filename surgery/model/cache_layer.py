"""What cache layers that keep keys and values in another form than plain tensors of all tokens have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import LongTensor, Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin


class CompactLayer(CacheLayerMixin):
    """A layer that cannot be cropped or offloaded and takes any number of tokens.

    Subclasses say how their tensors change when rows of the batch are repeated, dropped or reordered, by `_map_rows`.

    Attributes:
        form: what the layer keeps, for error messages.
        keys, values: the tokens kept as they came [B, H, n, head_dim], in the model's dtype; None before the first.
    """

    form: ClassVar[str]
    is_sliding = False
    is_croppable = False

    def settings(self) -> tuple:
        """What two layers of one class must share to be interchangeable."""
        raise NotImplementedError

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Applies `change`, which acts on dimension 0, to everything kept for each row of the batch."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: LongTensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._map_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        self._map_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the rows at `indices`."""
        self._map_rows(lambda tensor: tensor[indices.to(tensor.device)])

    def get_max_length(self) -> int:
        """-1: any number of tokens may come."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.23

    def crop(self, tokens_to_remove: int) -> None:
        """Raises ValueError unless there is nothing to take back: what was given up to save memory is gone."""
        if tokens_to_remove:
            raise ValueError(
                f"{self.form} cannot take tokens back, as assisted and speculative decoding need: decode without them"
            )

    def offload(self) -> None:
        """Raises ValueError."""
        raise ValueError(f"{self.form} cannot be offloaded: use a cache without offloading")


def check_full_attention(config: PreTrainedConfig, form: str) -> None:
    """Raises ValueError unless every layer of a model attends to all earlier tokens.

    Layers with a window or a recurrent state keep something else than the keys and values of all tokens.
    """
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) is not None:
        kinds = {"sliding_attention"}
    other = sorted(kinds - {"full_attention"})
    if other:
        raise ValueError(
            f"{form} needs full attention in every layer, and this {config.model_type} has layers of "
            f"{', '.join(other)}, whose caches already forget: choose a model without them"
        )


def is_empty(cache: Any) -> bool:
    """Whether no layer of a cache has seen a token."""
    return all(not layer.is_initialized or layer.get_seq_length() == 0 for layer in cache.layers)
