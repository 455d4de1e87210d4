"""Worker script that renders chat templates; imports neither torch nor this package.

A template is untrusted code. Jinja's sandbox protects files and Python, but not time and memory:
:mod:`surgery.running.chat_templates` starts this script and kills it at the limits.
"""

import json
import pickle
import signal
import sys
from contextlib import suppress

sys.path.pop(0)  # this folder's modules would shadow others of the same name

from transformers.utils.chat_template_utils import render_jinja_template


def limit_memory(spare: int) -> None:
    """Limit the growth of this process's address space to a number of bytes, if the system supports it."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, hard))


def answer(request: dict, longest: int) -> dict:
    """Render a conversation; return its text, the reached limit or the error."""
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
            signal.alarm(seconds + 5)  # ends this process if its parent has died
        reply = answer(request, longest)
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
