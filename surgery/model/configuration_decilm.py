"""Configuration of a DeciLM checkpoint, a Llama whose layers may have different numbers of KV heads.

Engines read `config.block_configs[layer].attention.n_heads_in_group`; no class of transformers has such objects. Remote
code that ships with the checkpoint: imports only transformers.
"""

from typing import Any

from transformers import LlamaConfig


class Block(dict):
    """Dictionary of config.json with attribute access."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class DeciLMConfig(LlamaConfig):
    """Llama's configuration with `block_configs`: one per layer, with `attention` and `ffn`."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, Any]] | None = None, **kwargs):
        blocks = block_configs or []
        self.block_configs = [Block({name: Block(part) for name, part in block.items()}) for block in blocks]
        super().__init__(**kwargs)
