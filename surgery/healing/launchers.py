"""Launch of a training: one process, several processes on this machine, or an accelerate config.

Shipped configs have names: ``fsdp2`` is ``configs/accelerate/fsdp2.yaml``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean, read_mapping
from surgery.common.removed import removal

SHIPPED = Path(__file__).parent.parent / "configs" / "accelerate"


def find_launcher(name: str | Path) -> Path:
    """Resolve an accelerate config: a path, or the name of a shipped one.

    Raises SurgeryError: there is no such file or name, or the file cannot be read.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        names = sorted(each.stem for each in SHIPPED.glob("*.yaml"))
        if notice := removal(f"launcher {name}"):
            raise SurgeryError(f"launcher {name} {notice}")
        if str(name) not in names:
            hint = did_you_mean(str(name), names)
            raise SurgeryError(f"unknown launcher {name}: use a file or one of {', '.join(names)}{hint}")
        path = SHIPPED / f"{name}.yaml"
    if read_mapping(path).get("distributed_type") == "DEEPSPEED":
        raise SurgeryError(f"{path}: DeepSpeed {removal('launcher zero3')}")
    return path


def check_processes(processes: object) -> None:
    """Raise SurgeryError if the number of processes is neither None nor a positive integer."""
    whole = isinstance(processes, int) and not isinstance(processes, bool)
    if processes is not None and not (whole and processes >= 1):
        raise SurgeryError(f"processes must be a whole number of at least 1, not {processes!r}")


def count_processes(processes: int | None, launcher: Path | None) -> int:
    """Return the number of processes: the user's, else the accelerate config's, else 1."""
    if processes is not None:
        return processes
    return 1 if launcher is None else int(read_mapping(launcher).get("num_processes") or 1)


def is_sharded(launcher: Path | None) -> bool:
    """Return whether an accelerate config shards the trainable weights over processes."""
    return launcher is not None and read_mapping(launcher).get("distributed_type") == "FSDP"


def launch_command(config: Path, processes: int | None, launcher: Path | None) -> list[str]:
    """Build the training command for the settings file ``config``; ``processes`` overrides the launcher's number."""
    module = ["-m", "surgery.training.heal", "--config", str(config)]
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    if launcher is not None:
        number = [] if processes is None else ["--num_processes", str(processes)]
        return [*launch, "--config_file", str(launcher), *number, *module]
    if processes in (None, 1):
        return [sys.executable, *module]
    many = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    return [*launch, *many, "--dynamo_backend", "no", *module]


def run_interruptible(command: list[str], environment: dict[str, str]) -> int:
    """Run a command and return its exit code; on an interruption the command gets time to save.

    The command and its children have their own process group. An interruption sends SIGTERM to the group, a second one
    SIGKILL.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        raise


def keeps_freed_memory(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which glibc keeps freed memory, in huge pages; existing GLIBC_TUNABLES take precedence.

    By default glibc returns every large tensor to the kernel, which zeroes 4 KiB pages for the next one: a quarter of
    the CPU time of a training on the CPU.
    """
    values = {"hugetlb": 1, "mmap_max": 0, "trim_threshold": 2**40, "top_pad": 2**28}
    tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in values.items())
    return {"GLIBC_TUNABLES": tunables} | environment


def outside(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a distributed launcher, for a separate training."""
    if "WORLD_SIZE" not in environment:
        return dict(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    names += ("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ours = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
    return {name: value for name, value in environment.items() if name not in names and not name.startswith(ours)}


def ended(code: int) -> str:
    """Describe the end of a process; a negative exit code is minus the signal that killed it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (", probably because memory ran out" if name == "SIGKILL" else "")
