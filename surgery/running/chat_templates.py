"""Rendering of chat templates in a separate process with limits on time, memory and output."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.common.errors import SurgeryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 20
"""Time limit per conversation. Templates of published models take milliseconds."""
START_SECONDS = 300
"""Time limit for the process to start, on a slow or busy disk."""
MEMORY = 2**30
"""Bytes that the process may allocate after it has started."""
LONGEST = 2**26
"""Maximum characters of a rendered conversation."""


class ChatTemplate:
    """Chat template of a tokenizer. The process starts with the first conversation and ends with this object."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """Render one conversation as ``tokenizer.apply_chat_template(..., tokenize=False)`` does.

        Raises SurgeryError: there is no template, it rejects the conversation, or a limit is reached.
        """
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise SurgeryError(f"{self._name}: {' '.join(str(error).split())[:200]}") from None
        request = {
            **self._tokenizer.special_tokens_map,
            # Templates handle missing keys, but would print None.
            "conversations": [[{key: value for key, value in turn.items() if value is not None} for turn in messages]],
            "tools": tools,
            "chat_template": template,
            "add_generation_prompt": add_generation_prompt,
        }
        reply = self._answer(request)
        if "error" in reply:
            raise SurgeryError(f"{self._name} rejects the conversation: {reply['error']}")
        if "limit" in reply:
            limit = {
                "time": f"{SECONDS} s",
                "memory": f"{MEMORY / 2**30:g} GiB of memory",
                "output": f"{LONGEST:,} characters",
            }[reply["limit"]]
            raise SurgeryError(f"{self._name} exceeds the limit of {limit} for one conversation; use another template")
        return reply["text"]

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            content = pickle.dumps(request)
        except RecursionError:
            return {"error": "it is nested too deeply"}
        process = self._started()
        overdue = threading.Event()

        def stop() -> None:
            overdue.set()
            process.kill()

        timer = threading.Timer(SECONDS, stop)
        timer.start()
        try:
            process.stdin.write(content)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the process ended during the write
            line = b""
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return json.loads(line)
        self._stop()
        # Out of memory outside of Python kills the process.
        return {"limit": "time" if overdue.is_set() else "memory"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():  # after a fork, start another process
            command = [sys.executable, str(Path(__file__).with_name("chat_worker.py")), str(SECONDS), str(MEMORY)]
            # In a new session: Ctrl-C reaches only this process, which then ends the other.
            self._process = process = subprocess.Popen(
                [*command, str(LONGEST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            self._owner = os.getpid()
            weakref.finalize(self, _end, process, self._owner)
            timer = threading.Timer(START_SECONDS, process.kill)
            timer.start()
            greeting = process.stdout.readline()
            timer.cancel()
            if not greeting:
                self._stop()
                raise SurgeryError(f"{self._name}: its rendering process did not start; free some memory and try again")
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        _end(process, self._owner)


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # unflushed data
            pipe.close()
