"""Creation and installation of cache layers that hold something else than plain keys and values of all tokens.

Remote code that ships with the checkpoint: imports only torch, transformers and sibling modules.
"""

from functools import partial

from torch import nn
from transformers.cache_utils import DynamicSlidingWindowLayer

from .attention_functions import family_attention_class
from .cache_argument import CACHE
from .cache_layer import WINDOWS, CacheLayer, Call, check_full_attention, own_cache
from .configuration_surgery import SurgeryConfig
from .document_attention import DocumentAttention
from .left_padding import set_padding
from .packed_rows import new_tokens
from .parts import attention_class, entries_of, entry_of
from .plain_cache import PlainLayer


def new_layers(config: SurgeryConfig, *, training: bool) -> list[CacheLayer]:
    """Make the empty cache layers of a model; in training they are not quantized."""
    return [new_layer(config, layer, training=training) for layer in range(config.num_hidden_layers)]


def sliding_window(config: SurgeryConfig, layer: int) -> int | None:
    """Return the sliding window or attention chunk of a layer in tokens; None for full attention."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, WINDOWS[kinds[layer]], None) if kinds and kinds[layer] in WINDOWS else None


def new_layer(config: SurgeryConfig, layer: int, *, training: bool) -> CacheLayer:
    """Make the empty cache layer of one layer; in training it is not quantized."""
    entry = entry_of(config.attention_layers[layer])
    if entry.kind is None and (window := sliding_window(config, layer)) is not None:
        return DynamicSlidingWindowLayer(window)
    whole, codes = PlainLayer(), None
    if config.kv_cache_of(layer) is not None and not training:
        # Methods of this SurgeryConfig: the class of `config` may be from a package without the cache modules.
        whole, codes = SurgeryConfig.quantized_layer(config, layer), SurgeryConfig.streaming_codes(config, layer)
    return attention_class(entry).cache_layer_of(entry, whole, codes) if entry.kind else whole


def prepare_decoder(decoder: nn.Module, config: SurgeryConfig) -> None:
    """Extend the attention of all layers by `DocumentAttention`, for packed documents.

    Raises:
        ValueError: the family has layers that cannot use such a cache.
    """
    unchanged = [layer for layer, entry in enumerate(entries_of(config)) if entry.kind is None]
    form = "a cache that is not of plain keys and values"
    check_full_attention(config, form, unchanged if config.kv_cache is None else ())
    for index, layer in enumerate(decoder.layers):
        attention = layer.self_attn
        attention.__class__ = family_attention_class(DocumentAttention, type(attention))
        attention.new_layer = partial(new_layer, config, index)


def use_layers(config: SurgeryConfig, decoder: nn.Module, call: Call, *, training: bool, padded: bool) -> None:
    """Set up the cache of a decoder call with the layers of the config, unquantized in training.

    `padded`: whether layers need the left padding of each row.
    """
    kept_as = config.attention_layers, None if training else config.kv_cache
    cache = call.get(CACHE)
    if getattr(cache, "kept_as", None) == kept_as:
        cache.temporary = False  # its layers are already of the right kind
    else:
        cache = own_cache(decoder, call, new_layers(config, training=training))
        cache.kept_as = kept_as
    if padded:
        padding = set_padding(cache, call.get("attention_mask"), rows=len(new_tokens(call)))
        if padding is not None and training:
            call["left_padding"] = padding
