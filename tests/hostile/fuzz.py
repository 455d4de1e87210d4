"""A coverage-guided fuzzer of the readers; needs atheris, which is no dependency: ``pip install atheris``.

    PYTHONPATH=.:tests/support python tests/hostile/fuzz.py safetensors -max_total_time=600

Any argument after the reader's name is one of libFuzzer's. It ends with a traceback at the first error that is no
SurgeryError. What it finds becomes an example of a test in this folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["surgery.checkpoint", "surgery.common", "surgery.heads", "yaml"]):
    from surgery.checkpoint.config_file import read_config
    from surgery.checkpoint.gguf_header import read_gguf_header
    from surgery.checkpoint.gguf_model import describe_model
    from surgery.checkpoint.safetensors_format import read_header
    from surgery.common.errors import SurgeryError
    from surgery.common.file_settings import read_yaml
    from surgery.heads.import_patterns import read_pattern

READERS = {
    "safetensors": ("model.safetensors", lambda path: read_header(path.parent, path.name)),
    "config": ("config.json", read_config),
    "gguf": ("model.gguf", lambda path: describe_model(path, read_gguf_header(path))),
    "yaml": ("recipe.yaml", read_yaml),
    "pattern": ("pattern.safetensors", read_pattern),
    "table": ("masks.tsv", read_pattern),
}


def main() -> None:
    name, read = READERS[sys.argv.pop(1)]
    path = Path(tempfile.mkdtemp(prefix="surgery-fuzz-")) / name

    def one(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except SurgeryError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
