"""Launch variables that are missing or wrong, by which processes should know of each other."""

import socket
import time

import pytest
from command_line import run_main

from surgery.common.errors import SurgeryError
from surgery.running import processes
from surgery.running.processes import Processes, check_launch

WORLD = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


@pytest.fixture
def world(monkeypatch):
    def change(**changes):
        for name, value in {**WORLD, **changes}.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    monkeypatch.setattr(processes, "JOINING", 0.5)
    return change


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_is_missing(world, name):
    world(**{name: None})
    with pytest.raises(SurgeryError, match=rf"WORLD_SIZE=2 .*{name} is not set"):
        Processes(cpu=True)


@pytest.mark.parametrize(("name", "value"), [("WORLD_SIZE", "two"), ("MASTER_PORT", "x"), ("MASTER_PORT", "99999")])
def test_a_variable_is_no_number(world, name, value):
    world(**{name: value})
    with pytest.raises(SurgeryError, match=f"{name}={value}"):
        Processes(cpu=True)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("error", [TimeoutError("timed out"), socket.gaierror(-2, "unknown"), OSError(113, "no route")])
def test_an_address_that_nobody_has(world, monkeypatch, rank, error):
    """It waited for weeks, the time for which processes may measure alone."""

    def connect(address, timeout):
        assert address == ("192.0.2.1", 29511) and timeout <= 0.5
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    world(RANK=rank, MASTER_ADDR="192.0.2.1")
    began = time.monotonic()
    with pytest.raises(SurgeryError, match=r"MASTER_ADDR=192.0.2.1, MASTER_PORT=29511"):
        Processes(cpu=True)
    assert time.monotonic() - began < 10


def test_the_first_process_listens_later_itself(world):
    world(RANK="0")
    check_launch()


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("command", ["convert", "heads", "plan", "slice", "run"])
def test_commands_of_one_process_say_so_once(world, monkeypatch, capsys, command, rank):
    world(RANK=rank)
    code, output, error = run_main(monkeypatch, capsys, command, "testbed-mla" if command == "run" else "builtin")
    assert (code, output, "runs as one process" in error) == (1, "", rank == "0")


def test_others_wait_for_it(world):
    with socket.create_server(("127.0.0.1", 0)) as server:
        world(MASTER_PORT=str(server.getsockname()[1]))
        check_launch()
    with pytest.raises(SurgeryError, match="does not answer"):
        check_launch()
