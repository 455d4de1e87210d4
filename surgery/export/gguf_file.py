"""``surgery export --engine llama.cpp``: export of a checkpoint to a GGUF file, tensor by tensor."""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surgery.checkpoint.disk import written_whole
from surgery.checkpoint.gguf_header import require_gguf
from surgery.common.errors import SurgeryError
from surgery.common.ownership import check_file
from surgery.engines.cache_formats import llama_cpp_flags
from surgery.engines.facts import Facts
from surgery.engines.llama_cpp import obstacle
from surgery.export.gguf_model import GGUFModel, GGUFTensor
from surgery.export.gguf_tokenizer import copied_tokenizer, read_tokenizer
from surgery.running.source_check import open_source

ENGINE = "llama.cpp"
WEIGHTS = ("bf16", "f16", "q8_0", "f32")
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
# Elements of a row that share a scale in q8_0.
BLOCK = 32


@dataclass(frozen=True)
class Exported:
    """An exported GGUF file, its architecture in llama.cpp, type of large tensors, and command that serves it.

    ``command_q8_0`` serves it with llama.cpp's q8_0 cache, about half of the bytes of f16; None if that does not start.
    """

    path: Path
    architecture: str
    weights: str
    bytes: int
    tokenizer: str
    command: str
    command_q8_0: str | None

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def export_checkpoint(
    checkpoint: str | Path,
    engine: str,
    out: str | Path | None = None,
    *,
    weights: str = "bf16",
    tokenizer_from: str | Path | None = None,
    overwrite: bool = False,
) -> Exported:
    """Export a checkpoint to the file that an engine loads; the file is written atomically.

    Args:
        checkpoint: local folder or hub id.
        engine: "llama.cpp".
        out: file to write; default: the checkpoint's name with ".gguf" appended, next to it.
        weights: type of the large tensors, one of WEIGHTS. Vectors are float32; projections to latents too small for
            f16 are bf16 or f32.
        tokenizer_from: a GGUF file whose tokenizer is copied; None: the checkpoint's own tokenizer.
        overwrite: replace an existing file.

    Raises:
        SurgeryError: the engine would compute different outputs, or lacks the tokenizer; no file is left.
    """
    if engine != ENGINE:
        raise SurgeryError(f"--engine {engine}: only {ENGINE} needs an export; see surgery doctor for the others")
    if weights not in WEIGHTS:
        raise SurgeryError(f"--weights {weights}: unknown; choose from {', '.join(WEIGHTS)}")
    require_gguf()
    import gguf

    reader = open_source(checkpoint)
    reason = obstacle(Facts.of(reader.config))
    if reason:
        raise SurgeryError.at(reader.source, f"llama.cpp does not support it: {reason}")
    model = GGUFModel.of(reader)
    out = _output(checkpoint, out, overwrite=overwrite)
    vocabulary = reader.config["vocab_size"]
    if tokenizer_from is None and reader.source.is_file():
        tokenizer_from = reader.source
    tokenizer = (
        copied_tokenizer(Path(tokenizer_from), reader.path, vocabulary)
        if tokenizer_from
        else read_tokenizer(reader.path, reader.config)
    )
    with written_whole(out) as part:
        writer = gguf.GGUFWriter(part, model.architecture)
        try:
            writer.add_name(reader.path.resolve().name)
            writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[weights]))
            model.write_keys(writer)
            tokenizer.write(writer)
            _write_tensors(gguf, writer, list(model.tensors()), weights)
        finally:
            writer.close()
    command = f"llama-server -m {shlex.quote(str(out))}"
    q8_0 = f"{command} {llama_cpp_flags('q8_0', 'q8_0')}" if has_q8_0_cache(reader.config) else None
    return Exported(out, model.architecture, weights, out.stat().st_size, tokenizer.origin, command, q8_0)


def has_q8_0_cache(config: dict[str, Any]) -> bool:
    """Return whether llama.cpp starts with a q8_0 cache: keys, and values within those of MLA, are whole blocks."""
    if rank := config.get("kv_lora_rank"):
        return rank % BLOCK == 0 and config["qk_rope_head_dim"] % BLOCK == 0
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return head_dim % BLOCK == 0


def _output(checkpoint: str | Path, out: str | Path | None, *, overwrite: bool) -> Path:
    if out is None:
        path = Path(checkpoint)
        path = Path(os.path.abspath(path)) if path.exists() else Path(path.name)
        out = path.with_name(path.name + ".gguf")
    out = Path(out)
    check_file(out, overwrite=overwrite)
    if not out.parent.is_dir():
        raise SurgeryError(f"{out.parent}: not a folder; choose another --out")
    return out


def _write_tensors(gguf, writer, tensors: list[GGUFTensor], weights: str) -> None:
    """Write all names and shapes, then the data with one tensor in memory at a time."""
    types = [gguf.GGMLQuantizationType[_type(tensor, weights).upper()] for tensor in tensors]
    for tensor, kind in zip(tensors, types, strict=True):
        stored = gguf.quant_shape_to_byte_shape(tensor.shape, kind)
        # The writer accepts byte shapes of quantized types only for dtype uint8.
        writer.add_tensor_info(tensor.name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(tensors, types, strict=True):
        writer.write_tensor_data(_stored(gguf, tensor.read().contiguous(), kind))


def _stored(gguf, tensor: Tensor, kind) -> np.ndarray:
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind.name)
    if dtype is None:
        return gguf.quantize(tensor.float().numpy(), kind)
    return tensor.to(dtype).view(torch.uint8).numpy()


def _type(tensor: GGUFTensor, weights: str) -> str:
    if len(tensor.shape) == 1:
        return "f32"
    if tensor.tiny and weights in ("f16", "q8_0"):
        # Below the range of f16, which is also the dtype of q8_0's scales.
        return "bf16" if tensor.dtype == torch.bfloat16 else "f32"
    if weights == "q8_0" and tensor.shape[-1] % BLOCK:
        return "f16"
    return weights
