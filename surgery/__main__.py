"""``python -m surgery``."""

from surgery.cli.program import main

main()
