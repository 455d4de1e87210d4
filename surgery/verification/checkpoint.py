"""A checkpoint on disk, held at any time to its own config and to the report that its conversion wrote.

Its files are compared with their digests, its tensors with what its class wants; then it runs, a layer at a time,
through its live caches: one text in several pieces and beside others, as generations and servers would have it. No code
that lies beside the weights is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.digests import Digest, digests, files_of
from surgery.checkpoint.disk import disk_errors
from surgery.checkpoint.location import locate
from surgery.checkpoint.tensors import all_finite
from surgery.common.errors import SurgeryError
from surgery.common.human import size
from surgery.common.progress import Progress
from surgery.engines.facts import DECILM
from surgery.families import FAMILIES
from surgery.families.base import LAYER_PREFIX
from surgery.families.fused import FUSED
from surgery.running.loading import is_of_loading
from surgery.running.source import OwnSource, Source, open_any
from surgery.running.unfused import unfused
from surgery.verification.agreement import Agreement, run_agreement
from surgery.verification.outcomes import GOOD, UNCHECKED, WRONG, Verified
from surgery.verification.record import NOT_HASHED, Recorded, kv_bytes_by_tokens
from surgery.verification.written import CACHE_TOLERANCE, QUANTIZED_TOLERANCE, check_meta

REPORT, FILES, TENSORS, CLASS = "report", "files", "tensors", "class"
PIECES, BATCHES, KV, LOGITS = "pieces", "batches", "KV bytes", "logits"
RUNNING = (PIECES, BATCHES, KV, LOGITS)
"""Checks that run the model."""

CONVERTED = ("surgery", "deepseek_v3")
_SHOWN = 3


@dataclass(frozen=True)
class VerifySettings:
    """Where layers run, and in what."""

    device: str = "auto"
    dtype: str = "float32"


def verify_checkpoint(
    source: str | Path,
    *,
    device: str = "auto",
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Verified:
    """Verifies a folder, a GGUF file or a model of the hub; memory is bounded by one layer.

    What is wrong is in the result; of a checkpoint without a report, or with one of before there were digests, what
    could not be checked is too.

    Raises:
        SurgeryError: there is no such checkpoint or device.
    """
    progress = progress or Progress(silent=True)
    with disk_errors(Path(source)):
        path = locate(source, allow_pickle=allow_pickle)
    verified, recorded = Verified(path), Recorded()
    folder = path if path.is_dir() else path.parent
    with verified.trying(REPORT):
        recorded = Recorded.beside(folder) if path.is_dir() else recorded
        verified.report = recorded.report
        verified.say(
            REPORT, *(UNCHECKED, "none beside the weights") if recorded.report is None else (GOOD, recorded.report)
        )
    hashed = _check_files(verified, folder, recorded, progress)
    reader = None
    with verified.trying(TENSORS):
        reader = CheckpointReader.open(path, allow_pickle=allow_pickle)
        _check_tensors(verified, reader, hashed, progress)
    opened = None if reader is None else _open(verified, reader, VerifySettings(device))
    if opened is None:
        for name in RUNNING:
            verified.say(name, UNCHECKED, "it does not run")
        return verified
    _check_running(verified, opened, recorded, progress)
    return verified


def _check_files(verified: Verified, folder: Path, recorded: Recorded, progress: Progress) -> bool:
    """Compares files with their digests; whether all are those that were written."""
    if recorded.files is None:
        why = "there is no report" if recorded.report is None else f"{recorded.report} has no digests, it is older"
        verified.say(FILES, UNCHECKED, why)
        return False
    faults, there = [], set(files_of(folder, but=NOT_HASHED))
    whole = []
    for name, wanted in recorded.files.items():
        found = (folder / name).stat().st_size if name in there else None
        if found is None:
            faults.append(f"{name} is missing")
        elif found != wanted.bytes:
            faults.append(f"{name} has {found} bytes, written were {wanted.bytes}")
        else:
            whole.append(name)
    with progress.phase("hash the files", sum(recorded.files[name].bytes for name in whole), "B") as advance:
        for name in whole:
            try:
                found = digests(folder, [name], advance)[name]
            except SurgeryError as error:
                faults.append(str(error).removeprefix(f"{folder}/"))
                continue
            if found.sha256 != recorded.files[name].sha256:
                faults.append(_what_differs(name, found, recorded.files[name]))
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        verified.say(FILES, WRONG, "; ".join(faults[:_SHOWN]) + more)
        return False
    total = size(sum(digest.bytes for digest in recorded.files.values()))
    verified.say(FILES, GOOD, f"{len(whole)} of {total}, as they were written (SHA-256)")
    return True


def _what_differs(name: str, found: Digest, wanted: Digest) -> str:
    modules = found.differing(wanted)
    if not modules:
        return f"{name} is not what was written" + (", in its header" if wanted.parts else "")
    more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    return f"{name} is not what was written, in {', '.join(modules[:_SHOWN])}{more}"


def _check_tensors(verified: Verified, reader: CheckpointReader, hashed: bool, progress: Progress) -> None:
    """Looks at every tensor's values, unless its file is known to be what was checked before."""
    infos = {name: reader.info(name) for name in reader.names()}
    if not hashed:
        with progress.phase("read the tensors", sum(info.nbytes for info in infos.values()), "B") as advance:
            for name, info in infos.items():
                if not all(map(all_finite, reader.chunks(name))):
                    raise SurgeryError(f"{name} holds NaN or infinity")
                advance(info.nbytes)
    dtypes = sorted({str(info.dtype).removeprefix("torch.") for info in infos.values()})
    files = len({info.file for info in infos.values()})
    verified.say(TENSORS, GOOD, f"{len(infos)} of {' and '.join(dtypes)} in {files} whole file{'s' * (files > 1)}")


