"""The measures that benchmarks of task frameworks share: shmq beside Redis on a Unix socket.

A task notes in a file when it begins, so both sides pay the same for it."""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from support.framework_workers import Command

import shmq

_RECORD = struct.Struct("<qqq")  # key, pid, CLOCK_MONOTONIC in ns


def note(key: int) -> None:
    """Called by a task: note that it begins."""
    fd = os.open(os.environ["BENCH_NOTES"], os.O_WRONLY | os.O_APPEND)
    os.write(fd, _RECORD.pack(key, os.getpid(), time.monotonic_ns()))
    os.close(fd)


def is_first(key: int) -> bool:
    """Called by a task: whether it begins for the first time."""
    return not any(each[0] == key for each in _notes(Path(os.environ["BENCH_NOTES"])))


def _notes(path: Path) -> list[tuple[int, int, int]]:
    return list(_RECORD.iter_unpack(path.read_bytes()))


def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """The first true value of the condition; None after so many seconds."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            return None
        time.sleep(0.0005)
    return found


def quantiles(times: list[float]) -> tuple[float, float, float]:
    """The median, the 99th percentile and the most."""
    times = sorted(times)
    return statistics.median(times), times[min(len(times) - 1, int(len(times) * 0.99))], times[-1]


class Server(ABC):
    """A running broker."""

    name: str
    where: str
    """As the applications take it: `shmq:INSTANCE` or `unix:///SOCKET`."""

    @abstractmethod
    def memory(self) -> int:
        """Bytes of memory of the server, with everything that it stores."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


class Shmq(Server):
    name = f"shmq {shmq.__version__}"

    def __init__(self) -> None:
        self._instance = f"bench-{secrets.token_hex(4)}"
        self._broker = shmq.Broker(instance=self._instance)
        self.where = f"shmq:{self._instance}"

    def memory(self) -> int:
        shared = Path("/dev/shm").glob(f"shmq.{self._instance}*")
        supervisor = psutil.Process(self._broker.supervisor_pid).memory_full_info()
        return supervisor.uss + sum(path.stat().st_blocks * 512 for path in shared)

    def close(self) -> None:
        self._broker.close()


