"""Facts of a model's architecture, for `surgery inspect`."""

from __future__ import annotations

from typing import Any

import torch

from surgery.checkpoint.reader import CheckpointReader


def model_facts(reader: CheckpointReader, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return facts of the architecture as JSON values; tied embeddings count once, ``dtype`` is that of attention."""
    rope, tied = getattr(config, "rope_parameters", None) or {}, bool(config.tie_word_embeddings)
    infos = [reader.info(name) for name in reader.names() if not (tied and name == "lm_head.weight")]
    return {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocabulary": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "rope_type": rope.get("rope_type", "default"),
        "rope_theta": rope.get("rope_theta"),
        "experts": any(".experts." in name for name in reader.names()),
        "tied_embeddings": tied,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(info.nbytes // info.dtype.itemsize for info in infos),
    }
