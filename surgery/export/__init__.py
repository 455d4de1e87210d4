"""What engines need besides a checkpoint: for llama.cpp a GGUF file."""

from surgery.export.gguf_file import Exported, export_checkpoint

__all__ = ["Exported", "export_checkpoint"]
