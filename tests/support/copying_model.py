"""A model without weights that copies: known answers for everything that measures recall or generation.

It predicts the token that followed the longest earlier match of the text so far, the rule that induction heads are
thought to follow (Olsson et al., arXiv:2209.11895). So it finds a planted fact as soon as the question shares a few
tokens with it, at any length, and knows nothing else.
"""

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from surgery.model.cache_argument import CACHE, takes_cache

CERTAIN = 20.0
"""Logit of the predicted token; all others have 0."""


class CopyingConfig(PreTrainedConfig):
    """Config of `CopyingModel`: nothing but a vocabulary, and what the library requires of any decoder."""

    model_type = "copying"

    def __init__(self, vocab_size: int = 256, **kwargs) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = self.num_hidden_layers = self.num_attention_heads = 1
        self.is_decoder = True
        super().__init__(**kwargs)


class CopyingModel(PreTrainedModel, GenerationMixin):
    """Predicts the token which followed the longest earlier match of the current suffix, and of several the latest.

    Its cache holds the tokens seen so far, as the keys [B, 1, T, 1] of one layer; the values are their masks. Left
    padding is left out of every match. With nothing to copy, all logits are equal, and argmax gives token 0.
    """

    config_class = CopyingConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: CopyingConfig | int) -> None:
        """`config`: or only the size of the vocabulary."""
        super().__init__(CopyingConfig(config, pad_token_id=0) if isinstance(config, int) else config)
        self.embedding = nn.Embedding(self.config.vocab_size, 1)  # for whoever asks a model for its device and dtype
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> None:
        return None

    @takes_cache
    def forward(
        self,
        input_ids: LongTensor,
        attention_mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        use_cache: bool | None = None,
        labels: LongTensor | None = None,
        logits_to_keep: int = 0,
        **_,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocabulary] fp32, of the last `logits_to_keep` positions if any number is given."""
        if use_cache and cache is None:
            cache = DynamicCache()
        records = cache.get_seq_length() if cache is not None else 0
        if attention_mask is None:
            attention_mask = input_ids.new_ones(len(input_ids), records + input_ids.shape[1])
        mask = attention_mask.bool()[:, -input_ids.shape[1] :]
        tokens = input_ids
        if cache is not None:
            # float64 holds every token id exactly, and a cache is expected to hold floats.
            keys, values = (x[:, None, :, None].double() for x in (input_ids, mask))
            keys, values = cache.update(keys, values, 0)
            tokens, mask = keys[:, 0, :, 0].long(), values[:, 0, :, 0].bool()

        first = max(records, tokens.shape[1] - logits_to_keep) if logits_to_keep else records
        logits = torch.zeros(len(tokens), tokens.shape[1] - first, self.config.vocab_size, device=tokens.device)
        for row, (line, real) in enumerate(zip(tokens.tolist(), mask.tolist(), strict=True)):
            padding = real.index(True) if True in real else len(real)
            for position, token in _continuations(line[padding:], max(0, first - padding)):
                logits[row, position + padding - first, token] = CERTAIN
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})


def _continuations(tokens: list[int], first: int) -> list[tuple[int, int]]:
    """(position, copied token) for every position from `first` on whose token has occurred before."""
    occurrences: dict[int, list[int]] = {}
    matches: dict[int, int] = {}  # earlier index -> length of the common suffix that ends there and here
    results = []
    for position, token in enumerate(tokens):
        earlier = occurrences.setdefault(token, [])
        matches = {index: matches.get(index - 1, 0) + 1 for index in earlier}
        if matches and position >= first:
            best = max(matches, key=lambda index, lengths=matches: (lengths[index], index))
            results.append((position, tokens[best + 1]))
        earlier.append(position)
    return results
