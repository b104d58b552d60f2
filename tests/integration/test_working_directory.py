"""No program of shmq runs code of the working directory it is started in: a directory in which
others may write can have a module of any name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import processes
from support.processes import Child, eventually

from shmq import interpreter

#: Names that a process of shmq imports: a dependency, the package itself, the standard library, and
#: what a library looks for that is not installed.
NAMES = ("numpy", "shmq", "json", "logging", "psutil", "click", "runpy", "aiohttp", "brotli")
SHMQ = Path(sys.executable).with_name("shmq")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A directory with modules that say that they were run."""
    path = tmp_path / "hostile"
    path.mkdir()
    for name in NAMES:
        (path / f"{name}.py").write_text(
            f"import os\nopen({str(path / 'ran')!r} + str(os.getpid()), 'w').write({name!r})\n"
            "raise SystemExit('hostile')\n"
        )
    return path


@pytest.fixture
def start(keep: Callable[[Any], Any], hostile: Path) -> Callable[..., Child]:
    """`start(*argv)` in that directory."""

    def child(*argv: object) -> Child:
        inside: Child = keep(Child(["env", "-C", str(hostile), *map(str, argv)]))
        return inside

    return child


def what_ran(hostile: Path) -> set[str]:
    return {path.read_text() for path in hostile.glob("ran*")}


def test_a_service_and_its_gateway_run_nothing_of_it(
    start: Callable[..., Child], hostile: Path, instance: str, data_path: Path
) -> None:
    if not SHMQ.exists():
        pytest.skip("the command is not installed")
    server = start(
        SHMQ,
        "serve",
        f"--instance={instance}",
        f"--data-path={data_path}",
        "--tcp-address=127.0.0.1:0",
        "--http-address=127.0.0.1:0",
    )
    eventually(lambda: "gateway 0: serving" in server.errors or what_ran(hostile))
    assert not what_ran(hostile)
    server.process.terminate()
    assert server.wait() == 0


SCRIPT = """
import sys, shmq
with shmq.Broker(sys.argv[1], sys.argv[2], tcp_address="127.0.0.1:0", log_level="info") as broker:
    broker.create_channel("t", "c")
    print("made", flush=True)
    sys.stdin.readline()
"""


def test_an_embedded_broker_of_a_script_elsewhere_runs_nothing_of_it(
    start: Callable[..., Child], hostile: Path, instance: str, data_path: Path, tmp_path: Path
) -> None:
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    child = start(sys.executable, script, data_path, instance)
    child.said("made")
    gateways = eventually(
        lambda: [
            pid
            for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
            if is_gateway_of(pid, processes.supervisor_pid(instance))
        ]
    )
    assert gateways
    child.tell()
    assert child.wait() == 0
    assert not what_ran(hostile)


def is_gateway_of(pid: int, supervisor: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        parent = psutil.Process(pid).ppid()
    except (OSError, psutil.NoSuchProcess):
        return False
    return parent == supervisor and b"shmq.gateway.worker" in words


def test_a_benchmark_runs_nothing_of_it(start: Callable[..., Child], hostile: Path) -> None:
    if not SHMQ.exists():
        pytest.skip("the command is not installed")
    assert start(SHMQ, "bench", "--count=1000", "--json").wait() == 0
    assert not what_ran(hostile)


def test_packages_are_found_where_the_starter_found_them(
    tmp_path: Path, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may have added a directory; that one comes last, and the working directory never."""
    (tmp_path / "added" / "cramjam").mkdir(parents=True)
    (tmp_path / "added" / "cramjam" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "cramjam", raising=False)  # where another test has found it
    monkeypatch.syspath_prepend(tmp_path / "added")
    code = "import shmq, numpy; print(*sys.path, sep='\\n'); print(*sys.argv)"
    said = subprocess.run(
        interpreter.run_code(code, ["a", "b c"]),
        cwd=hostile,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert said[-1] == "-c a b c"
    assert str(tmp_path / "added") in said[:-1]
    assert said.index(str(tmp_path / "added")) > 2
    assert "" not in said
    assert str(hostile) not in said
    assert not what_ran(hostile)