class Redis(Server):
    def __init__(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            sys.exit("redis-server is not installed (Debian: redis-server)")
        self._folder = Path(tempfile.mkdtemp())
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        self.name = "Redis " + version.stdout.split("v=")[1].split()[0]
        socket = self._folder / "socket"
        words = [program, "--port", "0", "--unixsocket", str(socket), "--dir", str(self._folder)]
        self._server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        until(socket.exists, 10)
        self.where = f"unix://{socket}"

    def memory(self) -> int:
        return psutil.Process(self._server.pid).memory_full_info().uss

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()
        shutil.rmtree(self._folder)


class Application(ABC):
    """A framework's application on one of the servers, as its clients see it."""

    @abstractmethod
    def send(self, name: str, key: int) -> None:
        """Send the task of this name."""

    @abstractmethod
    def send_many(self, count: int) -> list[float]:
        """Send so many no-ops. Returns the seconds of each."""

    @abstractmethod
    def close(self) -> None:
        """Detach."""


class Bench:
    """All measures of one framework on one server.

    workers: words of the command with so many processes, each of which runs `tasks` at a time.
    """

    def __init__(
        self,
        server: Server,
        opened: Callable[[str], Application],
        workers: Callable[[int, int], list[str]],
    ) -> None:
        self.notes = Path(tempfile.mkdtemp()) / "notes"
        self.notes.touch()
        self.server, self._workers = server, workers
        here = str(Path(__file__).parent)
        path = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        env = {"BENCH_WHERE": server.where, "BENCH_NOTES": str(self.notes), "PYTHONPATH": path}
        self._env = env
        self.app = opened(server.where)

    def command(self, processes: int, tasks: int) -> Command:
        return Command(self._workers(processes, tasks), self._env)

    def begun(self) -> int:
        return self.notes.stat().st_size // _RECORD.size

    def noops(self, count: int) -> dict[str, float]:
        """Seconds until so many no-ops have begun, us of one that is sent, and bytes of memory
        while they wait."""
        before = self.begun()
        spent = self.app.send_many(count)
        memory = self.server.memory()
        command = self.command(2, 8)
        try:
            until(lambda: self.begun() > before)
            began = time.monotonic()
            rest = count - (self.begun() - before)
            until(lambda: self.begun() - before >= count)
            draining = (time.monotonic() - began) * count / rest
        finally:
            command.close()
        return {
            "20 000 no-ops sent, then done, s": (sum(spent) + draining) * 20_000 / count,
            "one sent, p50, us": statistics.median(spent) * 1e6,
            "memory with those waiting, MiB": memory / (1 << 20),
        }

    def starts(self, count: int) -> dict[str, float]:
        """Time from the call that sends until an idle worker begins."""
        command, found = self.command(1, 4), []
        try:
            for key in range(count + 20):
                before, began = self.begun(), time.monotonic_ns()
                self.app.send("noop", key)
                until(lambda before=before: self.begun() > before)
                found.append((_notes(self.notes)[-1][2] - began) / 1e3)
                time.sleep(0.01)  # it is idle again
        finally:
            command.close()
        return {"sent to begun, idle, p50, us": statistics.median(found[20:])}

    def kills(self, count: int, patience: float) -> list[float]:
        """ms from each SIGKILL of a worker until its task begins again; `inf`, and no more kills,
        if it has not after so many seconds."""
        commands, found = [self.command(1, 1), self.command(1, 1)], []
        try:
            for _ in range(count):
                os.truncate(self.notes, 0)  # to read a long file takes a core
                self._all_ready(commands)
                number = random.getrandbits(60)
                self.app.send("held", number)
                first = until(lambda number=number: self._of(number))
                began = time.monotonic_ns()
                os.kill(first[0][1], signal.SIGKILL)
                again = until(lambda number=number: self._of(number)[1:], patience)
                if again is None:
                    found.append(float("inf"))
                    break
                found.append((again[0][2] - began) / 1e6)
        finally:
            for command in commands:
                command.close()
        return found

    def _all_ready(self, commands: list[Command]) -> None:
        """Wait until each command has a worker that has done something."""

        def ready() -> bool:
            for command in commands:
                command.keep()
            if self.begun() >= sent[0]:
                for _ in range(20):
                    self.app.send("noop", -1)
                sent[0] += 20
            seen = {pid for _, pid, _ in _notes(self.notes)}
            return all(seen & set(command.workers()) for command in commands)

        sent = [self.begun()]
        until(ready)
        until(lambda: self.begun() >= sent[0])

    def _of(self, key: int) -> list[tuple[int, int, int]]:
        return [each for each in _notes(self.notes) if each[0] == key]

    def close(self) -> None:
        self.app.close()
        self.server.close()
        shutil.rmtree(self.notes.parent)


def main(
    title: str,
    opened: Callable[[str], Application],
    workers: Callable[[int, int], list[str]],
    floor: type[Server] | None = None,
) -> None:
    """Run and print all measures of a framework on both servers. floor: a server that does nothing,
    for the time to begin."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--tasks", type=int, default=20_000)
    parser.add_argument("--starts", type=int, default=300)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--redis-kills", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120.0, help="seconds for such a kill")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(title)
    for kind in (Shmq, Redis):
        server = kind()
        os.environ["BENCH_WHERE"] = server.where
        bench = Bench(server, opened, workers)
        kills = chosen.kills if kind is Shmq else chosen.redis_kills
        try:
            found = bench.noops(chosen.tasks) | bench.starts(chosen.starts)
            if kills:
                times = bench.kills(kills, chosen.patience)
                p50, p99, _ = quantiles(times)
                found[f"SIGKILL to the next begin, p50 of {len(times)}, ms"] = p50
                found["the same, p99, ms"] = p99
        finally:
            bench.close()
        results[server.name] = found
        print(f"\n{server.name}")
        for name, value in found.items():
            print(f"  {name:45} {value:12.2f}", flush=True)
    if floor is not None:
        bench = Bench(floor(), opened, workers)
        try:
            results[bench.server.name] = found = bench.starts(chosen.starts)
        finally:
            bench.close()
        print(f"\n{bench.server.name}", *found.items(), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results))
