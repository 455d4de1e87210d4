import copy
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.calibration import installed, mixture
from surgery.calibration.conversations import HELD_OUT_PROMPTS, PROMPTS, sample_conversations
from surgery.calibration.installed import installed_code, installed_docstrings, installed_prose
from surgery.calibration.mixture import DEFAULT, build_mixture, shares_of, without_chat
from surgery.calibration.prose import builtin_prose, paragraphs
from surgery.calibration.sequences import SequenceRequest
from surgery.common.errors import SurgeryError

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            initializer_range=0.3, max_position_embeddings=512, bos_token_id=1, eos_token_id=0,
        )
    )  # fmt: skip


def tokenizer_of(size, template=None):
    class Tokenizer(SimpleNamespace):
        def __len__(self):
            return size

    return Tokenizer(chat_template=template)


def few(monkeypatch, documents=(), unseen=()):
    """Stands few documents in for those of the library and of what is installed."""
    texts = (lambda seed: iter(documents), lambda seed: iter(unseen), mixture.in_prose)
    monkeypatch.setitem(mixture.TEXTS, "prose", texts)


def words(first, count=4000):
    return " ".join(chr(first + index % 20) for index in range(count))


def test_what_a_setting_says():
    assert shares_of("builtin", tokenizer_of(4096, TEMPLATE)) is None  # the demo model keeps its text
    assert shares_of("builtin", tokenizer_of(49_152, TEMPLATE)) == DEFAULT
    assert shares_of("builtin", tokenizer_of(49_152)) == {"prose": 0.7, "code": 0.3}
    assert shares_of("prose", tokenizer_of(4096)) == {"prose": 1.0}
    assert shares_of("prose=3, notes.txt=1", tokenizer_of(4096)) == {"prose": 0.75, "notes.txt": 0.25}
    assert shares_of("prose=1,chat=0", tokenizer_of(4096)) == {"prose": 1.0}
    assert shares_of("some/file.txt", tokenizer_of(49_152)) is None and shares_of("self", tokenizer_of(49_152)) is None
    with pytest.raises(SurgeryError, match="no chat template"):
        shares_of("prose=0.5,chat=0.5", tokenizer_of(49_152))
    with pytest.raises(SurgeryError, match="at least one must be above 0"):
        shares_of("prose=0", tokenizer_of(4096))
    assert without_chat({"code": 0.5, "chat": 0.5}) == {"code": 0.5, "prose": 0.5}


def test_kinds_take_turns_and_the_hash_is_that_of_the_tokens(tokenizer, monkeypatch):
    few(monkeypatch, [words(0x100)], [("told 1.0", words(0x200)), ("told 2.0", words(0x200))])
    spoken = {False: [[7] * 300], True: [[8] * 300]}
    request = SequenceRequest(640, 64, recall=0.0, held_out=4)
    shares = {"prose": 0.5, "code": 0.3, "chat": 0.2}
    built, again = (build_mixture(tokenizer, shares, lambda unseen, _: spoken[unseen], request) for _ in range(2))
    assert torch.equal(built.tokens, again.tokens) and built.description == again.description
    assert built.tokens.shape == (10, 64) and built.held_out.shape == (4, 64)
    order = built.description["order"]
    assert [order["calibration"].count(kind) for kind in shares] == [5, 3, 2]
    assert set(order["calibration"][:4]) == set(shares)
    for kind, mark in (("prose", "\u0100"), ("chat", None)):
        rows = [row for row, other in zip(built.tokens, order["calibration"], strict=True) if other == kind]
        assert all((mark in tokenizer.decode(row)) if mark else (row[1:] == 7).all() for row in rows)
    unseen = dict(zip(order["held_out"], built.held_out, strict=True))
    assert "\u0200" in tokenizer.decode(unseen["prose"]) and (unseen["chat"][1:] == 8).all()
    assert built.description["parts"]["prose"]["held_out_source"] == ["told 1.0"]  # no more was needed
    json.dumps(built.description)


def test_prose_has_its_facts_in_sentences(tokenizer, monkeypatch):
    few(monkeypatch, [words(0x100, 40_000)], [("told", words(0x200, 40_000))])
    built = build_mixture(tokenizer, {"prose": 1.0}, None, SequenceRequest(2048, 512, recall=0.5, held_out=1))
    texts = [tokenizer.decode(row) for row in built.tokens]
    planted = [sum(text.count(word) for word in ("access code", "dollars", "number")) for text in texts]
    assert [count > 0 for count in planted] == [False, True, False, True]
    assert not any("Recall:" in text for text in texts)


