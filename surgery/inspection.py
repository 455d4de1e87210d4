"""``surgery inspect``: a checkpoint's attention, its KV bytes, what it can become and how compressible it is."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from surgery import layer_statistics
from surgery.architectures import hybrid, low_rank, own_class
from surgery.architectures.own_family import ENGINES, OWN_FAMILY
from surgery.calibration.library import StatisticsLibrary
from surgery.calibration.sweep import BoundaryStore
from surgery.checkpoint.reader import CheckpointReader
from surgery.convert_heads import wanted_heads
from surgery.errors import SurgeryError
from surgery.families import head_shape
from surgery.forecast import forecast
from surgery.mla_output import reserved_numbers
from surgery.progress import Progress
from surgery.settings import ConvertSettings, KVHeadsSettings
from surgery.source import Source
from surgery.spectra import LayerSpectrum
from surgery.texts import load_texts
from surgery.transforms import mla
from surgery.transforms.budget import candidate_splits

CONTEXTS = (8_192, 32_768, 131_072)
# The settings under which a conversion is foreseen: what a user gets who asks for nothing, and who asks for engines.
VARIANTS = {
    "mla": {},
    "mla --rope-frequencies grid": {"rope_frequencies": "grid"},
    "mla --carrier own": {"carrier": "own"},
}


@dataclass(frozen=True)
class Inspection:
    """What is known of a checkpoint; plain values but for ``spectra``.

    Attributes:
        name: the folder's name.
        architecture: facts of the attention and the model around it.
        windows: of every layer, tokens; None: all.
        kv: bytes per token, and of one sequence by its length, in the checkpoint's dtype.
        targets: what it can be converted to, in which class and why, and which engines load that.
        spectra: compressibility of every layer, first to last; None where it was not asked for.
        calibration: what the spectra were taken on.
    """

    name: str
    architecture: dict
    windows: list[int | None]
    kv: dict
    targets: list[dict]
    spectra: list[LayerSpectrum] | None = None
    calibration: dict | None = None

    def to_dict(self) -> dict:
        plain = asdict(replace(self, spectra=None))
        plain["spectra"] = None if self.spectra is None else [spectrum.to_dict() for spectrum in self.spectra]
        return plain


def inspect_checkpoint(
    source: str | Path,
    settings: ConvertSettings | None = None,
    *,
    spectra: bool = False,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Inspection:
    """Inspects a checkpoint; with ``spectra`` runs the calibration that ``settings`` name.

    Raises:
        SurgeryError: it cannot be read, or its family is not supported; with ``spectra`` also where its attention is
            not (otherwise that is among the reasons why a target does not apply).
    """
    settings, progress = settings or ConvertSettings(), progress or Progress(silent=True)
    opened = Source.open(source, settings, allow_pickle=allow_pickle)
    windows = [opened.family.window(opened.config, layer) for layer in range(opened.layers)]
    inspection = Inspection(
        name=opened.reader.path.resolve().name,
        architecture=_architecture(opened),
        windows=windows,
        kv=kv_bytes(opened, windows),
        targets=_targets(opened, settings),
    )
    if not spectra:
        return inspection
    found, description = _spectra(opened, settings, progress)
    return replace(inspection, spectra=found, calibration=description)


def kv_bytes(opened: Source, windows: list[int | None]) -> dict:
    """KV bytes in the checkpoint's dtype: per token over all layers, and of one sequence at some lengths."""
    _, kv_heads, head_dim = head_shape(opened.config)
    layer = 2 * kv_heads * head_dim * _attention_dtype(opened).itemsize
    at = {
        context: sum(layer * min(context, context if window is None else window) for window in windows)
        for context in CONTEXTS
    }
    return {"bytes_per_token": layer * len(windows), "bytes_per_token_and_layer": layer, "bytes_at": at}


