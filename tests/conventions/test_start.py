"""A start imports only modules that it needs: the fewer, the faster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import psutil
import pytest
from support.nsq_client import Client, sized
from support.processes import WATCHDOG, Child

import shmq
from shmq import cli

#: Modules that take long to import, and that a process needs only for certain calls.
SLOW = {
    "aiohttp",
    "asyncio",
    "json",
    "multiprocessing",
    "numpy",
    "pickle",
    "psutil",
    "socket",
    "subprocess",
    "tempfile",
}

#: Modules that a supervisor at rest does not need: of OpenSSL (4 MiB), of the gateway, for mistakes
#: and for large numbers of queues, and numpy's optional parts.
NOT_FOR_A_SUPERVISOR = (SLOW - {"json", "numpy", "pickle"}) | {
    "concurrent.futures",
    "difflib",
    "email",
    "hashlib",
    "http",
    "logging.handlers",
    "numpy.fft",
    "numpy.ma",
    "numpy.polynomial",
    "numpy.random",
    "numpy.testing",
    "runpy",
    "secrets",
    "selectors",
    "shmq.gateway.access",
    "shmq.gateway.listeners",
    "shmq.history",
    "shmq.stats",
    "shmq.supervisor.workers",
    "shutil",
    "ssl",
    "tomllib",
}

_NO_PROCESS = 2**31 - 1  # a process id that the kernel does not give

_THREADS = "import os, numpy; print(len(os.listdir('/proc/self/task')))"


def ran(code: str, *words: str, env: dict[str, str] | None = None) -> str:
    """Run this code with these arguments in a new Python; return its output."""
    without = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=without | (env or {}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def loaded(code: str) -> set[str]:
    """The modules that a Python has imported when it has run this code."""
    return set(ran(f"import sys\n{code}\nprint(*sys.modules)").splitlines()[-1].split())


def test_the_import_loads_the_extension_and_its_errors_and_nothing_else_of_the_package() -> None:
    found = loaded("import shmq")
    assert {name for name in found if name.startswith("shmq")} == {
        "shmq",
        "shmq._native",
        "shmq.errors",
    }
    assert not found & (SLOW | {"dataclasses", "importlib.metadata", "inspect", "logging"})


def test_a_process_that_publishes_and_takes_loads_no_slow_module() -> None:
    found = loaded("import shmq\nshmq.attach, shmq.Producer, shmq.Consumer, shmq.Full")
    assert not found & SLOW


def test_attaching_publishing_and_taking_load_no_numpy(broker: shmq.Broker) -> None:
    code = f"""
import shmq
broker = shmq.attach({broker.instance!r})
producer, consumer = broker.producer("t"), broker.consumer("t", "c")
producer.publish(b"one", properties={{"a": "b"}})
producer.publish_many([b"two", b"three"], ttl=60)
assert consumer.take(60).body == b"one"
with consumer.take_many(2, timeout=60) as batch:
    assert batch.bodies() == [b"two", b"three"]
assert not broker.ended
broker.close()
"""
    assert "numpy" not in loaded(code)


def test_a_supervisor_loads_what_it_needs_and_nothing_else(instance: str, data_path: Path) -> None:
    words = [f"--instance={instance}", f"--data-path={data_path}", "--tcp-address="]
    # a supervisor whose parent has ended ends too, when all its loops have begun
    words += ["--http-address=", f"--parent-pid={_NO_PROCESS}"]
    found = loaded(f"from shmq import cli\nassert cli.main({['serve', *words]}) == 0")
    assert "shmq.supervisor.supervisor" in found
    assert not found & NOT_FOR_A_SUPERVISOR


def mapped(pid: int, *packages: str) -> set[str]:
    """Those of these packages whose extensions a process has loaded."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {name for name in packages if f"/{name}/" in maps}


def test_a_gateway_loads_http_when_somebody_uses_it_and_numpy_when_it_is_needed(
    serve: Callable[..., Child], tmp_path: Path
) -> None:
    tcp, http = tmp_path / "tcp", tmp_path / "http"
    supervisor = serve(tcp_address=tcp, http_address=http, gateway_workers=1)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WATCHDOG)
        sock.connect(str(tcp))
        client = Client(sock)
        client.send(b"  V2PUB t\n" + sized(b"one"))
        assert client.frame() == (0, b"OK")
        client.send(b"SUB t c\nRDY 1\n")
        assert client.frame() == (0, b"OK")
        _, message = client.frame() or (0, b"")
        client.send(b"FIN " + message[10:26] + b"\nCLS\n")
        assert client.frame() == (0, b"CLOSE_WAIT")
        (gateway,) = psutil.Process(supervisor.pid).children()
        assert not mapped(gateway.pid, "numpy", "aiohttp", "psutil")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WATCHDOG)
        sock.connect(str(http))
        sock.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")
    assert mapped(gateway.pid, "aiohttp") == {"aiohttp"}


def test_the_help_of_the_command_line_loads_no_command() -> None:
    found = loaded("from shmq import __main__\nassert __main__.main(['--help']) == 0")
    ours = {name for name in found if name.startswith("shmq")}
    assert ours == {
        "shmq",
        "shmq.__main__",
        "shmq._native",
        "shmq.cli",
        "shmq.cli.status",
        "shmq.errors",
        "shmq.printing",
    }
    assert not found & SLOW


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_the_command_line_has_the_first_sentence_of_each_command(name: str) -> None:
    command = cli.cli.get_command(click.Context(cli.cli), name)
    assert command is not None
    assert command.get_short_help_str(limit=sys.maxsize) == cli.COMMANDS[name][1]


def test_numpy_starts_no_threads_in_processes_of_the_package() -> None:
    code = f"import sys\nsys.argv[1:] = ['serve']\nimport shmq.__main__\n{_THREADS}"
    assert ran(code) == "1\n"


def test_a_worker_of_a_pool_has_the_threads_of_numpy_that_its_tasks_ask_for() -> None:
    code = "import os, shmq.__main__; print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    assert ran(code, "worker", "module:pool") == "None\n"
    assert ran(code, "worker", "module:pool", env={"OPENBLAS_NUM_THREADS": "3"}) == "3\n"
