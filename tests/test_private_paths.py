"""Folders are taken out of paths, and nothing else out of texts."""

import json

import pytest
from hostile import JUNK, cases
from hypothesis import given
from hypothesis import strategies as st

from surgery.common.private_paths import command_without_folders, settings_without_folders, without_folders

PREFIXES = ("/home/me/", "/home/my name/deep/", "~/", "~me/x/")
PREFIXES += ("C:\\Users\\me\\", "D:/data/", "\\\\server\\x\\", "file:///a/")
NAMES = ("text.jsonl", "base-7B", "My Model", "x")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", NAMES)
def test_paths_become_names(prefix, name):
    assert without_folders({"a": [prefix + name]}) == {"a": [name]}
    assert settings_without_folders({"a": prefix + name}) == {"a": name}
    assert without_folders({"calibration": prefix + name}) == {"calibration": name}
    assert without_folders(f"from '{prefix}{name}' to") == f"from '{name}' to"


@pytest.mark.parametrize("path", ["../x/a.txt", "./a.txt", "/a.txt", "data/a.txt", "a/b/c/a.txt", "data\\a.txt"])
def test_relative_paths_of_fields_and_commands_become_names(path):
    assert without_folders({"data": [path]}) == {"data": ["a.txt"]}
    assert command_without_folders(f"surgery eval '{path}' --data='{path}'") == "surgery eval a.txt --data=a.txt"


def test_shares_of_texts_and_folders_of_here_become_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert without_folders({"calibration": "prose=0.5,/home/me/x.txt=0.5"}) == {"calibration": "prose=0.5,x.txt=0.5"}
    assert without_folders({"command": "surgery convert models/mine"}) == {"command": "surgery convert mine"}


@pytest.mark.parametrize(
    "text",
    [
        *("org/name", "https://huggingface.co/org/name/resolve/main/x", "nats / token", "q/k/v", "</s>", "/think", "/"),
        *("1/2 of it", "and/or", "a \\ b", "s3://bucket/key", "prose=0.5,code=0.5", "surgery.convert(to='mla')", "~"),
    ],
)
def test_other_texts_stay(text):
    assert without_folders({"a": text}) == settings_without_folders({"a": text}) == {"a": text}
    if text not in ("/think", "/", "q/k/v"):
        assert without_folders({"data": text}) == {"data": text}


def test_templates_that_name_paths_stay():
    template = "{% if x %}the files are in /mnt/data/x{% endif %}"
    assert settings_without_folders({"chat_template": template}) == {"chat_template": template}


@given(JUNK, st.sampled_from(PREFIXES), st.sampled_from(NAMES))
@cases(40)
def test_whatever_json_holds(value, prefix, name):
    cleaned = without_folders({"junk": value, "paths": [{"x": prefix + name}], "command": prefix + name})
    assert cleaned["paths"] == [{"x": name}]
    assert prefix not in json.dumps(cleaned["paths"]) and prefix not in cleaned["command"]
