"""Processes that begin where torch and transformers are imported: forks of one that imported them, and nothing else.

Importing them takes longer than what tests do with them. Where the start of a process is what is tested, start one.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO

import psutil

ROOT = Path(__file__).resolve().parents[2]

AT_ONCE = """
import sys
from surgery.checkpoint import snapshots
snapshots.INTERVAL = 0.0
from surgery.cli import main
sys.argv[0] = "surgery"
main()
"""
"""`surgery`, whose states are kept at once, not every 20 seconds."""

SERVER = """
import atexit, json, os, runpy, sys
import torch, torch._dynamo, safetensors.torch
import accelerate, matplotlib.figure, matplotlib.pyplot, transformers, typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

os.fsync = lambda file: None  # as in tests/conftest.py

def become(request):
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.dup2(os.open(request[name], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.stdin = open(0, closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = request["path"]
    sys.argv[:] = ["-c", *request["arguments"]]
    code = 1
    try:
        if "module" in request:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        try:
            ended, status = os.waitpid(request["wait"], os.WNOHANG if request["now"] else 0)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        except ChildProcessError:
            answer = "no such process"
    else:
        answer = os.fork()
        if not answer:
            become(request)
    print("answer: " + json.dumps(answer), flush=True)
"""


class Fork:
    """A process like one of `subprocess.Popen`: with exit code, standard output and standard error."""

    def __init__(
        self,
        *arguments,
        module: str | None = None,
        code: str | None = None,
        stdin: str = "",
        path: tuple[Path, ...] = (ROOT,),
        cwd: Path = ROOT,
        environment: dict[str, str] | None = None,
    ):
        """Runs `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS`; `path` is searched before what python brings."""
        self._folder = tempfile.TemporaryDirectory()
        self._files = {name: Path(self._folder.name) / name for name in ("stdin", "stdout", "stderr")}
        self._files["stdin"].write_text(stdin)
        what = {"module": module} if module else {"code": code}
        what |= {name: str(file) for name, file in self._files.items()}
        what |= {"arguments": list(map(str, arguments)), "path": list(map(str, path)), "cwd": str(cwd)}
        inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(what["path"])}
        environment = {**inherited, **(environment or {})}
        self.pid, self.returncode = _ask({**what, "environment": environment}), None

    def poll(self, now: bool = True) -> int | None:
        """The exit code of a process that has ended."""
        if self.returncode is None:
            self.returncode = _ask({"wait": self.pid, "now": now})
        return self.returncode

    def wait(self) -> int:
        return self.poll(now=False)

    @property
    def stdout(self) -> str:
        return self._files["stdout"].read_text() if self._files["stdout"].exists() else ""

    @property
    def stderr(self) -> str:
        return self._files["stderr"].read_text() if self._files["stderr"].exists() else ""


def two_forks(*arguments, module: str = "surgery") -> list[Fork]:
    """`surgery ARGUMENTS`, or another module, in two processes told what launchers tell; both have to end well."""
    forks = started_forks(*arguments, module=module)
    for fork in forks:
        assert fork.wait() == 0, fork.stderr[-3000:]
    return forks


def started_forks(*arguments, **what: str) -> list[Fork]:
    """Start the same two, neither of which has to end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    world |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [Fork(*arguments, **what, environment={**world, **rank}) for rank in ranks]


def torchrun(*arguments) -> subprocess.CompletedProcess:
    """A script, or `-m MODULE`, with its arguments in two processes that PyTorch's launcher starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join(map(str, (ROOT, Path(__file__).parent)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=300)


def kill_and_leave(process: subprocess.Popen) -> None:
    """Ends a process by SIGKILL and does not ask for its exit code: it stays a zombie, as some containers have them."""
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def _ask(request: dict) -> int | None:
    server, errors = _server()
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = next((line for line in server.stdout if line.startswith("answer: ")), None)
    if answer is None:
        errors.seek(0)
        raise AssertionError(f"the server ended: {errors.read()[-2000:]}")
    return json.loads(answer.removeprefix("answer: "))


@cache
def _server() -> tuple[subprocess.Popen, IO[str]]:
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process, which ends with this one
    # What these name is read when packages are imported.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": tempfile.mkdtemp()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
    command = [sys.executable, "-I", "-c", SERVER]
    return subprocess.Popen(command, text=True, cwd=tempfile.gettempdir(), env=environment, **pipes), errors
