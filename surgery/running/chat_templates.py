"""Rendering of chat templates, with errors as one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False
) -> str:
    """Render one conversation with ``tokenizer.apply_chat_template``, in Jinja's sandbox.

    Raises SurgeryError: there is no template, or it rejects the conversation.
    """
    # Templates handle missing keys, but would print None.
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in messages]
    try:
        return tokenizer.apply_chat_template(turns, add_generation_prompt=add_generation_prompt, tokenize=False)
    except Exception as error:  # a template can raise anything
        name, reason = tokenizer.name_or_path or "the tokenizer", " ".join(str(error).split())[:1000]
        raise SurgeryError(f"the chat template of {name} rejects the conversation: {reason}") from None
