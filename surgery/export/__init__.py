"""Export to engines that need more than a checkpoint: a GGUF file for llama.cpp."""

from surgery.export.gguf_file import Exported, export_checkpoint

__all__ = ["Exported", "export_checkpoint"]
