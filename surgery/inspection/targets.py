"""What a checkpoint can become: every target foreseen, with the class, the bytes, the engines and decoding's gain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surgery.architectures.beside_pictures import whole_config
from surgery.common.errors import SurgeryError
from surgery.common.progress import Progress
from surgery.engines import OWN_CLASSES
from surgery.forecast.attention_structures import of_config
from surgery.kernels.planner import Attention
from surgery.running.source import Source
from surgery.structures.kv_bytes import final_config, kv_bytes, source_kv_bytes
from surgery.structures.registry import TARGETS, Target

REQUESTS = {
    "mla": {"": {}, " --engine vllm": {"engine": "vllm"}, " --engine llama.cpp": {"engine": "llama.cpp"}}
    | {" --carrier own": {"carrier": "own"}},
    "hybrid": {" --streaming 1": {"streaming": 1}},
    "lowrank": {"": {}, " --bits auto --sinks 4": {"bits": "auto", "sinks": 4}},
}
"""What a user gets who asks for nothing but what is needed, and who asks for engines; of other targets for nothing."""

Speed = Callable[[list[Attention]], list[dict]]


SMALLEST = (("lowrank", " --kv-ratio 0.0625 --bits auto --sinks 4", {"kv_ratio": 0.0625, "bits": "auto", "sinks": 4}),)
"""The least that plans weigh."""


def smallest_targets(opened: Source, speed: Speed) -> list[dict[str, Any]]:
    """Targets at the least that can be recommended at all, as :func:`foreseen_targets` has them."""
    return [_row(opened, TARGETS.working()[name], asked, request, speed) for name, asked, request in SMALLEST]


def foreseen_targets(opened: Source, speed: Speed) -> list[dict[str, Any]]:
    """Every target, those of installed packages among them.

    Args:
        speed: what decoding gains with attention of another structure.
    """
    found: list[dict[str, Any]] = []
    for target in TARGETS.working().values():
        for asked, request in REQUESTS.get(target.name, {"": {}}).items():
            row = _row(opened, target, asked, request, speed)
            if asked and not row["applies"] and found and found[-1]["reasons"] == row["reasons"]:
                continue  # what stands in the way of the default
            same = [one for one in found if one["to"] == target.name and one["class"] in OWN_CLASSES]
            if "carrier" in request and same:
                continue  # the default goes to the own class already
            found.append(row)
    return found


def _row(opened: Source, target: Target, asked: str, request: dict[str, Any], speed: Speed) -> dict[str, Any]:
    command = {"command": f"surgery convert --to {target.name}{asked}", "to": target.name}
    try:
        settings = target.settings(request)
        structure = target.structure().for_source(opened.reader.config, settings)
        foreseen = structure(opened, settings, Progress(silent=True)).foresee()
        config = final_config(foreseen, settings)
        held, of_source = kv_bytes(foreseen, config, opened, settings), source_kv_bytes(opened)
    except SurgeryError as error:
        return {**command, "applies": False, "class": None, "reasons": [str(error)], "engines": {}, "speed": []}
    return {
        **command,
        "applies": True,
        "class": whole_config(opened.reader, config)["model_type"],
        "reasons": foreseen.reasons,
        "engines": foreseen.engines_of(opened.reader, config),
        "kv_bytes_per_token": held,
        "kv_ratio": held / of_source,
        "speed": speed(of_config(config, opened.weight_dtype.itemsize)),
    }
