"""Opened source checkpoints: files, family and layer-wise execution."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from surgery.checkpoint import CheckpointReader
from surgery.common.errors import SurgeryError
from surgery.families import FAMILIES, Family, family_of
from surgery.families.anatomy import AttentionAnatomy
from surgery.families.base import check_layers, keeps_state
from surgery.running.layer_stream import LayerStream, single_layer_config
from surgery.running.loading import load_config
from surgery.running.processes import Processes
from surgery.running.unfused import open_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OUTPUT = re.compile(r"model\.layers\.\d+\.self_attn\.o_proj\.weight")
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
"""Sizes that a config must contain; for a missing one transformers would use the default of the config class."""


class RunSettings(Protocol):
    """Device and dtype in which layers run: names of a device, or "auto", and of a dtype."""

    device: str
    dtype: str


class Opened:
    """Base class of opened checkpoints."""

    reader: CheckpointReader
    config: object

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype of the attention weights."""
        return attention_dtype(self.reader)


@dataclass
class Source(Opened):
    """An opened source checkpoint of a supported family."""

    reader: CheckpointReader
    family: Family
    config: object
    stream: LayerStream

    @classmethod
    def open(cls, source: str | Path, settings: RunSettings) -> Source:
        """Open and check a checkpoint.

        Raises SurgeryError: the checkpoint cannot be read, or its family, RoPE or weights are not supported.
        """
        return cls.of(open_model(source), settings)

    @classmethod
    def of(
        cls,
        reader: CheckpointReader,
        settings: RunSettings,
        family: Family | None = None,
        config: PreTrainedConfig | None = None,
    ) -> Source:
        """Build a source from an open reader, by default of its config's family, and with transformers' config."""
        family = family or family_of(reader.config)
        config = config or load_config(reader.path)
        if missing := [name for name in SIZES if hasattr(config, name) and reader.config.get(name) is None]:
            raise SurgeryError(f"{reader.source}/config.json: {missing[0]} is missing; add it, as it has no default")
        check_layers(config)
        for layer in range(config.num_hidden_layers):
            if not family.attention_names(reader, layer) and not keeps_state(config, layer):
                raise SurgeryError.at(
                    reader.source,
                    f"the weights of layer {layer} are of linear attention, but config.json has attention",
                )
        if all(family.stays(config, layer) for layer in range(config.num_hidden_layers)):
            raise SurgeryError.at(
                reader.source, "all layers use chunked attention with RoPE, so there is none to convert"
            )
        if all(keeps_state(config, layer) for layer in range(config.num_hidden_layers)):
            raise SurgeryError.at(
                reader.source, "all layers have a recurrent state, so there is no KV cache to convert"
            )
        stream = LayerStream(
            reader,
            config,
            family.single_layer_config,
            device=checked_device(settings.device),
            dtype=getattr(torch, settings.dtype),
        )
        return cls(reader, family, config, stream)

    def anatomy(self, layer: int) -> AttentionAnatomy:
        """Return the anatomy of a layer. Raises SurgeryError: a weight is not finite."""
        anatomy = self.family.anatomy(self.reader, self.config, layer)
        if name := anatomy.damaged():
            raise SurgeryError.at(
                self.reader.source, f"{name} of layer {layer} contains NaN or infinity; download it again"
            )
        return anatomy

    @property
    def first_layer(self) -> int:
        """First layer that can be converted: has keys and values and is not fixed by its family."""
        return next(layer for layer in range(self.layers) if layer not in self.fixed)

    @cached_property
    def first(self) -> AttentionAnatomy:
        """Anatomy of :attr:`first_layer` on the meta device; all convertible layers have these shapes."""
        return self.anatomy(self.first_layer).shapes()

    @property
    def stateful(self) -> frozenset[int]:
        """Layers with a recurrent state instead of keys and values (Mamba, linear attention); they have no anatomy."""
        return frozenset(layer for layer in range(self.layers) if keeps_state(self.config, layer))

    @property
    def fixed(self) -> frozenset[int]:
        """Layers that cannot be converted: those with a recurrent state, and those that the family excludes."""
        staying = (layer for layer in range(self.layers) if self.family.stays(self.config, layer))
        return self.stateful.union(staying)

    @property
    def qk_norm(self) -> bool:
        """True if any layer has QK norms."""
        unweighted = (self.family.unit_norm(self.config, layer) for layer in range(self.layers))
        return any(name.endswith(".q_norm.weight") for name in self.reader.names()) or any(unweighted)

    @property
    def mlp_bias(self) -> bool:
        """True if feed-forward layers have biases."""
        return any(".mlp." in name and name.endswith(".bias") for name in self.reader.names())

    def input_scale(self, layer: int) -> Tensor:
        """Return the weight [D] of the norm before a layer's attention; ones if there is no norm."""
        norm = self.stream.input_norm(layer)
        return torch.ones(self.config.hidden_size, dtype=self.weight_dtype) if norm is None else norm[0]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None for full attention."""
        return tuple(self.family.window(self.config, layer) for layer in range(self.layers))


@dataclass
class OwnSource(Opened):
    """An opened checkpoint that is already converted: the custom model class, or stock MLA."""

    reader: CheckpointReader
    config: object
    stream: LayerStream

    @classmethod
    def open(cls, reader: CheckpointReader, settings: RunSettings) -> OwnSource:
        """Build a source from an open reader; raise SurgeryError for an invalid config or a missing device."""
        config = load_config(reader.path)
        device, dtype = checked_device(settings.device), getattr(torch, settings.dtype)
        return cls(reader, config, LayerStream(reader, config, single_layer_config, device=device, dtype=dtype))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None for full attention."""
        family = FAMILIES.get(getattr(self.config, "base_model_type", None))
        return tuple(family.window(self.config, layer) if family else None for layer in range(self.layers))


def attention_dtype(reader: CheckpointReader) -> torch.dtype:
    """Return the dtype of the first attention output projection."""
    return reader.info(next(filter(OUTPUT.fullmatch, reader.names()))).dtype


def open_any(reader: CheckpointReader, settings: RunSettings) -> Source | OwnSource:
    """Open a checkpoint of a supported family, or one that is already converted.

    Raises SurgeryError: the checkpoint is neither, or is damaged.
    """
    if reader.config.get("model_type") in FAMILIES:
        return Source.of(reader, settings)
    return OwnSource.open(reader, settings)


def is_absent(device: str) -> bool:
    """Return whether a device name is valid, but this machine lacks the device."""
    try:
        torch.device("cpu" if device == "auto" else device)
        checked_device(device)
    except RuntimeError:
        return False
    except SurgeryError:
        return True
    return False


def checked_device(name: str) -> torch.device:
    """Return the device of a name; "auto" selects a CUDA device if available.

    Raises SurgeryError: this machine lacks the device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:120]
        what_else = "omit --device for the default"
        message = f"--device {name}: not available ({reason}); {what_else}"
        raise SurgeryError(message, setting="device") from None


def process_device(name: str, processes: Processes) -> torch.device:
    """Return the device for this process; CUDA devices are assigned round-robin by ``LOCAL_RANK``.

    Raises SurgeryError: this machine lacks the device.
    """
    device = checked_device(name)
    if device.type == "cuda" and processes.count > 1:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return device
