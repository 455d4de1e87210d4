import copy
import json
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import DEMO
from training_data import opened_data
from transformers import AutoTokenizer

from surgery.common.errors import SurgeryError
from surgery.training.data import IGNORED
from surgery.training.sources import ChatEncoder, holds_conversations, read_records

PLAIN = """{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}
{% if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"""
MARKED = """{{ bos_token }}{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}\
{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% endfor %}"""
TURNS = [
    {"role": "user", "content": "how many lines?"},
    {"role": "assistant", "content": "seven"},
    {"role": "user", "content": "and words?"},
    {"role": "assistant", "content": "none at all"},
]


@cache
def demo_tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def tokenizer_with(template):
    tokenizer = copy.copy(demo_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_conversations_and_tools_are_rendered_by_the_template():
    tokenizer = tokenizer_with(MARKED)
    tokens = ChatEncoder(tokenizer)({"messages": TURNS}, "here")
    assert tokens == tokenizer.apply_chat_template(TURNS, tokenize=True, return_dict=True)["input_ids"]
    assert ChatEncoder(tokenizer)({"messages": []}, "here") == []
    encode = ChatEncoder(tokenizer_with("{% for t in tools %}{{ t.name }}{% endfor %}"))
    tokens = encode({"messages": TURNS, "tools": [{"name": "calculator"}]}, "here")
    assert demo_tokenizer().decode(tokens) == "calculator"


@pytest.mark.parametrize("record", [{}, {"messages": "hello"}, {"messages": ["hello"]}, {"messages": [{"text": "x"}]}])
def test_what_is_no_conversation_is_named(record):
    with pytest.raises(SurgeryError, match="line 4: 'messages' is not a list of turns"):
        ChatEncoder(tokenizer_with(PLAIN))(record, "line 4")


@pytest.mark.parametrize("template", [PLAIN, "{% for %}", "{{ messages[99].content.x }}", "{{ ().__class__.x }}"])
def test_templates_that_refuse(template):
    with pytest.raises(SurgeryError, match=r"line 4: the chat template .* rejects the conversation: .+"):
        ChatEncoder(tokenizer_with(template))({"messages": [{"role": "refused", "content": "x"}]}, "line 4")


def test_no_template():
    with pytest.raises(SurgeryError, match="no chat template"):
        ChatEncoder(tokenizer_with(None))


def test_files_of_conversations_are_told_from_text(tmp_path):
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": TURNS}])
    text = write_lines(tmp_path / "text.jsonl", [{"text": "x"}])
    pq.write_table(pa.table({"messages": [TURNS]}), tmp_path / "chats.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "text.parquet")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert holds_conversations(chats) and holds_conversations(tmp_path / "chats.parquet")
    for name in ("text.jsonl", "text.parquet", "empty.jsonl", "broken.parquet"):
        assert not holds_conversations(tmp_path / name)
    assert not holds_conversations(text)
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    assert not holds_conversations(tmp_path / "deep.jsonl")


def test_parquet_turns_lose_the_keys_of_others(tmp_path):
    called = [{"role": "assistant", "calls": ["f"]}, {"role": "user", "content": "x"}]
    pq.write_table(pa.table({"messages": [called]}), tmp_path / "chats.parquet")
    ((record, where),) = read_records(tmp_path / "chats.parquet")
    assert record == {"messages": called} and where.endswith("chats.parquet, row 0")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"messages": []}\n{bad', "line 2 is not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1 holds a list"),
        ("a.jsonl", "[" * 100_000, "line 1 is not valid JSON"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "\\ud83d"}]}', "line 1 is not valid JSON"),
        ("a.txt", "x", "in this file type are not supported"),
        ("a.parquet", "x", "not a parquet file"),
        ("none.jsonl", None, "No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SurgeryError, match=message):
        list(read_records(tmp_path / name))


def test_conversations_are_packed_without_planted_facts(tmp_path):
    tokenizer = tokenizer_with(MARKED)
    turns = [[{**turn, "content": f"{turn['content']} {n}"} for turn in TURNS] for n in range(30)]
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in turns])
    healing = opened_data(str(path), tokenizer, tmp_path / "out", 128, held_out=1, recall=1.0)
    rows = [healing.sequences.sequence(number) for number in range(healing.describe()["rows"])]
    text = "".join(tokenizer.decode(row.tokens[1:]) for row in rows)
    assert "[user] how many lines?" in text and "[assistant] seven" in text and "Recall" not in text
    for row in rows:  # all but the first token of each conversation is predicted
        firsts = [(row.documents == document).nonzero()[0].item() for document in range(row.documents.max() + 1)]
        assert (row.labels == IGNORED).nonzero()[:, 0].tolist() == firsts
    assert healing.describe()["recall"] == 0


def test_another_template_is_tokenized_anew(tmp_path):
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": TURNS}] * 20)
    hashes = {
        opened_data(str(path), tokenizer_with(t), tmp_path / "out", 64, held_out=0).data_sha256 for t in (MARKED, PLAIN)
    }
    assert len(hashes) == len(list((tmp_path / "out").iterdir())) == 2


def test_datasets_of_conversations(tmp_path):
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl", [{"messages": TURNS}] * 20)
    source = {"source": f"{tmp_path / 'set'}::train", "format": "chat"}
    data = opened_data([source], tokenizer_with(MARKED), tmp_path / "out", 64, held_out=1)
    row = data.sequences.sequence(0)
    assert "seven" in tokenizer_with(None).decode(row.tokens)
