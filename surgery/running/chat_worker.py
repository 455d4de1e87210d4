"""Script of the process that renders chat templates; it imports neither torch nor this package.

A template is a program of a stranger. Jinja's sandbox keeps it from files and from Python, not from taking time and
memory. :mod:`surgery.running.chat_templates` starts this script and stops it at the limits.
"""

import json
import pickle
import signal
import sys
from contextlib import suppress

sys.path.pop(0)  # this folder, whose modules have names that others have too

from transformers.utils.chat_template_utils import render_jinja_template


def limit_memory(spare: int) -> None:
    """Let this process grow by so many bytes, where the system has such a limit."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, hard))


def answer(request: dict, longest: int) -> dict:
    """Text of a conversation, or what stood in the way."""
    try:
        (text,), _ = render_jinja_template(**request)
        if len(text) > longest:
            return {"limit": "output"}
        return {"text": text}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(str(error).split())[:1000]}


def main() -> None:
    seconds, spare, longest = map(int, sys.argv[1:])
    limit_memory(spare)
    print("ready", flush=True)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if hasattr(signal, "alarm"):
            signal.alarm(seconds + 5)  # ends this process where the one that started it is gone
        reply = answer(request, longest)
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
