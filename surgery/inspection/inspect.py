"""``surgery inspect``: a checkpoint's attention, its KV bytes, what it can become and how compressible it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from surgery.calibration.texts import load_texts
from surgery.checkpoint.snapshots import Snapshots
from surgery.common.errors import SurgeryError
from surgery.common.pictures import Svg
from surgery.common.progress import Progress
from surgery.families import head_shape
from surgery.inspection.advice import advice
from surgery.inspection.architecture import model_facts
from surgery.inspection.converted import MODEL_TYPES, converted_facts
from surgery.inspection.spectra import LayerSpectrum, spectra_figure
from surgery.inspection.targets import foreseen_targets, smallest_targets
from surgery.running.kv_bytes import kv_bytes_of
from surgery.running.moment_precision import factorising_on
from surgery.running.source import Source
from surgery.running.unfused import open_model
from surgery.structures.kept_layers import converted_layers
from surgery.structures.mla.settings import ConvertSettings
from surgery.structures.work import Work
from surgery.transforms import mla

CONTEXTS = (8_192, 32_768, 131_072)


@dataclass(frozen=True)
class Inspection:
    """What is known of a checkpoint; plain values but for ``spectra``.

    Attributes:
        name: the folder's name.
        architecture: facts of the attention and the model around it.
        windows: of every layer with keys and values, tokens; None: all.
        kv: bytes per token, and of one sequence by its length, in the checkpoint's dtype.
        targets: what it can be converted to, in which class and why, at how many bytes, and which engines load that.
        advice: which of them to take, :func:`surgery.inspection.advice.advice`; empty where there is no choice.
        spectra: compressibility of every layer, first to last; None where it was not asked for.
        calibration: what the spectra were taken on.
    """

    name: str
    architecture: dict
    windows: list[int | None]
    kv: dict
    targets: list[dict]
    advice: dict = field(default_factory=dict)
    spectra: list[LayerSpectrum] | None = None
    calibration: dict | None = None

    @property
    def plot(self) -> Svg | None:
        """The spectra as a picture; None without them."""
        from surgery.eval.report.style import to_svg

        if self.spectra is None:
            return None
        return Svg(to_svg(spectra_figure(self.spectra, self.name, self.calibration["source"])))

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
            not (otherwise that is among the reasons why a target does not apply), or it was converted before.
    """
    settings, progress = settings or ConvertSettings(), progress or Progress(silent=True)
    reader = open_model(source, allow_pickle=allow_pickle)
    if reader.config.get("model_type") in MODEL_TYPES:
        if spectra:
            why = "was converted before, or is MLA; spectra are of keys and values of heads"
            raise SurgeryError(f"{reader.path}: {why}, drop --calibration")
        return Inspection(**converted_facts(reader, CONTEXTS))
    opened = Source.of(reader, settings)
    windows = [opened.windows[layer] for layer in converted_layers(opened.stateful, opened.layers)]
    targets = foreseen_targets(opened)
    inspection = Inspection(
        name=opened.reader.name,
        architecture=_architecture(opened),
        windows=windows,
        kv=kv_bytes(opened, len(windows)),
        targets=targets,
        advice=advice(targets, smallest_targets(opened)),
    )
    if not spectra:
        return inspection
    found, description = _spectra(opened, settings, progress)
    return replace(inspection, spectra=found, calibration=description)


def kv_bytes(opened: Source, layers: int) -> dict:
    """KV bytes in the checkpoint's dtype: per token, over all ``layers`` that cache, and by the sequence's length."""
    held = kv_bytes_of(opened.reader.config, _attention_dtype(opened))
    whole = held(1)  # the first token lies in every window
    at = dict(zip(CONTEXTS, map(held, CONTEXTS), strict=True))
    return {"bytes_per_token": whole, "bytes_per_token_and_layer": whole // layers, "bytes_at": at}


def _architecture(opened: Source) -> dict:
    config, reader = opened.config, opened.reader
    heads, kv_heads, head_dim = head_shape(config)
    names = {name.rpartition("self_attn.")[2] for name in opened.family.attention_names(reader, opened.first_layer)}
    return {
        **model_facts(reader, config, _attention_dtype(opened)),
        "model_type": reader.config["model_type"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "biases": [name[0] for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias") if name in names],
        "qk_norm": opened.qk_norm,
        "dequantised_from": reader.dequantised_from,
        "stored_as": reader.stored_as,
    }


def _attention_dtype(opened: Source):
    return opened.reader.info(opened.family.attention_names(opened.reader, opened.first_layer)[0]).dtype


def _spectra(opened: Source, settings: ConvertSettings, progress: Progress) -> tuple[list[LayerSpectrum], dict]:
    method = mla.METHODS["fisher"]  # the one whose statistics weigh by the loss
    texts = load_texts(opened, settings, progress)
    work = Work.in_folder(Snapshots(), opened, settings, texts, progress)
    with work.library, work.store, work.converted, factorising_on(opened.stream.device):
        work.gather(gradients=method.gradients, basis_of=mla.lag_basis(method))
        found = [
            LayerSpectrum.of(layer, work.library.load(layer)[0])
            for layer in range(opened.layers)
            if layer not in opened.stateful
        ]
    return found, texts.description
