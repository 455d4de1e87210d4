"""Start of a training: alone, as several processes of this machine, or by an accelerate configuration.

Configurations that ship are called by their names: ``fsdp2`` is ``configs/accelerate/fsdp2.yaml``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from surgery.common.errors import SurgeryError
from surgery.common.file_settings import did_you_mean, read_mapping
from surgery.common.interruption import STARTED_BY

SHIPPED = Path(__file__).parent.parent / "configs" / "accelerate"
SHARDED = ("FSDP", "DEEPSPEED")


def find_launcher(name: str | Path) -> Path:
    """The file of a configuration: a path, or the name of one that ships.

    Raises:
        SurgeryError: there is neither, or it cannot be read.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        names = sorted(each.stem for each in SHIPPED.glob("*.yaml"))
        if str(name) not in names:
            hint = did_you_mean(str(name), names)
            raise SurgeryError(f"launcher {name}: is no file and none of {', '.join(names)}{hint}")
        path = SHIPPED / f"{name}.yaml"
    read_mapping(path)
    return path


def check_processes(processes: object) -> None:
    """Raises SurgeryError unless it is None or a number of processes."""
    whole = isinstance(processes, int) and not isinstance(processes, bool)
    if processes is not None and not (whole and processes >= 1):
        raise SurgeryError(f"processes must be a whole number of at least 1, not {processes!r}")


def count_processes(processes: int | None, launcher: Path | None) -> int:
    """Return the number of processes: the user's, else the configuration's, else one."""
    if processes is not None:
        return processes
    return 1 if launcher is None else int(read_mapping(launcher).get("num_processes") or 1)


def is_sharded(launcher: Path | None) -> bool:
    """Return whether a configuration has weights that train in parts on its processes."""
    return launcher is not None and read_mapping(launcher).get("distributed_type") in SHARDED


def launch_command(config: Path, processes: int | None, launcher: Path | None) -> list[str]:
    """The command that trains with the settings in ``config``; ``processes`` win over the launcher's own number."""
    module = ["-m", "surgery.training.heal", "--config", str(config)]
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    if launcher is not None:
        number = [] if processes is None else ["--num_processes", str(processes)]
        return [*launch, "--config_file", str(launcher), *number, *module]
    if processes in (None, 1):
        return [sys.executable, *module]
    many = ["--multi_gpu", "--num_processes", str(processes), "--num_machines", "1", "--mixed_precision", "no"]
    return [*launch, *many, "--dynamo_backend", "no", *module]


def run_to_its_end(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command and gives its exit code; where this process is interrupted, the command gets time to save.

    It has a process group of its own, launchers' children with it: all are asked to stop at once, whoever was
    interrupted, and a second interruption ends them. Where SIGKILL ends this process, they stop by themselves.
    """
    environment = environment | {STARTED_BY: str(os.getpid())}
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
    """An environment in which glibc keeps what was freed, in pages of megabytes; tunables that are there win.

    By default it hands every large tensor back to the kernel, which clears 4 KiB after 4 KiB for the next one:
    a quarter of the processor time of a training on the CPU.
    """
    values = {"hugetlb": 1, "mmap_max": 0, "trim_threshold": 2**40, "top_pad": 2**28}
    tunables = ":".join(f"glibc.malloc.{name}={value}" for name, value in values.items())
    return {"GLIBC_TUNABLES": tunables} | environment


def outside(environment: dict[str, str]) -> dict[str, str]:
    """An environment without what makes a process one of several, where this one is: a new training is not."""
    if "WORLD_SIZE" not in environment:
        return dict(environment)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    names += ("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    ours = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
    return {name: value for name, value in environment.items() if name not in names and not name.startswith(ours)}


def ended(code: int) -> str:
    """Describe in words how a process ended; an exit code below zero is the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}" + (", as systems do that run out of memory" if name == "SIGKILL" else "")
