"""Command line ``surgery COMMAND``, one file per command. Torch is imported inside the commands only."""

from surgery.cli.program import app, main

__all__ = ["app", "main"]