def _architecture(opened: Source) -> dict:
    config, reader = opened.config, opened.reader
    heads, kv_heads, head_dim = head_shape(config)
    rope = getattr(config, "rope_parameters", None) or {}
    names = {name.rpartition("self_attn.")[2] for name in opened.family.attention_names(reader, 0)}
    return {
        "model_type": reader.config["model_type"],
        "layers": opened.layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocabulary": config.vocab_size,
        "max_positions": config.max_position_embeddings,
        "rope_type": rope.get("rope_type", "default"),
        "rope_theta": rope.get("rope_theta"),
        "biases": [name[0] for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias") if name in names],
        "qk_norm": opened.family.qk_norm,
        "experts": opened.family.experts,
        "tied_embeddings": bool(config.tie_word_embeddings),
        "dtype": str(_attention_dtype(opened)).removeprefix("torch."),
        "parameters": _parameters(reader, tied=bool(config.tie_word_embeddings)),
    }


def _attention_dtype(opened: Source):
    return opened.reader.info(opened.family.attention_names(opened.reader, 0)[0]).dtype


def _parameters(reader: CheckpointReader, *, tied: bool) -> int:
    """Numbers in the checkpoint; a copy of tied embeddings counts once."""
    copies = {"lm_head.weight"} if tied else set()
    infos = [reader.info(name) for name in reader.names() if name not in copies]
    return sum(info.nbytes // info.dtype.itemsize for info in infos)


def _targets(opened: Source, settings: ConvertSettings) -> list[dict]:
    """Every variant at a quarter of the KV bytes, with the class that would carry it."""
    found = []
    for command, variant in VARIANTS.items():
        target = _target(opened, replace(settings, method="fisher", **variant))
        if target["applies"] and target["class"] == "surgery" and any(t["class"] == "surgery" for t in found):
            continue  # the default goes to the own class already
        found.append({"command": f"surgery convert --to {command}", **target})
        if not target["applies"]:
            return found  # what stands in the way of the default stands in the way of all
    carrier = {"applies": True, "class": own_class.MODEL_TYPE, "engines": own_class.ENGINES}
    reasons = {"lowrank": low_rank.REASON, "crosslayer": low_rank.REASON, "hybrid": hybrid.REASON}
    others = [
        {"command": f"surgery convert --to {name}", "reasons": [reason], **carrier} for name, reason in reasons.items()
    ]
    return [*found, _fewer_heads(opened), *others]


def _fewer_heads(opened: Source) -> dict:
    """Half of the KV heads, in the source's own class."""
    command = "surgery convert --to gqa"
    try:
        wanted_heads(KVHeadsSettings(), opened.anatomy(0), opened.layers)
    except SurgeryError as error:
        return {"command": command, "applies": False, "class": None, "reasons": [str(error)], "engines": {}}
    return {
        "command": command,
        "applies": True,
        "class": opened.reader.config["model_type"],
        "reasons": [OWN_FAMILY],
        "engines": ENGINES,
    }


def _target(opened: Source, settings: ConvertSettings) -> dict:
    try:
        first = opened.anatomy(0)
        split = candidate_splits(settings, first, reserved_numbers(opened, settings, first))[0]
        outcome = forecast(opened, split, settings)
    except SurgeryError as error:
        return {"applies": False, "class": None, "reasons": [str(error)], "engines": {}}
    stock = outcome.carrier.stock
    reasons = list(outcome.carrier.reasons)
    return {
        "applies": True,
        "class": "deepseek_v3" if stock else "surgery",
        "reasons": reasons,
        "engines": {engine: _any_width(verdict) for engine, verdict in outcome.engines.items()},
    }


def _any_width(verdict: str) -> str:
    """An engine's verdict without the width of one split: the budget is not chosen yet."""
    return re.sub(r", this is \d+\)", ")", verdict)


def _spectra(opened: Source, settings: ConvertSettings, progress: Progress) -> tuple[list[LayerSpectrum], dict]:
    method = mla.METHODS["fisher"]  # the one whose statistics weigh by the loss
    texts = load_texts(opened, settings, progress)
    with StatisticsLibrary() as library, BoundaryStore() as store:
        layer_statistics.gather(
            opened,
            library,
            texts.calibration,
            store,
            settings,
            progress,
            gradients=method.gradients,
            basis_of=mla.lag_basis(method),
        )
        found = [LayerSpectrum.of(layer, library.load(layer)[0]) for layer in range(opened.layers)]
    return found, texts.description
