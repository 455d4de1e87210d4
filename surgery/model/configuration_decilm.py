"""Configuration of a DeciLM checkpoint, a Llama whose layers may have different numbers of KV heads.

Engines read it as `config.block_configs[layer].attention.n_heads_in_group`, and transformers has no class that gives
them objects there. This file travels beside the weights as remote code: it may import transformers, nothing else.
"""

from typing import Any

from transformers import LlamaConfig


class Block(dict):
    """A dictionary of config.json whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class DeciLMConfig(LlamaConfig):
    """Llama's configuration with `block_configs`, one for each layer, its `attention` and its `ffn`."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, Any]] | None = None, **kwargs):
        blocks = block_configs or []
        self.block_configs = [Block({name: Block(part) for name, part in block.items()}) for block in blocks]
        super().__init__(**kwargs)
