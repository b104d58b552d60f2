"""A broker's log holds no arguments of other processes and does not grow without bound."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
from support import processes
from support.processes import eventually

import shmq
from shmq.procfs import name_of

CLIENT = """
import sys, shmq
consumer = shmq.attach(sys.argv[1]).consumer("t", "c")
print("attached", flush=True)
sys.stdin.read()
"""


def is_watched(supervisor: int, client: int) -> bool:
    """Whether the supervisor has a pidfd of the client."""
    for path in Path(f"/proc/{supervisor}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            if f"Pid:\t{client}\n" in path.read_text():
                return True
    return False


def test_a_dead_clients_arguments_are_not_logged(tmp_path: Path) -> None:
    instance = f"log-{os.getpid()}"
    script = tmp_path / "cl.py"
    script.write_text(CLIENT)
    server = processes.serve(instance, tmp_path)
    try:
        argv = [sys.executable, str(script), instance, "--db-password=hunter2"]
        client = processes.Child(argv)
        client.said("attached")
        name = f"pid {client.pid}, python"
        eventually(lambda: is_watched(server.pid, client.pid))
        client.kill(signal.SIGKILL)
        eventually(lambda: " messages returned" in server.errors)
        client.close()
        line = next(line for line in server.errors.splitlines() if "returned" in line)
        assert "hunter2" not in server.errors
        assert instance not in line
        assert name in line
        assert " cl.py) " in line
    finally:
        server.close()
        processes.remove_instance(instance)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("/bin/sleep 1000", "sleep"),
        ("/usr/bin/python3 /x/cl.py --p=s", "python3 cl.py"),
        ("python3 -m celery -A s", "python3 -m celery"),
        ("python3 -c s", "python3"),
        ("python3", "python3"),
        ("/o\x1b[31m\nx 1000", "o?[31m?x"),
        ("psql password=s", "psql"),
        ("", ""),
    ],
)
def test_the_name_of_a_program(words: str, name: str) -> None:
    assert name_of(words.split(" ")) == name


def test_an_embedded_brokers_log_has_its_own_name_and_a_bound(tmp_path: Path) -> None:
    """It goes to a file that nobody sees: its last lines are what counts."""
    with shmq.Broker(data_path=tmp_path, log_level="info") as broker:
        server = broker._server
        assert server is not None
        fd = server._said.fileno()
        eventually(lambda: b": running, pid" in os.pread(fd, 1 << 16, 0))
        lines = os.pread(fd, 1 << 16, 0).splitlines()
        assert all(line.startswith(b"[shmq] ") for line in lines)
        for number in range(3):
            text = b"".join(b"%d line %d\n" % (number, line) for line in range(100_000))
            os.lseek(fd, 0, os.SEEK_END)
            os.write(fd, text)
            eventually(lambda: 0 < os.fstat(fd).st_size < 1 << 17)
            end = b"%d line 99999\n" % number
            eventually(lambda end=end: end in os.pread(fd, 1 << 17, 0))
            last = os.pread(fd, 1 << 17, 0).splitlines()
            assert last[-1] == b"%d line 99999" % number
            assert last[0].startswith(b"%d line " % number)  # no half line
