"""What a report says that its checkpoint holds and computes: made when it is written, read when it is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.architectures.own_class import MODEL_TYPE
from surgery.checkpoint import CheckpointReader
from surgery.checkpoint.carry_over import CARD, HEALING, REPORT
from surgery.checkpoint.digests import Digest, digests, files_of
from surgery.checkpoint.disk import disk_errors, read_json
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.model.blockwise_decoder import BlockwiseDecoder
from surgery.running.skeleton import skeleton
from surgery.running.source import OwnSource, Source
from surgery.verification.caches import prompt_of
from surgery.verification.probe import Probe

NOT_HASHED = (CARD, REPORT, HEALING)
"""What is written after the digests, or again when a checkpoint gets another name."""


def written_record(folder: Path, probe: Probe, progress: Progress) -> dict[str, Any]:
    """For the report of what lies in a folder and will not change any more.

    Raises:
        SurgeryError: a file cannot be read.
    """
    with disk_errors(folder):
        files = files_of(folder, but=NOT_HASHED)
        total = sum((folder / name).stat().st_size for name in files)
    with progress.phase("hash the result", total, "B") as advance:
        found = digests(folder, files, advance)
    return {"files": {name: digest.to_dict() for name, digest in found.items()}, "probe": probe.to_dict()}


@dataclass(frozen=True)
class Recorded:
    """What the report beside a checkpoint says of it, as far as it says so; each is None where it does not.

    Attributes:
        report: the file's name.
        kv: tokens that the live caches held, and bytes of each.
    """

    report: str | None = None
    files: dict[str, Digest] | None = None
    probe: Probe | None = None
    kv: tuple[int, float] | None = None

    @classmethod
    def beside(cls, folder: Path) -> Recorded:
        """Of a folder.

        Raises:
            SurgeryError: there is a report, and it is damaged.
        """
        name = next((name for name in (REPORT, HEALING) if (folder / name).is_file()), None)
        if name is None:
            return cls()
        said = read_json(folder / name)
        try:
            written = said.get("written") or {}
            files = {file: Digest(**digest) for file, digest in written.get("files", {}).items()} or None
            probe = Probe.of(written["probe"]) if "probe" in written else None
            if name == REPORT:
                kv = said["kv"]["measured_at_tokens"], said["kv"]["measured_bytes_per_token"]
            else:
                kv = said["verification"]["kv_tokens"], said["verification"]["kv_bytes_per_token"]
            if not (type(kv[0]) is int and 0 < kv[0] <= 2**20 and kv[1] >= 0):
                raise ValueError(f"{kv[0]} tokens")
            for digest in (files or {}).values():
                if not isinstance(digest.sha256, str) or type(digest.bytes) is not int:
                    raise TypeError("a digest")
                digest.differing(digest)
        except (AttributeError, KeyError, TypeError, ValueError, SurgeryError) as error:
            raise SurgeryError(f"{folder / name}: damaged ({error}); download it again") from None
        return cls(name, files, probe, kv)


def kv_bytes_by_tokens(reader: CheckpointReader, opened: Source | OwnSource) -> Callable[[int], int]:
    """KV bytes of one sequence by its tokens, the last few of which come one by one, as a checkpoint's config says it.

    Of sequences that no sliding window cuts.
    """
    if reader.config["model_type"] == MODEL_TYPE:
        model = skeleton(reader.config, opened.weight_dtype)
        if isinstance(model.model, BlockwiseDecoder):
            return lambda tokens: model.model.kv_cache_bytes(1, tokens, prompt=prompt_of(tokens))
        return lambda tokens: model.kv_cache_bytes(1, tokens)
    if isinstance(opened, Source):
        width = opened.anatomy(0).kv_width * opened.layers * opened.weight_dtype.itemsize
        return lambda tokens: width * tokens
    width = (reader.config["kv_lora_rank"] + reader.config["qk_rope_head_dim"]) * opened.layers
    return lambda tokens: width * opened.weight_dtype.itemsize * tokens
