"""A start imports only modules that it needs: the fewer, the faster."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest

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


def test_the_import_loads_the_extension_and_nothing_else_of_the_package() -> None:
    found = loaded("import shmq")
    assert {name for name in found if name.startswith("shmq")} == {"shmq", "shmq._native"}
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
