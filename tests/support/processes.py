"""Real processes for tests: children that run a function of the test, supervisors, conditions.

A child is a fresh Python (subprocess, never fork) that runs the source of one function. The
function may use what PRELUDE imports and nothing else of its module; it talks by `say(words)`, one
unbuffered line on its stdout, and by reading its stdin.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from shmq import procfs, shm, sources, staging_place
from shmq.errors import Gone, LayoutMismatch, ShmqError

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
#: The environment of programs that use this package or `chaos`.
HELPERS = {"PYTHONPATH": str(TESTS)}
#: The extension under the sanitizers, for every process of the tests (`tools/dev asan-python`).
SANITIZED = os.environ.get("SHMQ_SANITIZED", "")
KILLPOINTS = Path(SANITIZED or ROOT / "build" / "killpoints" / "_native.abi3.so")
#: Words for `shmq serve` where no gateway is wanted: tests must not share nsqd's ports.
NO_GATEWAY = ("--tcp-address=", "--http-address=")
WATCHDOG = float(
    os.environ.get("SHMQ_TEST_WATCHDOG", "60")
)  # seconds after which a condition that should come true counts as failed

PRELUDE = """
import itertools, json, os, random, resource, signal, sys, threading, time
import shmq

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def arm(point, count=1):
    from shmq import _native
    _native.killpoint(point, count)

def vanish():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def say(*words: object) -> None:
    """For linters: the one of PRELUDE is what children call."""


def arm(point: str, count: int = 1) -> None:
    """For linters, as `say`."""


def vanish() -> None:
    """For linters, as `say`."""


def eventually(condition: Callable[[], Any], watchdog: float = WATCHDOG, what: str = "") -> Any:
    """Wait until `condition()` is true and return it; AssertionError after `watchdog` seconds."""
    deadline = time.monotonic() + watchdog
    pause = 0.001
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = what or inspect.getsource(condition).strip()
            raise AssertionError(f"not true after {watchdog:g} s: {text}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)
    return value


def stop_process(pid: int) -> None:
    """SIGSTOP, and wait until the process has stopped in all its threads: until then they go on."""
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: set(_thread_states(pid)) <= set("TtZX"), what=f"{pid} stopped")


