"""Ends handles in every way and looks what is left: `python -m lifecycle.machine DIRECTORY ROW...`.

It runs with a /dev/shm, a home and a directory for temporary files of its own, so that whatever is
found there later was left by one of its processes. It makes and ends many rows at once, prints a
line of progress for each end to stderr, ends alone what is found, until it knows the rows and ends
that show it, and prints a line of JSON for each of these. The last line has the number of cells.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import random
import re
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from lifecycle.ends import ENDS, Where, alike, has, stays
from lifecycle.handles import ROWS, SECONDS, Row, prime
from lifecycle.holder import REQUESTS, more
from support import processes
from support.processes import eventually

import shmq
from shmq import homes, peek, shm, sources, stats

INSTANCE = "lifecycle"
OPTIONS = {"msg_timeout": "60s"}
ALL_ENDS = [end for ends in ENDS.values() for end in ends]

Census = dict[str, list[str]]
Left = dict[str, list[str]]  # by what: names that are gone (-) and more (+)


class Found(NamedTuple):
    """The differences after these ends of these rows: while the process lives, and after it."""

    rows: list[str]
    ends: list[str]
    left: Left
    last: Left

    def __bool__(self) -> bool:
        return bool(self.left or self.last)


class Holder:
    """A process of lifecycle.holder, which is a child of this one."""

    def __init__(self, starter: socket.socket, row: Row, ends: str, *place: str) -> None:
        self.row, self._said, self._ended = row, b"", False
        self._status: tuple[int] | None = None
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        words = json.dumps([row.name, ends, *place]).encode()
        socket.send_fds(starter, [words], [theirs_in, theirs_out, 2])
        self.pid = int(starter.recv(100))
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._out, False)

    def said(self, start: str) -> str:
        """The rest of its next line, which must begin so."""

        def come() -> bool:
            with contextlib.suppress(BlockingIOError):
                some = os.read(self._out, 1 << 16)
                self._said += some
                self._ended = not some
            return self._ended or b"\n" in self._said

        eventually(come, what=f"{self.row.name} says {start}")
        line, end, self._said = self._said.partition(b"\n")
        if not end or not line.decode().startswith(start):
            raise AssertionError(f"{self.row.name} did not say {start!r}, but {line!r}")
        return line.decode().partition(" ")[2]

    def tell(self) -> None:
        os.write(self._in, b"\n")

    def wait(self) -> int:
        """Its exit status."""
        status = eventually(self._reaped, what=f"{self.row.name} has ended")
        return int(status[0])

    def _reaped(self) -> tuple[int] | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = (os.waitstatus_to_exitcode(status),) if pid else None
        return self._status

    def close(self) -> None:
        if not self._reaped():
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        for number in (self._in, self._out):
            os.close(number)


class Relay:
    """A port of 127.0.0.1 that is passed on to a Unix socket, for programs that know only ports."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._path)
            except OSError:
                client.close()
                server.close()
                continue
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._pass_on, args=(server, client), daemon=True)
        back.start()
        self._pass_on(client, server)
        back.join()
        client.close()
        server.close()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Machine:
    """One instance, and what is made of it."""

    def __init__(self, directory: Path, modules: Sequence[str], patience: float) -> None:
        """patience: seconds that something may take to be given back."""
        self.patience = patience
        # orphans become children of this process, and are reaped by it
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
        self.data_path = directory / "data"
        self.homes = {name: directory / name for name in ("home", "tmp", "run")}
        for path in (self.data_path, *self.homes.values()):
            path.mkdir()
        (directory / "home/.local/state/shmq").mkdir(parents=True)
        os.environ.update(
            HOME=str(self.homes["home"]),
            TMPDIR=str(self.homes["tmp"]),
            XDG_RUNTIME_DIR=str(self.homes["run"]),
        )
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
            os.environ.pop(name, None)
        self.cells = 0
        self.rows: list[Row] = []
        self.alive: set[int] = set()
        self.called: dict[int, str] = {}
        self.address = str(directory / "tcp")
        self.relay = Relay(self.address)
        self.start()
        self._start_starter(modules)
        with self.broker() as broker:
            prime(broker)
            self.is_warm: set[str] = set()

    def _warm(self, row: Row) -> None:
        """Have the row make its topics and stores, which stay. A store without keys would be gone
        at a stop."""
        self.is_warm.add(row.name)
        with self.broker() as broker, sources.open_readonly(INSTANCE) as source:
            before = {client.pid for client in broker.stats().clients}
            connections = self._connections()
            holder = self._holder(row, ["close"])
            try:
                for word in ("made", "ready", "ended"):
                    holder.tell()
                    holder.said(word)
            finally:
                holder.close()
            eventually(lambda: {client.pid for client in broker.stats().clients} <= before)
            eventually(lambda: self._connections() <= connections and not self._left())
            eventually(lambda: not any("#ephemeral" in one.name for one in broker.stats().topics))
            for store in source.directory.live_stores():
                kept = broker.results(store.name)
                if not len(kept):
                    kept.set("stays", b"value")

    def _start_starter(self, modules: Sequence[str]) -> None:
        self.starter, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            os.dup2(theirs.fileno(), REQUESTS)
            os.execv(sys.executable, [sys.executable, "-m", "lifecycle.holder", *modules])
        self.starter_pid = pid
        theirs.close()

    @contextlib.contextmanager
    def broker(self) -> Iterator[shmq.Broker]:
        with shmq.attach(INSTANCE, timeout=SECONDS) as broker:
            yield broker

    def start(self) -> None:
        self.server = processes.serve(INSTANCE, self.data_path, tcp_address=self.address, **OPTIONS)
        self._await_gateway()

    def _await_gateway(self) -> None:
        def answers() -> bool:
            with contextlib.suppress(shmq.ShmqError, OSError):
                shmq.connect(self.address, timeout=5).close()
                return True
            return False

        eventually(answers)

    # ---- looking ----

    def census(self) -> Census:
        """All that there is."""
        shared = [*os.listdir("/dev/shm"), *Path("/dev/shm").glob("shmq-staged-*/**/*")]
        found: Census = {"shared memory": sorted(_kind(str(each)) for each in shared)}
        for name, path in self.homes.items():
            names = (str(each.relative_to(path)) for each in path.rglob("*"))
            # those are of multiprocessing, in a process that was killed
            found[name] = sorted(_kind(each) for each in names if not each.startswith("pymp-"))
        found["locks"] = self._locks()
        found["connections"] = [str(self._connections())]
        found["processes"] = self._processes()
        with sources.open_readonly(INSTANCE) as source:
            found["permits"] = [str(self._permits(source))]
            found |= self._of(source)
        return found

    def _locks(self) -> list[str]:
        """The files that somebody has locked."""
        text = Path("/proc/locks").read_text(encoding="ascii")
        locked = set(re.findall(r"[0-9a-f]+:[0-9a-f]+:\d+", text))
        found = []
        for path in self.homes.values():
            for each in path.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    at = each.stat()
                    device = f"{os.major(at.st_dev):02x}:{os.minor(at.st_dev):02x}"
                    if f"{device}:{at.st_ino}" in locked:
                        found.append(_kind(each.name))
        return sorted(found)

    def _connections(self) -> int:
        """The sockets of the gateway."""
        return sum(
            os.readlink(path).startswith("socket:")
            for gateway in self._gateways()
            for path in Path(f"/proc/{gateway.pid}/fd").iterdir()
        )

    def _gateways(self) -> Iterator[psutil.Process]:
        for process in psutil.Process(self.server.pid).children(recursive=True):
            if "gateway" in " ".join(process.cmdline()):
                yield process

    @staticmethod
    def _permits(source: sources.ReadOnlySource) -> int:
        permits = shm.Permits(INSTANCE)
        try:
            return permits.free - source.directory.free_clients
        finally:
            permits.close()

    def _of(self, source: sources.ReadOnlySource) -> Census:
        found: Census = {
            name: [] for name in ("topics", "channels", "sessions", "leases", "holders")
        }
        now = stats.collect(source)
        found["places"] = sorted(
            f"{client.kind} {client.pins} pins {self.called.get(client.pid, '')}".rstrip()
            for client in now.clients
        )
        found["stores"] = sorted(store.name for store in source.directory.live_stores())
        for topic in now.topics:
            found["topics"].append(topic.name)
            for channel in topic.channels:
                name = f"{topic.name}/{channel.name}"
                waiting = channel.depth + channel.deferred
                found["channels"].append(f"{name}: {waiting} and {channel.in_flight} in flight")
                found["sessions"] += [name for _ in channel.sessions]
        for entry in source.directory.live_queues():
            view = source.queue(entry)
            found["leases"] += [f"{entry.channel} {lease.id}" for lease in peek.open_leases(view)]
        return found

    def _processes(self) -> list[str]:
        """Those that the ended ones have left."""
        return sorted(name for name, _ in self._left())

    def _kill_left(self) -> None:
        """Let what was found not be found again, nor hold this process's output open."""
        for _, process in self._left():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _left(self) -> list[tuple[str, psutil.Process]]:
        mine = {self.starter_pid, self.server.pid} | self.alive
        with contextlib.suppress(psutil.Error):
            mine |= {each.pid for each in psutil.Process(self.server.pid).children(recursive=True)}
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if process.pid in mine:
                    continue
                if process.status() == psutil.STATUS_ZOMBIE:
                    if process.ppid() == os.getpid():
                        os.waitpid(process.pid, os.WNOHANG)
                    continue
                found.append((_called(process), process))
        return found

    def settled(self, before: Census, end: str = "") -> Left:
        """The differences from before that are not to stay after this end (none: when its
        processes are gone), when there are none or after a while."""
        until = time.monotonic() + self.patience
        while True:
            different: Left = {}
            if not end:  # as the next start of an embedded broker does
                homes.sweep(self.homes["home"] / ".local/state/shmq")
            with contextlib.suppress(OSError, psutil.Error, shmq.ShmqError):
                now = self.census()
                for what in now:
                    gone = more(before[what], now[what])
                    new = [
                        name for name in more(now[what], before[what]) if not self._may(end, name)
                    ]
                    if gone or new:
                        different[what] = [f"-{name}" for name in gone] + [
                            f"+{name}" for name in new
                        ]
                if not different:
                    return {}
            if time.monotonic() > until:
                return different or {"census": ["is impossible"]}
            time.sleep(0.05)

    def _may(self, end: str, name: str) -> bool:
        return any(stays(row, end, name) for row in self.rows)

    # ---- ending ----

    def run(
        self, rows: Sequence[Row], ends: Sequence[str], draws: Callable[[Row, str], bool]
    ) -> Iterator[Found]:
        """End these rows in each of these ways, as many as possible at once; what is found. draws:
        whether to try an end that needs a process of its own."""
        for _, group in itertools.groupby(sorted(rows, key=alike), alike):
            some = list(group)
            for together in _together(some[0], ends):
                began = time.monotonic()
                few = some if len(together) > 1 else [row for row in some if draws(row, *together)]
                if not few:
                    continue
                found = self.case(few, together)
                self.cells += len(few) * len(together)
                took = time.monotonic() - began
                names = f"{' '.join(together)}: {' '.join(row.name for row in few)}"
                print(f"{names} ... {took:.1f} s", file=sys.stderr, flush=True)
                if found and len(few) == len(together) == 1:
                    yield found
                elif found:
                    yield from self.smallest(found)

    def smallest(self, found: Found) -> Iterator[Found]:
        """Each row alone that finds something, with its last end or all; else what was found."""
        print(f"found {found}", file=sys.stderr, flush=True)
        some = False
        for row in found.rows:
            for ends in (found.ends[-1:], found.ends):
                alone = self.case([ROWS[row]], ends)
                if alone:
                    some = True
                    yield alone
                    break
        if not some:
            yield found

    def case(self, rows: Sequence[Row], ends: Sequence[str]) -> Found:
        """Make these handles and end them, in each of these ways, in one process for each row."""
        self.rows = list(rows)
        for row in rows:
            if row.warm and row.name not in self.is_warm:
                self._warm(row)
        before = self.census()
        holders: list[Holder] = []
        staying: list[int] = []
        left: Left = {}
        at = list(ends)
        try:
            for row in rows:
                holders.append(self._holder(row, ends))
                self.alive.add(holders[-1].pid)
                self.called[holders[-1].pid] = row.name
                if Where.of(ends[0]) is Where.INSIDE:
                    self._see(holders[-1])
            if Where.of(ends[0]) is Where.INSIDE:
                for holder in holders:
                    holder.tell()
            for number, end in enumerate(ends):
                at = list(ends[: number + 1])
                for holder in holders:
                    self._ready(holder)
                left |= self._end(holders, end, before, staying)
                if left:
                    break
                at = list(ends)
                if end != ends[-1]:
                    for holder in holders:
                        holder.tell()
        except Exception as exc:
            left = {"failed": [f"{type(exc).__name__}: {exc}"]}
            traceback.print_exc()
        finally:
            self.alive = set()
            for pid in staying:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for holder in holders:
                holder.close()
        last = self.settled(before)
        self._kill_left()
        return Found([row.name for row in rows], at, left, last)

    def _holder(self, row: Row, ends: Sequence[str]) -> Holder:
        place = (INSTANCE, self.address, str(self.relay.port), str(self.homes["tmp"]))
        topics = (f"t.{row.name}", f"silent.{row.name}")
        return Holder(self.starter, row, " ".join(ends), *place, *topics)

    def _see(self, holder: Holder) -> None:
        """Let it make its handle, and look whether that is seen."""
        before = self.census()
        holder.tell()
        holder.said("made")
        if holder.row.shows and self.census() == before:
            raise AssertionError(f"the census does not see {holder.row.name}")

    def _ready(self, holder: Holder) -> None:
        holder.said("ready")
        eventually(  # a process that is being started blocks some for a moment
            lambda: not any(_blocked(each.pid) for each in _with_children(holder.pid)),
            self.patience,
            f"no process of {holder.row.name} blocks signals",
        )

    def _end(self, holders: Sequence[Holder], end: str, before: Census, staying: list[int]) -> Left:
        where, left = Where.of(end), Left()
        if where is Where.OUTSIDE:
            getattr(self, end)(holders)
        for holder in holders:
            if where is Where.SIGNAL:
                os.kill(holder.pid, signal.SIGTERM if end == "sigterm" else signal.SIGKILL)
            else:
                holder.tell()
        for holder in holders:
            if where in (Where.INSIDE, Where.OUTSIDE):
                for what, names in json.loads(holder.said("ended")).items():
                    left[f"{what} of {holder.row.name}"] = [f"+{name}" for name in names]
                continue
            if end in STAYING:
                staying.append(int(holder.said("stays")))
                self.alive.add(staying[-1])
            if end != "replaced":
                status = holder.wait()
                if status != STATUS.get(end, 0):
                    left[f"exit status of {holder.row.name}"] = [str(status)]
        return left | self.settled(before, end)

    # ---- ends from outside ----

    def stopped_and_continued(self, holders: Iterable[Holder]) -> None:
        pids = [each.pid for holder in holders for each in _with_children(holder.pid)]
        for pid in pids:
            processes.stop_process(pid)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)

    def supervisor_killed(self, holders: Sequence[Holder]) -> None:
        if holders[0].row.own:
            for holder in holders:
                self._supervisor_of(holder).kill()
            return
        self.server.kill()
        self.server.close()
        self.start()

    def instance_stopped(self, holders: Sequence[Holder]) -> None:
        if holders[0].row.own:
            for holder in holders:
                supervisor = self._supervisor_of(holder)
                supervisor.terminate()
                processes.wait_ended(supervisor.pid)
            return
        assert self.server.kill(signal.SIGTERM) == 0, self.server.errors
        self.server.close()
        self.start()

    @staticmethod
    def _supervisor_of(holder: Holder) -> psutil.Process:
        children = psutil.Process(holder.pid).children(recursive=True)
        (supervisor,) = [each for each in children if _called(each) == "supervisor"]
        return supervisor

    def gateway_killed(self, holders: Iterable[Holder]) -> None:
        for process in self._gateways():
            process.kill()
            processes.wait_ended(process.pid)
        self._await_gateway()

    def close(self) -> None:
        self.starter.close()
        os.waitpid(self.starter_pid, 0)
        self.server.kill(signal.SIGTERM)
        self.server.close()
        self._kill_left()


