"""Sessions of evaluations for tests, and progress that is remembered in place of being shown."""

from contextlib import contextmanager
from typing import Any

from surgery.common.progress import Progress
from surgery.eval.session import Session
from surgery.running.processes import Processes


class Bars:
    """Remembers what a progress would have shown."""

    def __init__(self):
        self.phases, self.notes = [], []

    @contextmanager
    def phase(self, name, total, unit="item"):
        phase = {"name": name, "total": total, "unit": unit, "done": 0}
        self.phases.append(phase)
        yield lambda count=1: phase.update(done=phase["done"] + count)

    def note(self, text):
        self.notes.append(text)

    @property
    def done(self) -> int:
        """Amount of work in the last phase."""
        return self.phases[-1]["done"] if self.phases else 0


def session(tokenizer: Any = None, **options: Any) -> Session:
    """A session of one process that shows nothing."""
    return Session(tokenizer, Processes(), Progress(silent=True), **options)
