"""What every row of a report shows: bytes of the live cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

from surgery.eval.kv_cache import measure_kv
from surgery.eval.session import Session


@dataclass(frozen=True)
class KVBytesTask:
    """Decodes to a context of that many tokens and counts what the cache then holds; see `measure_kv`."""

    context: int
    name: ClassVar[str] = "kv"
    native: ClassVar[bool] = True

    def settings(self) -> dict[str, Any]:
        return {"context": self.context}

    def run(self, model: PreTrainedModel, session: Session, kept: Any = None) -> dict[str, Any]:
        return session.processes.from_main(lambda: asdict(measure_kv(model, self.context)))
