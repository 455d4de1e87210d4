"""Dtypes of the models in training, and writing of the healed checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.carried_files import CarriedFiles
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.file_kinds import CONFIG
from surgery.checkpoint.model_folder import model_folder
from surgery.common.errors import SurgeryError
from surgery.model import DECODERS, SurgeryConfig, SurgeryPicturesConfig, remote_code_files
from surgery.running import equal_widths
from surgery.running.models import causal_model_unchecked
from surgery.training.settings import HealSettings
from surgery.training.trainable import add_adapters

ADAPTER = "adapter"
"""Folder of the LoRA adapter in a healed checkpoint; the model's weights have it merged, too."""
OWN_CLASSES = (SurgeryConfig.model_type, SurgeryPicturesConfig.model_type)


def check_writable(reader: CheckpointReader) -> None:
    """Raise SurgeryError for students that healing cannot write: unconverted GPT-2 or GPT-NeoX, whose parameters have
    other names in training, and caches that quantize groups of tokens, as earlier versions wrote them."""
    if (kind := reader.config.get("model_type")) in DECODERS:
        raise SurgeryError(f"{reader.source}: healing does not support unconverted {kind} models; convert it first")
    if (reader.config.get("text_config") or reader.config).get("kv_cache") is not None:
        raise SurgeryError(
            f"{reader.source}: cannot heal its KV cache, quantized in groups of tokens by an earlier version; "
            "convert the source again with --bits auto, and heal the result"
        )


def set_dtypes(model: nn.Module, computed: torch.dtype) -> None:
    """Cast trainable parameters to fp32 and frozen ones to `computed`, in place. Buffers keep their dtype, since RoPE
    frequencies need fp32."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else computed)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return unsharded copies of the trainable parameters on the CPU; every process of a sharded model must call it."""
    return {name: _gathered(each).cpu().clone() for name, each in model.named_parameters() if each.requires_grad}


def _gathered(parameter: nn.Parameter) -> Tensor:
    """Gather a parameter that FSDP2 shards."""
    tensor = parameter.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def write_healed(
    reader: CheckpointReader, settings: HealSettings, trained: Mapping[str, Tensor], folder: Path, carried: CarriedFiles
) -> None:
    """Write the healed checkpoint to an existing folder: the student with its trained tensors, in its class and dtypes.

    Frozen tensors are bit-identical to the student's. `trained` are fp32 tensors by the student's parameter names, or
    by those of its LoRA adapters; `carried` are files next to the student's weights, as they were before the training.
    Raises SurgeryError: the student lacks a trained parameter, its checkpoint has changed, or the disk is full.
    """
    model = causal_model_unchecked(reader, trust_remote_code=settings.trust_remote_code)
    reader.check_unchanged()  # by hash: a changed timestamp alone must not lose a training
    if settings.train == "lora":
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        adapted = add_adapters(model.float(), settings.lora_rank, settings.lora_alpha)
        _copy_trained(model, trained)
        if not reader.stored_names:  # in a vision-language model the adapter's module names would not match
            with disk_errors(folder):
                adapted.save_pretrained(folder / ADAPTER)
        model = adapted.merge_and_unload()
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
    else:
        _copy_trained(model, trained)
    with disk_errors(folder):
        if reader.stored_names:
            _write_multimodal(model, reader, folder)
        else:
            model.save_pretrained(folder, safe_serialization=True)
        _copy_rest(carried, folder)


@torch.no_grad()
def _copy_trained(model: nn.Module, trained: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in trained.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise SurgeryError(f"{name}: was trained, but the student's checkpoint has no such parameter")
        parameters[name].copy_(tensor)


def _write_multimodal(model: nn.Module, reader: CheckpointReader, folder: Path) -> None:
    """Write the weight files of a vision-language model with the healed language model; other tensors are unchanged."""
    state = model.state_dict()
    now = {stored: state[name] for name, stored in reader.stored_names.items()}
    for path in sorted(model_folder(reader).glob("*.safetensors*")):
        if path.suffix == ".json":
            shutil.copyfile(path, folder / path.name)
        else:
            before = load_file(path)
            # Qwen3-VL stores experts transposed.
            turned = {
                name: now[name] if now[name].shape == old.shape else now[name].mT
                for name, old in before.items()
                if name in now
            }
            tensors = before | {name: tensor.contiguous() for name, tensor in turned.items()}
            save_file(tensors, folder / path.name, {"format": "pt"})


def _copy_rest(carried: CarriedFiles, folder: Path) -> None:
    """Copy config.json, the other model files and the records over those of transformers; add the remote code.

    The config of transformers would lack keys that other engines read, and add keys that only transformers reads.
    """
    for name in (CONFIG, *carried.names, *carried.records):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(carried.folder / name, folder / name)
    config = json.loads((folder / CONFIG).read_bytes())
    if config.get("model_type") in OWN_CLASSES:
        for path in remote_code_files(config.get("auto_map", {})):
            shutil.copyfile(path, folder / path.name)
    if (own := carried.own_config(config, os.listdir(folder))) != config:
        (folder / CONFIG).write_text(json.dumps(own, indent=2) + "\n", encoding="utf-8")


def use_attention(model: PreTrainedModel, device: torch.device) -> str | None:
    """Set a model's attention function for training and return its name; None keeps the loaded one.

    On a CPU it is `surgery.running.equal_widths`, if that supports the model.
    """
    return equal_widths.NAME if device.type == "cpu" and equal_widths.use_equal_widths(model) else None
