"""config.json of a checkpoint."""

import json
from pathlib import Path


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def edit_config(folder: Path, *dropped: str, **changes) -> None:
    """Writes it again, with some names changed and some gone."""
    config = {name: value for name, value in config_of(folder).items() if name not in dropped} | changes
    (folder / "config.json").write_text(json.dumps(config))
