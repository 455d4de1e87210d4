"""Output of the commands: tables, or one JSON object with ``--json``."""
