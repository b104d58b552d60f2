"""Rows of commands of shmq, and of connections that speak a protocol themselves."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping

from lifecycle.ends import ENDS as ALL_ENDS
from lifecycle.handles import CHANNEL, SECONDS, Held, Site, attached, handle
from support.page import login
from support.processes import eventually

from shmq import sources, stats

WORKER = "SHMQ_LIFECYCLE_WORKER"
#: The ends of a program: SIGTERM ("close"), SIGINT ("owner"), SIGKILL, and those from outside.
ENDS = (
    "close",
    "owner",
    "sigkill",
    "stopped_and_continued",
    "supervisor_killed",
    "gateway_killed",
    "instance_stopped",
)


def die_with_the_parent() -> None:
    """Have SIGKILL sent to this process when the thread ends that has started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Program:
    """A command, which is killed when the thread ends that has started it. It must end without a
    traceback."""

    def __init__(self, words: list[str], env: Mapping[str, str] | None = None) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)

        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=self._file,
            env={**os.environ, WORKER: "1", **(env or {})},
            preexec_fn=die_with_the_parent,
        )
        self.pid = self._process.pid

    @property
    def said(self) -> str:
        """Its output so far."""
        fd = self._file.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, while the program runs."""

        def holds() -> object:
            assert self._process.poll() is None, f"the program has ended: {self.said}"
            return condition()

        eventually(holds, SECONDS, self.said)

    def end(self, number: int) -> None:
        """Send a signal, and wait for the end."""
        self._process.send_signal(number)
        self._process.wait()
        said = self.said
        self._file.close()
        assert "Traceback" not in said, said

    def close(self) -> None:
        """SIGTERM."""
        if not self._file.closed:
            self.end(signal.SIGTERM)


def worker() -> None:
    """Called by the module of an application: its worker processes end with the one that has
    started them, as a service manager ends all processes of a service."""
    if os.environ.get(WORKER):
        die_with_the_parent()


class Interrupt:
    """Ends a program by Ctrl-C."""

    def __init__(self, program: Program) -> None:
        self._program = program

    def close(self) -> None:
        """Idempotent."""
        if not self._program._file.closed:
            self._program.end(signal.SIGINT)


def command(site: Site, *words: str) -> Program:
    return Program([sys.executable, "-m", "shmq", *words, "--instance", site.instance])


def held(program: Program) -> Held:
    return Held(program, Interrupt(program))


def joined(pid: int, site: Site, topic: str = "") -> bool:
    """Whether a process has attached, and has a consumer of a channel of the topic."""
    with sources.open_readonly(site.instance) as source:
        now = stats.collect(source)
        if not topic:
            return any(client.pid == pid for client in now.clients)
        return any(
            session.client.pid == pid
            for each in now.topics
            if each.name == topic
            for channel in each.channels
            for session in channel.sessions
        )


@handle(ends=ENDS)
def tail(site: Site) -> Held:
    made = command(site, "tail", site.topic)
    made.until(lambda: joined(made.pid, site, site.topic))
    return held(made)


@handle(ends=ENDS)
def stat_that_watches(site: Site) -> Held:
    made = command(site, "stat", "-i", "0.1")
    made.until(lambda: made.said.count(site.topic) > 1)
    return held(made)


@handle(ends=ENDS)
def page(site: Site) -> Held:
    made = command(site, "page", "--port=0", "--admin")
    made.until(lambda: "http://" in made.said)
    url = next(word for word in made.said.split() if word.startswith("http://"))
    base, headers = login(url)
    ticks = urllib.request.Request(f"{base}ticks", headers=headers)
    with urllib.request.urlopen(ticks, timeout=SECONDS) as answer:
        assert answer.readline()
    return held(made)


def forwarded(site: Site, *words: str) -> Held:
    """A forwarder that has moved three messages."""
    with attached(site) as broker:
        broker.producer(site.topic).publish_many([b"x"] * 3)
    target = f"nsq://127.0.0.1:{site.port}/{site.silent}"
    made = Program([sys.executable, "-m", "shmq", "forward", site.topic, CHANNEL, target, *words])
    with attached(site) as broker:
        made.until(lambda: not _left(broker.channel_stats(site.topic, CHANNEL)))
    return held(made)


def _left(counts: stats.ChannelStats) -> bool:
    return bool(counts.depth or counts.in_flight or counts.leased)


@handle(ends=ENDS, warm=True)
def forwarder(site: Site) -> Held:
    return forwarded(site, "--instance", site.instance)


@handle(ends=ENDS, warm=True)
def forwarder_over_tcp(site: Site) -> Held:
    return forwarded(site, "--from", f"127.0.0.1:{site.port}")


class Connection:
    """A connection of nsqd's protocol, with a subscription and a message in flight."""

    def __init__(self, site: Site) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(SECONDS)
        self._sock.connect(site.address)
        self._sock.sendall(b"  V2SUB %s %s\nRDY 1\n" % (site.topic.encode(), CHANNEL.encode()))
        come = b""
        while b"OK" not in come or len(come) < 40:
            some = self._sock.recv(4096)
            assert some, come
            come += some

    def close(self) -> None:
        """Say nothing more."""
        self._sock.close()


#: Not those after which a forked child lives: it has the connection too, as any of a program's own.
ENDS_OF_A_SOCKET = tuple(
    end
    for ends in ALL_ENDS.values()
    for end in ends
    if end not in ("second", "fork_stays", "killed_beside_fork")
)


@handle(ends=ENDS_OF_A_SOCKET)
def session_of_nsqds_protocol(site: Site) -> Held:
    return Held(Connection(site))
