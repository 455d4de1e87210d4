"""``surgery convert --to quantized``: a checkpoint whose KV cache keeps codes of a few bits.

Nothing is fitted. The result is the project's own class with the attention of the source, whichever that is, and
``kv_cache`` in its config; every tensor but those that a Hadamard rotation is folded into is copied byte for byte. What
was written is measured through its cache, a few tokens at a time, since one forward pass over a text reads recent
tokens quantised that decoding still has exact.
"""

from __future__ import annotations

from pathlib import Path

from surgery.architectures.cached import REASON, check_quantizable, rotated_names, rotated_tensors
from surgery.architectures.own_class import MODEL_TYPE, layer_entries, own_config
from surgery.calibration.texts import load_texts
from surgery.checkpoint import CheckpointReader, CheckpointWriter
from surgery.checkpoint.output_place import settle_output
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.model import remote_code_files
from surgery.reporting.report import SourceShape
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source
from surgery.structures.converter import Conversion, Outcome, conclude, unchanged_tensors, write_rest
from surgery.structures.quantized.settings import QuantizedSettings
from surgery.structures.quantized.stage import measure_quantized, quantized_facts, verify_codes


def convert_to_quantized(
    source: str | Path,
    out: str | Path | None = None,
    settings: QuantizedSettings | None = None,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    command: str = "",
    progress: Progress | None = None,
) -> Conversion:
    """Writes a checkpoint that keeps its KV cache quantised.

    Args:
        source: local folder or hub id: a checkpoint of a supported family, or of the project's own class.
        out: folder to write; the source's name with "-quantized" behind it by default.
        settings: default :class:`QuantizedSettings`.
        overwrite: replace an existing checkpoint in ``out``.
        allow_pickle: read pickled weights if there are no others.
        command: what the user typed, for the report.
        progress: bars; silent if None.

    Raises:
        SurgeryError: bad input or an impossible request; nothing is left behind.
    """
    settings, progress = settings or QuantizedSettings(), progress or Progress(silent=True)
    opened = open_checkpoint(source, settings, allow_pickle=allow_pickle)
    reader, dtype = opened.reader, opened.weight_dtype
    out = settle_output(source, reader.source, out, "quantized", overwrite=overwrite)
    config = own_config(reader.config, layer_entries(reader.config), kv_cache=settings.kv_cache())
    exact, quantized = (skeleton({**config, "kv_cache": kv_cache}, dtype) for kv_cache in (None, config["kv_cache"]))
    texts = load_texts(opened, settings, progress)

    rotated = rotated_names(reader, opened.config) if settings.hadamard else set()
    tensors = unchanged_tensors(reader, opened.config)
    tensors = {name: spec for name, spec in tensors.items() if "rotary_emb." not in name}  # the config's own
    with CheckpointWriter(out, tensors, max_shard_size=settings.max_shard_size, overwrite=overwrite) as writer:
        if rotated:
            with progress.phase("rotate", opened.layers) as advance:
                for layer in range(opened.layers):
                    for name, tensor in rotated_tensors(reader, opened.config, layer).items():
                        writer.write(name, tensor)
                    advance()
        kept = [name for name in tensors if name not in rotated]
        write_rest(writer, tensors, reader, config, kept, progress, code=remote_code_files())
        measured = measure_quantized(opened, writer.partial, texts.held_out, bool(rotated), dtype, settings, progress)
        verification = verify_codes(writer.partial, opened, config, measured, texts.held_out, settings, progress)
        at = verification.kv_tokens
        outcome = Outcome(
            config=config,
            replaced=rotated,
            target={
                "to": "quantized",
                "method": settings.format,
                "model_type": MODEL_TYPE,
                "reasons": [REASON],
                **quantized_facts(settings),
            },
            kv_bytes=lambda tokens: quantized.kv_cache_bytes(1, tokens),
            layers=measured.layers,
            scores=measured.scores,
            simulated=measured.hidden["quantized"],
            shape=SourceShape.of_config(opened.config, dtype, exact.kv_cache_bytes(1, at) / at),
        )
        report = conclude(writer, opened, settings, texts, outcome, verification, command, progress)
    return Conversion(writer.out, report)


def open_checkpoint(source: str | Path, settings: QuantizedSettings, *, allow_pickle: bool) -> Source | OwnSource:
    """Opens a checkpoint whose cache can be quantised.

    Raises:
        SurgeryError: it cannot be read, or there is no class that could hold its quantised cache.
    """
    reader = CheckpointReader.open(source, allow_pickle=allow_pickle)
    model_type = reader.config.get("model_type")
    if model_type == "deepseek_v3":
        raise SurgeryError(
            f"{reader.path}: stock deepseek_v3 keeps a plain cache; convert its source again with --carrier own, which "
            "makes an MLA checkpoint that can be quantised"
        )
    if model_type != MODEL_TYPE:
        opened = Source.open(source, settings, allow_pickle=allow_pickle)
    else:
        opened = OwnSource.open(reader, settings)
    check_quantizable(reader.path, opened.config)
    return opened
