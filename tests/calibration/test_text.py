import json
import sys
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surgery.calibration import text as text_module
from surgery.calibration.text import iter_documents
from surgery.common.errors import SurgeryError

DOCUMENTS = ["first\ndocument\n", "zweites: äöü", "third"]


def write_json_lines(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return str(path)


def load_text(source, documents=None, **settings):
    return list(islice(iter_documents(source, **settings), documents))


def test_builtin_is_the_same_for_a_seed_and_another_for_another():
    first, again, other = (load_text("builtin", documents=5, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    assert all(len(document) > 200 for document in first)


def test_builtin_leaves_out_tests_packages_and_the_held_out_modules(tmp_path, monkeypatch):
    entries = ["asyncio/events.py", "json/decoder.py", "wave.py"]
    left_out = ["selectors.py", "encodings/cp1250.py", "test/test_os.py", "json/tests/test_x.py"]
    left_out += ["site-packages/torch/x.py", "idlelib/run.py", "lib2to3/main.py", "notes.txt"]
    for name in entries + left_out:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 100)
    (tmp_path / "small.py").write_text("x = 1\n")
    (tmp_path / "large.py").write_text("x = 1\n" * 50_000)
    (tmp_path / "latin.py").write_bytes(b"# \xe4\n" * 300)
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert sorted(document.split("\n")[0] for document in iter_documents("builtin")) == [
        f"# {name}" for name in entries
    ]


def test_text_files_are_cut_at_line_ends_if_there_are_any_and_lose_nothing(tmp_path):
    path = tmp_path / "book.txt"
    book = "".join(f"line {number} of a long book, ä\n" for number in range(5000))
    path.write_text(book, encoding="utf-8")
    pieces = load_text(str(path))
    assert "".join(pieces) == book and len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces)
    assert all(len(piece) < text_module.TEXT_PIECE + 100 for piece in pieces)
    path.write_text("x" * 100_000)
    assert [len(piece) for piece in iter_documents(str(path))] == [32_768] * 3 + [100_000 - 3 * 32_768]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([{"text": document} for document in DOCUMENTS], DOCUMENTS),
        ([{"text": text} for text in ("", None, " \n", "x")], ["x"]),  # empty documents are left out
        ([DOCUMENTS[0], {"text": DOCUMENTS[1]}], DOCUMENTS[:2]),  # in a list
    ],
)
def test_json(tmp_path, items, expected):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(items), encoding="utf-8")
    assert load_text(str(path)) == expected
    if all(isinstance(item, dict) for item in items):
        assert load_text(write_json_lines(tmp_path / "a.jsonl", items)) == expected


def test_another_text_field(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", [{"body": document, "id": 1} for document in DOCUMENTS])
    assert load_text(path, text_field="body") == DOCUMENTS
    with pytest.raises(SurgeryError, match=r"a\.jsonl, line 1 has no field 'text', only body, id"):
        load_text(path)


def test_parquet_over_several_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    documents = [f"document {number}" for number in range(1000)]
    pq.write_table(pa.table({"id": range(1000), "text": documents}), path, row_group_size=100)
    assert load_text(str(path)) == documents
    with pytest.raises(SurgeryError, match="no column 'body', only id, text"):
        load_text(str(path), text_field="body")
    with pytest.raises(SurgeryError, match="field 'id' is a int, not text"):
        load_text(str(path), text_field="id")


def test_files_are_read_lazily(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nnot json\n')
    assert list(islice(iter_documents(str(path)), 1)) == ["good"]
    with pytest.raises(SurgeryError, match="line 2 is not valid JSON"):
        load_text(str(path))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"abc \xff\xfe", "is not UTF-8 text: invalid start byte at byte 4"),
        ("a.jsonl", b'"only a string"\n', "line 1 has no field 'text', but is a str"),
        ("a.jsonl", b'{"text": 3}\n', "field 'text' is a int, not text"),
        ("a.json", b'{"text": "x"}', "holds a dict, not a list"),
        ("a.json", b"[", "is not valid JSON"),
        ("a.json", b"[" * 100_000, "is not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not valid JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "half of one: \\ud83d"}\n', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"text": "\xed\xa0\xbd"}\n', "line 1 is not valid JSON"),
        ("a.parquet", b"nothing of the kind", "is not a parquet file"),
        ("a.csv", b"text\n", r"a\.csv: unknown file type; choose one of \.txt, \.jsonl, \.json, \.parquet"),
    ],
)
def test_unreadable_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SurgeryError, match=message):
        load_text(str(tmp_path / name))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", "'missing.txt': no such file, and not a valid dataset name"),
        ("pros", "'pros': no such file; did you mean prose"),
        ("/no/such/place", "no such file, and not a valid dataset name"),
        ("a:b:c:d", "no such file, and not a valid dataset name"),
        ("", "no text source; pass a file"),
    ],
)
def test_unknown_sources_are_refused_at_once_and_never_looked_up(source, message, monkeypatch):
    monkeypatch.setattr(text_module, "open_dataset", None)
    with pytest.raises(SurgeryError, match=message):
        iter_documents(source)


def test_folders_and_a_missing_standard_library_are_reported(tmp_path, monkeypatch):
    with pytest.raises(SurgeryError, match="is a folder; pass a file in it"):
        iter_documents(str(tmp_path))
    monkeypatch.setattr(text_module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(SurgeryError, match="no source of the standard library at"):
        load_text("builtin")


class FakeDatasets:
    """Stands for the library, and remembers how it was called."""

    def __init__(self, rows):
        self.rows, self.calls = rows, []

    def load_dataset(self, *args, **options):
        self.calls.append((args, options))
        if isinstance(self.rows, Exception):
            raise self.rows
        return iter(self.rows)


@pytest.mark.parametrize(
    ("source", "name", "config", "split"),
    [
        ("wikitext", "wikitext", None, "train"),
        ("org/name.v1:some-config:test", "org/name.v1", "some-config", "test"),
        ("org/name:config", "org/name", "config", "train"),
        ("org/name::validation", "org/name", None, "validation"),
    ],
)
def test_datasets_are_streamed_and_announced(source, name, config, split, monkeypatch, capsys):
    fake = FakeDatasets([{"text": document} for document in DOCUMENTS])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert load_text(source) == DOCUMENTS
    assert fake.calls == [((name, config), {"split": split, "streaming": True})]
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert name in err and split in err and "Hugging Face Hub" in err


def test_a_dataset_without_the_text_field(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets([{"content": "x"}]))
    with pytest.raises(SurgeryError, match=r"dataset some/name, row 0 has no field 'text', only content"):
        load_text("some/name")
    assert load_text("some/name", text_field="content") == ["x"]


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (FakeDatasets(ConnectionError("Couldn't reach the Hub\nmore lines")), "can be loaded: Couldn't reach the Hub$"),
        (None, "; to use a dataset of that name: pip install datasets"),
    ],
)
def test_a_dataset_that_cannot_be_reached(monkeypatch, library, message):
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(SurgeryError, match=f"some/name: no such file.*{message}"):
        load_text("some/name")


def test_a_real_local_dataset(tmp_path, monkeypatch, capsys):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    write_json_lines(folder / "train.jsonl", [{"text": document} for document in DOCUMENTS])
    write_json_lines(folder / "test.jsonl", [{"text": "a test"}])
    assert load_text(f"{folder}::train") == DOCUMENTS
    assert load_text(f"{folder}::test") == ["a test"]
    assert "from the local folder" in capsys.readouterr().err
    with pytest.raises(SurgeryError, match="no dataset can be loaded"):
        load_text(f"{folder}::nothing")
