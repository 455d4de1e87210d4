"""Recipes and settings files that ship: found, listed and printed by name."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from command_line import ROOT, run_main

from surgery.common.errors import SurgeryError
from surgery.common.shipped import find_shipped, shipped
from surgery.workflow import recipe

KINDS = pytest.mark.parametrize("kind", ["recipes", "configs"])


@KINDS
def test_all_files_are_found_and_say_what_they_are(kind):
    assert {each.name for each in shipped(kind)} == {path.stem for path in (ROOT / kind).glob("*.yaml")}
    for each in shipped(kind):
        assert find_shipped(each.name, kind) == each.path
        assert len(each.about) > 20 and not each.about.startswith("#"), each.name


@KINDS
def test_a_file_of_ones_own_comes_first(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = shipped(kind)[0].name
    (tmp_path / name).mkdir()  # as a recipe's outputs lie in a folder of its name
    assert find_shipped(name, kind) == shipped(kind)[0].path
    (tmp_path / "own.yaml").write_text("a: 1")
    assert find_shipped("own.yaml", kind) == Path("own.yaml")
    with pytest.raises(SurgeryError, match="no such file, and no"):
        find_shipped("other.yaml", kind)


def test_listed_and_printed(monkeypatch, capsys):
    code, listed, _ = run_main(monkeypatch, capsys, "config")
    assert code == 0 and "mla-everywhere" in listed and "default RoPE" in listed
    assert "\nNext: surgery convert CKPT --config NAME --dry-run   estimates memory, disk and time\n" in listed
    code, printed, _ = run_main(monkeypatch, capsys, "run", "--json")
    assert "testbed-mla" in [each["name"] for each in json.loads(printed)["recipes"]]

    code, printed, _ = run_main(monkeypatch, capsys, "config", "testbed-mla")
    assert code == 0 and printed == (ROOT / "recipes" / "testbed-mla.yaml").read_text()
    code, _, err = run_main(monkeypatch, capsys, "config", "mla-everywher")
    assert code == 1 and "did you mean mla-everywhere?" in err


@pytest.mark.parametrize(("old", "new"), [("env", "doctor"), ("recipes", "run"), ("configs", "config")])
def test_earlier_commands_print_what_the_new_ones_do(old, new, monkeypatch, capsys):
    fixed = {"memory_available_bytes": 0}
    code, shown, told = run_main(monkeypatch, capsys, old, "--json")
    assert code == 0 and told == f"surgery: note: surgery {old} is surgery {new} now\n"
    assert json.loads(shown) | fixed == json.loads(run_main(monkeypatch, capsys, new, "--json")[1]) | fixed
    assert f"│ {old} " not in run_main(monkeypatch, capsys, "--help")[1]


def test_options_without_what_they_are_for_are_refused(monkeypatch, capsys):
    for arguments, option in ((["run", "--dry-run"], "RECIPE"), (["doctor", "builtin", "--gpu"], "--gpu")):
        code, shown, told = run_main(monkeypatch, capsys, *arguments)
        assert (code, shown) == (1, "") and option in told


def test_settings_as_json(monkeypatch, capsys):
    shown = run_main(monkeypatch, capsys, "config", "mla", "--json")[1]
    assert json.loads(shown) == yaml.safe_load((ROOT / "configs" / "mla.yaml").read_text())


def test_run_and_config_take_names(checkpoints, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    requests = []
    monkeypatch.setattr(recipe, "run_recipe", lambda path, *_, **restart: requests.append(path) or recipe.Finished())
    assert run_main(monkeypatch, capsys, "run", "testbed-mla")[0] == 0
    assert [path.resolve() for path in requests] == [ROOT / "recipes" / "testbed-mla.yaml"]
    code, _, err = run_main(monkeypatch, capsys, "run", "testbed-mlx")
    assert code == 1 and "did you mean testbed-mla?" in err

    code, _, err = run_main(monkeypatch, capsys, "convert", checkpoints("llama"), "--config", "mla-everywhere")
    assert code == 1 and "are not fewer than the source's" in err  # 512 + 64 are its numbers
    code, _, err = run_main(monkeypatch, capsys, "heads", checkpoints("llama"), "--config", "head")
    assert code == 1 and "head: no such file" in err and "did you mean heads?" in err


def test_without_links_they_lie_at_the_top_of_the_repository(tmp_path, monkeypatch):
    from surgery.common import shipped as module

    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "surgery" / "common" / "shipped.py"))
    assert find_shipped("mla", "configs") == tmp_path / "configs" / "mla.yaml"