def test_little_text(tokenizer, monkeypatch):
    """Other documents of the same text are held out, if there are any."""
    few(monkeypatch, [words(0x100), words(0x200)] * 20)
    built = build_mixture(tokenizer, {"prose": 1.0}, None, SequenceRequest(128, 64, recall=0.0, held_out=2))
    assert built.description["parts"]["prose"]["held_out_source"] == "the same text, other documents"
    assert len(built.held_out) == 2
    few(monkeypatch, ["a few words"])
    with pytest.raises(SurgeryError, match="not enough prose text for 2 sequences of 64 tokens"):
        build_mixture(tokenizer, {"prose": 1.0}, None, SequenceRequest(128, 64, held_out=1))


def test_running_text_is_told_from_markup():
    entries = "This library reads files of every kind and says in one line what is wrong with them."
    item = "Added a way to read files that are larger than the memory of the machine at hand."
    text = f"""# Title

[![badge](https://a.b/c.svg)](https://a.b)

This library reads files of [every kind](https://a.b) and
says in one line what is wrong with them.

```python
this = "is code that is long enough to look like a sentence of prose, were it not for its fence."
```

- {item}
- short

| a | table of many words that would otherwise be long enough to be kept as a paragraph |

    indented code that is long enough to look like a sentence, and is left out all the same.
"""
    assert paragraphs(text) == [entries, item]


def test_the_library_has_prose_in_an_order_of_the_seed():
    first, again, other = (next(builtin_prose(seed)) for seed in (0, 0, 1))
    assert first == again != other and len(first) >= 400


def test_what_is_installed_is_read_recent_first_and_once(monkeypatch):
    def told(name, version, body):
        metadata = {"Name": name, "Metadata-Version": version, "Description": body}
        return SimpleNamespace(
            metadata=type("Metadata", (dict,), {"get_payload": lambda self: self["Description"]})(metadata), version="1"
        )

    lines = [f"Sentence number {word} says something that nobody else says, at a length that is enough." for word in
             ("one", "two", "three", "four", "five", "six", "seven")]  # fmt: skip
    old, new = "\n\n".join(lines[:6]), "\n\n".join(lines[1:])
    dated = told("dated", "2.1", f"{old}\n\n2026")
    results = [told("old", "2.1", old), told("new", "2.4", new), dated, told("no", "2.4", "")]
    monkeypatch.setattr(installed.metadata, "distributions", lambda: results)
    names = [name for name, _ in installed_prose(0)]
    assert names[0] in ("new 1", "dated 1") and "no 1" not in names
    every = [line for _, text in installed_prose(0) for line in text.split("\n\n")]
    assert len(every) == len(set(every))


def test_docstrings_of_what_is_installed(tmp_path, monkeypatch):
    sentence = "Sentence number {} says something that nobody else says, at a length that is certainly enough."
    messages = [sentence.format(number) for number in range(60)]
    for package, lines in (("first", messages[:20]), ("torch", messages[20:40]), ("second", messages[:40])):
        folder = tmp_path / package
        (folder / "tests").mkdir(parents=True)
        for file in ("__init__.py", "tests/test_it.py"):
            (folder / file).write_text('"""' + "\n\n".join(lines) + '\n"""\n' + "value = 1\n" * 80)
    description = SimpleNamespace(metadata=SimpleNamespace(get_payload=lambda: "\n\n".join(messages[30:35])))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed.metadata, "distributions", lambda: [description])
    monkeypatch.setattr(
        installed.metadata, "packages_distributions", lambda: dict.fromkeys(["first", "second", "torch"])
    )
    every = [line for document in installed_docstrings(0) for line in document.split("\n\n")]
    assert sorted(every) == sorted(
        [*messages[:30], *messages[35:40]]
    )  # once, without tests, torch and what is described
    assert list(installed_docstrings(0)) == list(installed_docstrings(0))


def test_installed_code_is_that_of_its_packages():
    name, text = next(installed_code(0))
    assert name.split()[0] in ("torch", "transformers") and ("import" in text or "def " in text)


def test_conversations_are_in_the_template_and_long_enough(model, tokenizer):
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    steps = []
    result = sample_conversations(model, tokenizer, 400, PROMPTS[:3], seed=1, advance=steps.append)
    assert sum(map(len, result)) >= 400
    assert sum(steps) == 400 and len(steps) > 10 and min(steps) > 0
    for conversation in result:
        text = tokenizer.decode(conversation)
        assert any(text.startswith(f"[user] {prompt}\n[assistant]") for prompt in PROMPTS[:3])
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(SurgeryError, match="rejects the conversation"):
        sample_conversations(model, tokenizer, 10)


def test_held_out_prompts_are_others():
    assert not set(PROMPTS) & set(HELD_OUT_PROMPTS) and len(set(PROMPTS)) == 40
