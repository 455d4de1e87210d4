"""YAML that nobody meant well with: taken as plain values, or refused in one line."""

import pytest
from hostile import taken_or_refused

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import read_mapping

ALIASES = [(new, ", ".join([f"*{old}"] * 10)) for old, new in zip("abcdefghi", "bcdefghij", strict=True)]
BOMBS = [
    "a: &a [x]\n" + "".join(f"{new}: &{new} [{old}]\n" for new, old in ALIASES),
    "a: &a {x: 1}\n" + "".join(f"{new}: &{new} {{<<: [{old}]}}\n" for new, old in ALIASES),
    "a: &a [*a]",
]
ODD = ["a: 2001-99-99", "a: !!int x", "a: !!timestamp x", "a: 0x_", "a: " + "9" * 5000, "&a {? *a : 1}", "[" * 2000]
ODD += ["a: !!binary ====", "? [x]\n: 1", "\x00", "a: " + "\ud800"]


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused(bomb, tmp_path):
    (tmp_path / "file.yaml").write_text(bomb)
    with pytest.raises(SurgeryError, match="aliases expand to more than"):
        read_mapping(tmp_path / "file.yaml")


@pytest.mark.parametrize("text", ODD)
def test_odd_values(text, tmp_path):
    (tmp_path / "file.yaml").write_text(text, errors="replace")
    taken_or_refused(lambda: read_mapping(tmp_path / "file.yaml"))


def test_no_code_runs(tmp_path):
    (tmp_path / "file.yaml").write_text(f"!!python/object/apply:os.system ['touch {tmp_path}/ran']")
    with pytest.raises(SurgeryError):
        read_mapping(tmp_path / "file.yaml")
    assert not (tmp_path / "ran").exists()
