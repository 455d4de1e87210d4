"""Names that are not UTF-8: refused by a line before any work, as libraries in Rust cannot open them."""

import os
import sys

import pytest
from tiny_models import make_checkpoint

from surgery.checkpoint import CheckpointReader, check_output
from surgery.common.errors import SurgeryError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
NAME = os.fsdecode(b"na\xffme")


def test_folders_files_and_outputs(tmp_path):
    folder = make_checkpoint(tmp_path / "llama", "llama")
    (folder / f"{NAME}.txt").touch()
    with pytest.raises(SurgeryError, match=r"\.txt: the path is not valid UTF-8"):
        CheckpointReader.open(folder)
    (folder / f"{NAME}.txt").unlink()
    with pytest.raises(SurgeryError, match="not valid UTF-8") as refusal:
        CheckpointReader.open(folder.rename(tmp_path / NAME))
    str(refusal.value).encode()
    with pytest.raises(SurgeryError, match="not valid UTF-8"):
        check_output(tmp_path / "source", tmp_path / NAME)
