"""Fixtures for tests with real processes. Nothing of a test outlives it: no object in /dev/shm, no
process, no file."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support import processes, programs
from support.processes import KILLPOINTS, ROOT, SANITIZED, Child
from support.real_nsqd import Nsqd

import shmq
from shmq import shm

#: The tests take these variables from the caller's environment and no others: they say where
#: programs and packages are found, and what is asked of the tests themselves.
_KEPT = re.compile(
    r"PATH|HOME|USER|LOGNAME|TMPDIR|CI|CC|LD_PRELOAD|LD_LIBRARY_PATH|JAVA_HOME|(ASAN|UBSAN|TSAN)_OPTIONS"
    r"|SHMQ_(REQUIRE_PEERS|TEST_.*|HYPOTHESIS|FAULTS|FORWARD_KILLS|KILL_SYSCALLS|PICTURES|SANITIZED)"
    r"|(PYTHON|PYTEST|PYSPARK|SPARK|PYENV|XDG|PIP|GO|CARGO|RUSTUP|MAVEN|NPM|COVERAGE)[A-Z0-9_]*"
    r"|(SSL_CERT|REQUESTS_CA|CURL_CA)_[A-Z]+|(?i:(http|https|ftp|all|no)_proxy)"
)
_SET = {"TERM": "xterm", "LANG": "C.UTF-8"}

programs.watch()

# A busy machine must not fail a test, so no example has a time limit.
hypothesis.settings.register_profile("shmq", deadline=None)
hypothesis.settings.load_profile("shmq")


@pytest.fixture(scope="session", autouse=True)
def _own_environment() -> Iterator[None]:
    """Tests name their instances; what the caller has set must not reach them. Nor must what a
    shell or nohup does to its jobs, and CI may be one: SIGINT or SIGHUP ignored, by all of their
    children."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if not (_KEPT.fullmatch(name) or (SANITIZED and name == "SHMQ_NATIVE")):
                patch.delenv(name)
        for name, value in _SET.items():
            patch.setenv(name, value)
        interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
        hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        yield
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGHUP, hangup)


@pytest.fixture
def new_instance() -> Iterator[Callable[[], str]]:
    """Make unique instance names; at the end their supervisors are killed and their objects
    removed."""
    made: list[str] = []

    def name() -> str:
        made.append(f"test-{os.getpid()}-{secrets.token_hex(4)}")
        return made[-1]

    yield name
    for instance in made:
        processes.remove_instance(instance)
        assert not shm.list_objects(instance, everybodys=True)
        for bad in Path("/dev/shm").glob(f"shmq.{instance}.*.bad"):  # set aside, as it should be
            bad.unlink()


@pytest.fixture
def instance(new_instance: Callable[[], str]) -> str:
    """A unique instance name."""
    return new_instance()


@pytest.fixture
def data_path(tmp_path: Path) -> Path:
    """An empty directory for a broker's files."""
    path = tmp_path / "data"
    path.mkdir()
    return path


@pytest.fixture
def keep() -> Iterator[Callable[[Any], Any]]:
    """`keep(thing)` closes it at the end of the test, the last one first."""
    kept: list[Any] = []

    def remember(thing: Any) -> Any:
        kept.append(thing)
        return thing

    yield remember
    for thing in reversed(kept):
        thing.close()


@pytest.fixture
def child(new_instance: object, keep: Callable[[Any], Any]) -> Callable[..., Child]:
    """`child(function, *args)`: see processes.python_child. Killed and reaped at the end."""

    def start(function: Callable[..., Any], *args: Any, **how: Any) -> Child:
        return keep(processes.python_child(function, *args, **how))

    return start


@pytest.fixture
def serve(instance: str, data_path: Path, keep: Callable[[Any], Any]) -> Callable[..., Child]:
    """`serve(**options)`: `shmq serve` of `instance` on `data_path`; see processes.serve."""

    def start(**options: Any) -> Child:
        return keep(processes.serve(instance, data_path, **options))

    return start


@pytest.fixture
def attach(instance: str, keep: Callable[[Any], Any]) -> Callable[[], shmq.Broker]:
    """`attach()`: join `instance`."""
    return lambda: keep(shmq.attach(instance, timeout=processes.WATCHDOG))


@pytest.fixture
def nsqd(data_path: Path, keep: Callable[[Any], Any]) -> Callable[..., Nsqd]:
    """`nsqd(**options)`: a real nsqd on `data_path`; see nsqd.Nsqd."""
    return lambda **options: keep(Nsqd(data_path, **options))


@pytest.fixture
def open_broker(
    new_instance: Callable[[], str], tmp_path: Path
) -> Iterator[Callable[..., shmq.Broker]]:
    """`open_broker(**options)`: an embedded broker; closed at the end, and then nothing of it may
    be left in shared memory."""
    opened: list[shmq.Broker] = []

    def start(**options: Any) -> shmq.Broker:
        if "data_path" not in options:
            options["data_path"] = tmp_path / f"data-{len(opened)}"
            options["data_path"].mkdir()
        broker = shmq.Broker(instance=options.pop("instance", None) or new_instance(), **options)
        opened.append(broker)
        return broker

    yield start
    for broker in opened:
        broker.close()
        assert not shm.list_objects(broker.instance)
        assert not processes.supervisors(broker.instance)


@pytest.fixture
def broker(open_broker: Callable[..., shmq.Broker]) -> shmq.Broker:
    """An embedded broker with default options."""
    return open_broker()


@pytest.fixture(scope="session")
def killpoints() -> Path:
    """The build of the extension that can kill itself, compiled if its sources are newer."""
    sources = [*(ROOT / "native").rglob("*.[ch]"), ROOT / "native" / "CMakeLists.txt"]
    newest = max(path.stat().st_mtime for path in sources)
    if not KILLPOINTS.exists() or KILLPOINTS.stat().st_mtime < newest:
        subprocess.run([ROOT / "tools" / "dev", "killpoints"], check=True)
    return KILLPOINTS


@pytest.fixture
def pool() -> Iterator[Callable[..., shmq.Executor]]:
    """`pool(...)`: an Executor whose workers are killed at the end, so that no task holds it up."""
    made: list[shmq.Executor] = []

    def make(*args: Any, **options: Any) -> shmq.Executor:
        made.append(shmq.Executor(*args, **options))
        return made[-1]

    yield make
    for executor in made:
        executor.kill_workers()
