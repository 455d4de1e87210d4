"""One process for all chat templates of a test file; that each has limits of its own, tests/hostile shows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import PreTrainedTokenizerBase

from surgery.running.chat_templates import ChatTemplate


@contextmanager
def one_chat_process(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Render every template in one process: it starts transformers, which takes longer than any test of templates."""
    shared, start = ChatTemplate(tokenizer), ChatTemplate._started
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChatTemplate, "_started", lambda self: start(shared))
        yield
