"""The command line: ``surgery VERB``, one file a verb. Torch is imported inside the commands only."""

from surgery.cli.program import app, main

__all__ = ["app", "main"]