#: Ends after which a process stays.
STAYING = ("fork_stays", "killed_beside_fork", "replaced")
#: Exit statuses other than 0.
STATUS = {
    "killed_beside_fork": -signal.SIGKILL,
    "raised": 1,
    "sigterm": -signal.SIGTERM,
    "sigkill": -signal.SIGKILL,
}


def _together(row: Row, ends: Sequence[str]) -> Iterator[list[str]]:
    """The ends that one process of a row may have, one after the other."""
    ends = [end for end in ends if has(row, end)]
    inside = [end for end in ends if Where.of(end) is Where.INSIDE]
    outside = [end for end in ends if Where.of(end) is Where.OUTSIDE]
    if inside:
        yield inside
    if outside and not row.own:
        yield outside
    for end in ends:
        if end not in inside and (row.own or end not in outside):
            yield [end]


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="ascii").splitlines()


def _with_children(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _blocked(pid: int) -> int:
    """The mask of blocked signals of a process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in _lines(f"/proc/{pid}/status"):
            if line.startswith("SigBlk:"):
                return int(line.split()[1], 16)
    return 0


def _called(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return "supervisor" if "shmq" in line and "sys.path +=" in line else line[:120]


def _kind(name: str) -> str:
    """Of a file: its name without what is drawn or counted."""
    name = re.sub(r"(tree|memory|pool)-\d+-\w+", r"\1-N", name)
    name = re.sub(r"embedded-\d+-\w+", "embedded-N", name)
    name = re.sub(r"^(shmq\.[^.:]+)\.\d+$", r"\1.N", name)
    return re.sub(r"^(shmq-gateway-)\w+", r"\1N", name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--ends", nargs="+", default=ALL_ENDS)
    parser.add_argument("--modules", nargs="+", default=[])
    parser.add_argument("--patience", type=float, default=processes.WATCHDOG / 2)
    parser.add_argument("--share", type=float, default=1.0, help="of the cells that are dear")
    parser.add_argument("--seed", default=os.environ.get("SHMQ_TEST_SEED", secrets.token_hex(4)))
    words = parser.parse_args()
    for module in words.modules:
        importlib.import_module(module)
    named = [row for row in ROWS.values() if not words.modules or row.module in words.modules]
    rows = [ROWS[name] for name in words.rows] or named
    machine = Machine(words.directory, words.modules, words.patience)
    print(f"share {words.share}, seed {words.seed}", file=sys.stderr, flush=True)

    def draws(row: Row, end: str) -> bool:
        return random.Random(f"{words.seed} {row.name} {end}").random() < words.share

    try:
        for found in machine.run(rows, words.ends, draws):
            print(json.dumps(found._asdict()), flush=True)
    finally:
        machine.close()
    print(json.dumps({"cells": machine.cells}), flush=True)


if __name__ == "__main__":
    main()