class Child:
    """A process with line-wise stdin and stdout, killed and reaped by `close`."""

    def __init__(self, argv: list[str], env: dict[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile(buffering=0)
        self._come = threading.Condition()
        self._lines: list[str] = []
        self._ended = False
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(env or {})},
        )
        self.pid = self.process.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            if raw.endswith(b"\n"):  # the last line of a killed process may be cut off
                with self._come:
                    self._lines.append(raw[:-1].decode())
                    self._come.notify_all()
        with self._come:
            self._ended = True
            self._come.notify_all()

    @property
    def lines(self) -> list[str]:
        """Its standard error so far; after `wait`, all of it."""
        with self._come:
            return list(self._lines)

    @property
    def errors(self) -> str:
        """Its stderr."""
        fd = self._errors.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def said(self, start: str, times: int = 1, watchdog: float = WATCHDOG) -> str:
        """Wait for the n-th line that begins with `start`; that line. AssertionError if it ends."""

        def found() -> bool:
            return sum(line.startswith(start) for line in self._lines) >= times

        with self._come:
            self._come.wait_for(lambda: found() or self._ended, watchdog)
            if found():
                return [line for line in self._lines if line.startswith(start)][times - 1]
            last, state = self._lines[-5:], "ended" if self._ended else "still runs"
        raise AssertionError(f"child did not say {start!r} but {last}; it {state}\n{self.errors}")

    def tell(self, line: str = "") -> None:
        """A line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Signal it and wait for its end."""
        self.process.send_signal(number)
        return self.wait()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped in all its threads."""
        stop_process(self.pid)

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def is_asleep(self) -> bool:
        """Whether all its threads sleep, looked at several times."""
        for _ in range(10):
            if set(_thread_states(self.pid)) != {"S"}:
                return False
            time.sleep(0.002)
        return True

    def cpu_seconds(self) -> float:
        """The seconds of processor time it has used so far."""
        used = psutil.Process(self.pid).cpu_times()
        return used.user + used.system

    def wait(self, watchdog: float = WATCHDOG) -> int:
        """Its exit status, when it has ended and all it said was read."""
        try:
            status = self.process.wait(watchdog)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"child still runs after {watchdog:g} s\n{self.errors}") from None
        self._reader.join(WATCHDOG)
        return status

    def succeed(self, watchdog: float = WATCHDOG) -> list[str]:
        """Wait for its end; its lines. AssertionError unless the status is 0."""
        status = self.wait(watchdog)
        assert status == 0, f"child ended with {status}; said {self.lines[-5:]}\n{self.errors}"
        return self.lines

    def die(self, watchdog: float = WATCHDOG) -> None:
        """Wait for it to kill itself at the killpoint it was armed with."""
        status = self.wait(watchdog)
        assert status == -signal.SIGKILL, (
            f"the killpoint was not reached: status {status}, said {self.lines[-5:]}\n{self.errors}"
        )

    def close(self) -> None:
        """Kill it if it lives, reap it, close its pipes."""
        if self.process.returncode is None:  # else its number may be somebody else's by now
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # not send_signal: it would reap and forget
        self.process.wait()
        self._reader.join(WATCHDOG)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()


def _thread_states(pid: int) -> Iterator[str]:
    for task in os.listdir(f"/proc/{pid}/task"):
        stat = procfs.Stat.read(pid, task)
        if stat is not None:
            yield stat.state


def python_child(
    function: Callable[..., Any],
    *args: Any,
    killpoints: bool = False,
    env: dict[str, str] | None = None,
    before: Iterable[str] = (),
) -> Child:
    """Start a Python that calls `function(*args)`, its source and arguments passed as text.

    killpoints: with the build of the extension that has them. before: words of a command that is to
    start the Python (`unshare ...`).
    """
    source = textwrap.dedent(inspect.getsource(function))
    code = f"{PRELUDE}\n{source}\n{function.__name__}(*json.loads(sys.argv[1]))"
    more = {"SHMQ_NATIVE": str(KILLPOINTS)} if killpoints else {}
    argv = [*before, sys.executable, "-c", code, json.dumps(args)]
    return Child(argv, {**more, **(env or {})})


def serve(
    instance: str,
    data_path: Path,
    *,
    killpoint: tuple[str, int] | None = None,
    killpoints: bool = False,
    wait: bool = True,
    before: Iterable[str] = (),
    **options: Any,
) -> Child:
    """`shmq serve` as a process; returns when it answers. killpoint: its name and which passing of
    it ends the process; armed when it is already running if `wait`, before its start if not.
    before: as of `python_child`."""
    options = {"tcp_address": "", "http_address": "", **options}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    words += [f"--instance={instance}", f"--data-path={data_path}"]
    env = {"SHMQ_NATIVE": str(KILLPOINTS)} if killpoint or killpoints else {}
    run = "from shmq.cli import main; main()"
    if killpoint and wait:
        # armed by a signal, when everything that a start does is over
        run = (
            "import signal; from shmq import _native as n; "
            f"signal.signal(signal.SIGRTMIN, lambda *_: [n.killpoint{killpoint!r}, "
            f"print('armed', flush=True)]); {run}"
        )
    elif killpoint:
        run = f"from shmq import _native as n; n.killpoint{killpoint!r}; {run}"
    run = f"import shmq; {run}"
    child = Child([*before, sys.executable, "-c", run, "serve", *words], env)
    if wait:
        try:
            eventually(
                lambda: answers(instance, child.pid) or child.process.poll() is not None,
                what=f"supervisor of {instance} answers",
            )
            assert child.process.poll() is None, f"the supervisor ended\n{child.errors}"
        except BaseException:
            child.close()
            raise
    return child


def arm_server(server: Child) -> None:
    """Arm the killpoint that `serve` was given."""
    server.process.send_signal(signal.SIGRTMIN)  # what it does with others is nsqd's
    server.said("armed")


def answers(instance: str, pid: int) -> bool:
    """Is this process the instance's supervisor, and is everything there that a client needs?"""
    with contextlib.suppress(ShmqError, LayoutMismatch, Gone):
        directory = sources.open_readonly(instance).directory
        shm.Permits(instance).close()
        return directory.read("supervisor_pid") == pid and sources.supervisor_alive(directory)
    return False


def supervisor_pid(instance: str) -> int:
    """Of the supervisor that the directory names, alive or dead."""
    return sources.open_readonly(instance).directory.read("supervisor_pid")


def supervisors(instance: str) -> list[int]:
    """Every process that serves this instance, found by its command line."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if f"--instance={instance}".encode() in words:
                    found.append(int(entry))
    return found


def wait_ended(pid: int, watchdog: float = WATCHDOG) -> None:
    """Until a process that need not be a child is gone (or only its parent has to reap it)."""
    eventually(lambda: procfs.start_time(pid) is None, watchdog, f"process {pid} ended")


def remove_instance(instance: str) -> list[str]:
    """Kill what serves it, unlink what it left; the names of what was left."""
    for pid in supervisors(instance):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_ended(pid)
    for name in (instance, instance + staging_place.READS):  # what a killed instance left staged
        for path in staging_place.staged_paths(name, os.geteuid()):
            shutil.rmtree(path, ignore_errors=True)
    objects = shm.list_objects(instance, everybodys=True)
    return [item.name for item in objects if item.unlink()]


def readable(fd: int, seconds: float) -> bool:
    """Whether there is something to read within `seconds`."""
    return bool(select.select([fd], [], [], seconds)[0])