def _open(verified: Verified, reader: CheckpointReader, settings: VerifySettings) -> Source | OwnSource | None:
    """Opens what can be run, all of whose tensors are there in the shapes that the config asks for."""
    model_type = reader.config.get("model_type")
    if model_type == DECILM:
        verified.say(CLASS, UNCHECKED, f"{model_type} is a class of vLLM and llama.cpp, not of transformers")
        return None
    if model_type not in {*FAMILIES, *FUSED, *CONVERTED}:
        verified.say(CLASS, UNCHECKED, f"{model_type} is no family that this package runs")
        return None
    with verified.trying(CLASS):
        opened = open_any(unfused(reader), settings)
        check_meta(opened.config, opened.reader)
        extra = _layers_of_none(opened)
        if extra:
            raise SurgeryError(f"{extra[0]} is of a layer that config.json does not have")
        return opened
    return None


def _layers_of_none(opened: Source | OwnSource) -> list[str]:
    """Tensors of layers behind the last."""
    before, _, after = LAYER_PREFIX.partition("{layer}")
    return [
        name
        for name in opened.reader.names()
        if name.startswith(before) and int(name.removeprefix(before).partition(after)[0]) >= opened.layers
    ]


@torch.no_grad()
def _check_running(verified: Verified, opened: Source | OwnSource, recorded: Recorded, progress: Progress) -> None:
    """Runs the layers and compares."""
    with verified.trying(CLASS):
        try:
            agreement = run_agreement(opened, recorded, progress)
        except Exception as error:
            if not is_of_loading(error):
                raise
            raise SurgeryError(" ".join(str(error).split())[:300] or repr(error)) from error
        verified.say(CLASS, GOOD, f"{agreement.loaded_as}, {opened.layers} layers load")
        _judge(verified, opened, recorded, agreement)
        return
    for name in RUNNING:
        verified.say(name, UNCHECKED, "it does not run")


def _judge(verified: Verified, opened: Source | OwnSource, recorded: Recorded, agreement: Agreement) -> None:
    allowed = QUANTIZED_TOLERANCE if agreement.quantized else CACHE_TOLERANCE[opened.stream.dtype]
    for name, found, left_out in (
        (PIECES, agreement.pieces, agreement.not_in_pieces),
        (BATCHES, agreement.batches, agreement.not_in_batches),
    ):
        wrong = {how: worst for how, worst in found.items() if not worst <= allowed}  # nor is NaN
        if wrong:
            verified.say(name, WRONG, "; ".join(f"{how} differs by {worst:.1e}" for how, worst in wrong.items()))
        elif found:
            besides = f"; {left_out}" if left_out else ""
            verified.say(name, GOOD, f"{' = '.join(found)}, to {max(found.values()):.0e}{besides}")
        else:
            verified.say(name, UNCHECKED, left_out)
    by_config = kv_bytes_by_tokens(opened.reader, opened)(agreement.kv_tokens)
    by_report = by_config if recorded.kv is None else recorded.kv[1] * agreement.kv_tokens
    told = f"{agreement.kv_bytes / agreement.kv_tokens:g} a token after {agreement.kv_tokens} tokens"
    if agreement.kv_bytes != by_config:
        verified.say(KV, WRONG, f"{told}, config.json says {by_config / agreement.kv_tokens:g}")
    elif abs(agreement.kv_bytes - by_report) > 0.5:
        verified.say(KV, WRONG, f"{told}, {recorded.report} says {recorded.kv[1]:g}")
    else:
        verified.say(KV, GOOD, told + (", as the report says" if recorded.kv else ", as config.json says"))
    if agreement.logits is None:
        why = "there is no report" if recorded.report is None else f"{recorded.report} has none, it is older"
        verified.say(LOGITS, UNCHECKED, why)
        return
    allowed = max(allowed, CACHE_TOLERANCE.get(getattr(torch, recorded.probe.dtype), QUANTIZED_TOLERANCE))
    if agreement.logits <= allowed:
        verified.say(
            LOGITS, GOOD, f"of {len(recorded.probe.tokens)} tokens as the report says, to {agreement.logits:.0e}"
        )
    else:
        verified.say(LOGITS, WRONG, f"differ from those of the report by {agreement.logits:.1e} of the largest")
