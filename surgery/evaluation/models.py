"""The models of an evaluation: opening, identifying and loading any causal model, local or from the hub."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
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
    """An opened checkpoint.

    Attributes:
        name: its row's name.
        source: path or hub id, as the user named it.
        reader: its files; of a vision-language model, its language model.
        sha256: of all its weights.
        trust_remote_code: whether code next to the weights may run.
    """

    name: str
    source: str
    reader: CheckpointReader
    sha256: str
    trust_remote_code: bool = False

    @classmethod
    def open(
        cls,
        label: str,
        *,
        allow_pickle: bool = False,
        trust_remote_code: bool = False,
        advance: Callable[[int], Any] | None = None,
    ) -> Checkpoint:
        """Opens ``path``, ``org/name`` or ``row name=path`` and hashes its weights.

        Raises:
            SurgeryError: there is no such checkpoint, or it is damaged.
        """
        name, path = name_and_path(label)
        reader = language_model(open_source(path, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code))
        return cls(name, path, reader, reader.fingerprint(advance), trust_remote_code)

    @property
    def place(self) -> str:
        """Hub id, or the folder's or file's name: where it lay on one machine tells nobody anything."""
        if not Path(self.source).exists():
            return self.source
        return origin(self.reader.name, self.reader.dequantised_from)

    @property
    def dtype(self) -> str:
        """Dtype that the checkpoint says its weights have, or that of its largest tensor."""
        stated = self.reader.config.get("dtype") or self.reader.config.get("torch_dtype")
        if stated:
            return str(stated).removeprefix("torch.")
        largest = max(self.reader.names(), key=lambda name: self.reader.info(name).nbytes)
        return str(self.reader.info(largest).dtype).removeprefix("torch.")

    @property
    def config_sha256(self) -> str:
        """Hash of config.json: the same weights under another config are another model."""
        return hashlib.sha256(json.dumps(self.reader.config, sort_keys=True).encode()).hexdigest()

    def load(self, device: torch.device) -> PreTrainedModel:
        """The model in the checkpoint's own dtype, in evaluation mode.

        Raises:
            SurgeryError: transformers cannot load it, or it does not fit.
        """
        model = causal_model(self.reader, trust_remote_code=self.trust_remote_code)
        try:
            return model.to(device).eval()
        except torch.OutOfMemoryError:
            raise SurgeryError(f"{self.source}: does not fit on the device; try --device cpu") from None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer.

        Raises:
            SurgeryError: there is none that transformers can read.
        """
        return tokenizer_of(self.reader, called=self.source, trust_remote_code=self.trust_remote_code)

    def conversion(self) -> dict[str, Any] | None:
        """Return the facts of this package's conversion report that evaluation reports show."""
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
                raise TypeError("healing is no mapping")
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
    """Raises TypeError for what is neither a layer nor layers that share something, such as "4-7"."""
    if type(layer) is not int and not (isinstance(layer, str) and re.fullmatch(r"\d{1,9}-\d{1,9}", layer, re.ASCII)):
        raise TypeError(f"layer is {layer!r}, no number")


def _check_numbers(values: dict[str, Any]) -> None:
    """Raises TypeError for a value that plots cannot draw."""
    for name, value in values.items():
        if type(value) not in (int, float, NoneType):
            raise TypeError(f"{name} is {value!r}, no number")


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of a vocabulary and of how a few texts are cut: tokenizers that agree in it give equal tokens."""
    samples = ["def f(x):\n    return x + 1234  # naïve", "The quick brown fox, 3.14 — and\ttabs.\n\n日本"]
    cut = [tokenizer(text, add_special_tokens=False).input_ids for text in samples]
    facts = [sorted(tokenizer.get_vocab().items()), cut, tokenizer.bos_token_id, tokenizer.eos_token_id]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts a model's parameters in place. Buffers stay: RoPE frequencies in half precision would be wrong ones."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
