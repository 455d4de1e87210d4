"""Chat templates are programs of strangers: they run in a process of their own, with limits, and render as before."""

import gc
import time

import psutil
import pytest
from hostile import cases
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import DEMO
from transformers import AutoTokenizer

from surgery.common.errors import SurgeryError
from surgery.running import chat_templates
from surgery.running.chat_templates import ChatTemplate

ROLES = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{{ eos_token }}\n{% endfor %}"
PROMPT = ROLES + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PROMPT
MARKED = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
TURNS = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(("system", "user", "assistant")), "content": st.text(max_size=30)},
        optional={"name": st.none() | st.text(max_size=5)},
    ),
    min_size=1,
    max_size=5,
)
HOSTILE = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{{ 'x' * 20000000000 }}",
    "output": "{{ 'x' * 70000000 }}",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module", params=[PROMPT, TOOLS, MARKED], ids=["prompt", "tools", "marked"])
def template(request, tokenizer):
    tokenizer.chat_template = request.param
    return tokenizer, ChatTemplate(tokenizer)


@given(TURNS)
@cases(20)
def test_texts_are_those_of_transformers(template, turns):
    tokenizer, chat_template = template
    tools = [{"name": "f", "parameters": {"x": None}}]
    theirs = tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    assert chat_template.render(turns, tools=tools) == theirs
    prompt = chat_template.render(turns, add_generation_prompt=True)
    assert prompt == tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("limit", HOSTILE)
def test_limits(limit, tokenizer, monkeypatch):
    """No conversation takes the machine; afterwards the next one has a process again."""
    monkeypatch.setattr(chat_templates, "SECONDS", 2)
    tokenizer.chat_template = HOSTILE[limit]
    template, began = ChatTemplate(tokenizer), time.monotonic()
    for _ in range(2):
        with pytest.raises(SurgeryError, match=r"the chat template of .* exceeds the limit of [\d,]+ "):
            template.render([{"role": "user", "content": "x"}])
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["{% for %}", "{{ messages[99].content.x }}", "{{ raise_exception('no') }}"])
def test_templates_that_fail(text, tokenizer):
    tokenizer.chat_template = text
    with pytest.raises(SurgeryError, match=r"the chat template of .* rejects the conversation"):
        ChatTemplate(tokenizer).render([{"role": "user", "content": "x"}])


def test_conversations_nested_too_deeply(tokenizer):
    tokenizer.chat_template, content = PROMPT, []
    for _ in range(100_000):
        content = [content]
    with pytest.raises(SurgeryError, match="nested too deeply"):
        ChatTemplate(tokenizer).render([{"role": "user", "content": content}])


def test_the_process_ends_with_the_template(tokenizer):
    before = set(psutil.Process().children())
    tokenizer.chat_template = PROMPT
    template = ChatTemplate(tokenizer)
    template.render([{"role": "user", "content": "x"}])
    assert len(set(psutil.Process().children()) - before) == 1
    del template
    gc.collect()
    assert not set(psutil.Process().children()) - before
