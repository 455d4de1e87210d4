"""``python -m surgery.running.worker FD``: calls the function that comes through standard input, for another process.

That one starts it (:mod:`surgery.running.workers`) and tells what went wrong: here nothing is printed but tracebacks.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time

from surgery import own_program
from surgery.common.errors import ProcessLost, SurgeryError
from surgery.common.interruption import interruptible
from surgery.common.machine_faults import told
from surgery.running.workers import LOST, READY


def main() -> None:
    """Exit code 1 where the function fails, with a line through the pipe."""
    own_program.begin()
    pipe, parent = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with interruptible():
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
            import accelerate  # noqa: F401 - takes its time, in which the other would wait for this one

            os.write(pipe, READY)
            function(**arguments)
        except KeyboardInterrupt:
            sys.exit(1)
        except ProcessLost:
            sys.exit(LOST)
        except Exception as error:
            line = str(error) if isinstance(error, SurgeryError) else told(error)
            if line is None:
                raise
            os.write(pipe, line.encode())
            sys.exit(1)


def _end_with(parent: int) -> None:
    """Ends this process once the one that started it is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(LOST)


if __name__ == "__main__":
    main()
