"""Models of an evaluation: opening, hashing and loading causal models from local folders or the hub."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.disk import read_json
from surgery.common.errors import SurgeryError
from surgery.common.human import origin
from surgery.common.lineage import REPORT, lineage
from surgery.evaluation.names import name_and_path
from surgery.running.models import causal_model, tokenizer_of
from surgery.running.source_check import open_source
from surgery.running.unfused import language_model


@dataclass(frozen=True)
class Checkpoint:
    """Opened checkpoint: name of its row, path as given, reader of its language model, and hash of all weights."""

    name: str
    source: str
    reader: CheckpointReader
    sha256: str
    trust_remote_code: bool = False

    @classmethod
    def open(cls, label: str, *, trust_remote_code: bool = False) -> Checkpoint:
        """Open ``path``, ``org/name`` or ``row name=path`` and hash the weights.

        Raises SurgeryError: the checkpoint does not exist or is damaged.
        """
        name, path = name_and_path(label)
        reader = language_model(open_source(path, trust_remote_code=trust_remote_code))
        return cls(name, path, reader, reader.fingerprint(), trust_remote_code)

    @property
    def source_name(self) -> str:
        """Hub id, or name of the folder or file without its path on this machine."""
        if not Path(self.source).exists():
            return self.source
        return origin(self.reader.name, self.reader.dequantised_from)

    @property
    def dtype(self) -> str:
        """Dtype of the weights according to the config, else the dtype of the largest tensor."""
        stated = self.reader.config.get("dtype") or self.reader.config.get("torch_dtype")
        if stated:
            return str(stated).removeprefix("torch.")
        largest = max(self.reader.names(), key=lambda name: self.reader.info(name).nbytes)
        return str(self.reader.info(largest).dtype).removeprefix("torch.")

    @property
    def config_sha256(self) -> str:
        """Hash of config.json; the same weights with another config are another model."""
        return hashlib.sha256(json.dumps(self.reader.config, sort_keys=True).encode()).hexdigest()

    def load(self, device: torch.device) -> PreTrainedModel:
        """Load the model in the checkpoint's dtype and in evaluation mode.

        Raises SurgeryError: transformers cannot load it, or it does not fit in memory.
        """
        model = causal_model(self.reader, trust_remote_code=self.trust_remote_code)
        try:
            return model.to(device).eval()
        except torch.OutOfMemoryError:
            raise SurgeryError(f"{self.source}: does not fit on the device; try --device cpu") from None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raises SurgeryError: transformers cannot load a tokenizer."""
        return tokenizer_of(self.reader, called=self.source, trust_remote_code=self.trust_remote_code)

    def conversion(self) -> dict[str, Any] | None:
        """Return the fields of the conversion report that evaluation reports show; None without a conversion report."""
        path = self.reader.path / REPORT
        if not path.exists():
            return None
        try:
            report = read_json(path)
            for layer in report["layers"]:
                _check_numbers({name: layer.get(name) for name in ("rank", "latent_error_share")})
                _check_layer(layer["layer"])
                _check_numbers(layer.get("measured") or {})
            if not isinstance(report.get("healing"), dict | None):
                raise TypeError("healing is not a mapping")
            return {
                "to": report["target"]["to"],
                "method": report["target"]["method"],
                "reasons": report["target"]["reasons"],
                "command": report["command"],
                "lineage": lineage(report),
                "source_sha256": report["source"]["sha256"],
                "seconds": sum(report["seconds"].values()),
                "peak_memory_bytes": report["peak_memory_bytes"],
                "layers": report["layers"],
                "healing": report.get("healing"),
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SurgeryError.at(path, f"not a conversion report ({error!r}); repair or remove it") from None


def _check_layer(layer: Any) -> None:
    """Raise TypeError unless the value is a layer index or a range of layers, such as "4-7"."""
    if type(layer) is not int and not (isinstance(layer, str) and re.fullmatch(r"\d{1,9}-\d{1,9}", layer, re.ASCII)):
        raise TypeError(f"layer is {layer!r}, not a number")


def _check_numbers(values: dict[str, Any]) -> None:
    """Raise TypeError for a value that is neither a number nor None."""
    for name, value in values.items():
        if type(value) not in (int, float, NoneType):
            raise TypeError(f"{name} is {value!r}, not a number")


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the vocabulary, the bos and eos ids, and the tokens of sample texts, to detect different tokenizers."""
    samples = ["def f(x):\n    return x + 1234  # naïve", "The quick brown fox, 3.14 — and\ttabs.\n\n日本"]
    cut = [tokenizer(text, add_special_tokens=False).input_ids for text in samples]
    facts = [sorted(tokenizer.get_vocab().items()), cut, tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast a model's parameters in place, but no buffers: RoPE frequencies would be wrong in half precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
