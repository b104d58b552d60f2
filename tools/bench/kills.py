"""SIGKILL to redelivery: a process holds one message and is killed; the time until another has it.

A run is KILLS kills, each of a new process. The clock begins before the kill and ends when the
other consumer, which waits for a message from then on, has it in its hands. A message that nobody
has after BOUND seconds is lost. nsqd and Redis Streams hand a message out again when it was not
acknowledged for a time that the application chooses; here that is TIME_OUT, for both. In a pool the
message is a task: the clock ends when a worker begins it again, or when the pool says that it does
not."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import struct
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar

from gateway import Server
from peers import RedisStreams
from runs import KILL, PATIENCE, Contestant, Outcome, Plan

KILLS = 6  # of a run: 30 in five rounds
BOUND = 2.0  # seconds after which a message is lost
TIME_OUT = 1.0  # seconds, of brokers that wait for one
ASK_EVERY = 0.01  # seconds between two looks, where a consumer must ask
CHANNEL = "bench"
WORKERS = 2  # of a pool

Hold = Callable[[Any], object]


def _holder(hold: Hold, link: Any, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    held = hold(link)
    pipe.send(os.getpid())
    signal.pause()
    del held


@contextlib.contextmanager
def holder(hold: Hold, link: Any) -> Iterator[int]:
    """The pid of a process that holds a message."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_holder, args=(hold, link, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(3 * PATIENCE):
            raise TimeoutError("the process to be killed got no message")
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def outcome_of(nanoseconds: list[int], lost: int) -> Outcome:
    if not nanoseconds:
        return Outcome(0, lost * BOUND, lost=lost)
    return Outcome(
        len(nanoseconds),
        sum(nanoseconds) / 1e9,
        p50_us=statistics.median(nanoseconds) / 1e3,
        longest_us=max(nanoseconds) / 1e3,
        lost=lost,
    )


# ---- brokers and queues --------------------------------------------------------------------------


class Place(ABC):
    """A queue with one consumer, which takes and acknowledges. hold: what the process to be killed
    does with `link`; its result is alive until then."""

    hold: Hold
    link: Any

    @abstractmethod
    def send(self, body: bytes) -> None: ...

    @abstractmethod
    def take(self) -> bytes:
        """The next message. Raises queue.Empty if none comes within BOUND."""

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Called after the run."""


class Killing(Contestant):
    lines: ClassVar[tuple[str, ...]] = (KILL,)

    def version(self) -> str:
        return ""

    @abstractmethod
    def place(self) -> Place: ...

    def run(self, plan: Plan) -> Outcome:
        nanoseconds, lost = [], 0
        with contextlib.closing(self.place()) as place:
            for number in range(KILLS):
                body = b"%d" % number
                place.send(body)
                with holder(place.hold, place.link) as pid:
                    began = time.monotonic_ns()
                    os.kill(pid, signal.SIGKILL)
                    try:
                        came = place.take()
                    except queue.Empty:
                        lost += 1
                        continue
                    nanoseconds.append(time.monotonic_ns() - began)
                    if came != body:
                        raise RuntimeError(f"{came!r} came, but {body!r} was held")
        return outcome_of(nanoseconds, lost)


def hold_shmq(link: tuple[str, str]) -> object:
    import shmq

    instance, topic = link
    consumer = shmq.attach(instance).consumer(topic, CHANNEL)
    return consumer, consumer.take(PATIENCE)


class ShmqPlace(Place):
    hold = staticmethod(hold_shmq)

    def __init__(self, broker: Any, instance: str) -> None:
        self.link = (instance, KILL)
        broker.create_channel(KILL, CHANNEL)
        self._producer = broker.producer(KILL)
        self._consumer = broker.consumer(KILL, CHANNEL)

    def send(self, body: bytes) -> None:
        self._producer.publish(body)

    def take(self) -> bytes:
        message = self._consumer.take(BOUND)
        if message is None:
            raise queue.Empty
        body: bytes = message.body
        message.finish()
        return body

    def close(self) -> None:
        self._consumer.close()


class OurKills(Killing):
    name = "shmq"

    def __init__(self, broker: Any, instance: str) -> None:
        self._broker, self._instance = broker, instance

    def place(self) -> Place:
        return ShmqPlace(self._broker, self._instance)


class QueuePlace(Place):
    """multiprocessing.Queue."""

    @staticmethod
    def hold(link: Any) -> object:
        return link.get()

    def __init__(self) -> None:
        self.link: Any = multiprocessing.get_context("spawn").Queue()

    def send(self, body: bytes) -> None:
        self.link.put(body)

    def take(self) -> bytes:
        return self.link.get(timeout=BOUND)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.link.close()


class QueueKills(Killing):
    name = "mp.Queue"

    def place(self) -> Place:
        return QueuePlace()


class StreamPlace(Place):
    """A stream and a consumer group."""

    @staticmethod
    def hold(link: tuple[str, str]) -> object:
        return _redis(link[0]).xreadgroup(CHANNEL, "killed", {link[1]: ">"}, block=0)

    def __init__(self, address: str) -> None:
        self._client, self._stream = _redis(address), uuid.uuid4().hex
        self._client.xgroup_create(self._stream, CHANNEL, mkstream=True)
        self.link = (address, self._stream)

    def send(self, body: bytes) -> None:
        self._client.xadd(self._stream, {b"b": body})

    def take(self) -> bytes:
        stream, milliseconds = self._stream, round(TIME_OUT * 1e3)
        deadline = time.monotonic() + BOUND
        while time.monotonic() < deadline:
            found = self._client.xautoclaim(stream, CHANNEL, "other", milliseconds)[1]
            if found:
                ((name, fields),) = found
                self._client.xack(stream, CHANNEL, name)
                return fields[b"b"]  # type: ignore[no-any-return]
            time.sleep(ASK_EVERY)
        raise queue.Empty

    def close(self) -> None:
        self._client.delete(self._stream)


def _redis(address: str) -> Any:
    import redis

    return redis.Redis(unix_socket_path=address)


class StreamKills(Killing):
    name = "Redis Streams"
    note = f"XAUTOCLAIM every {ASK_EVERY * 1e3:.0f} ms of what is idle for {TIME_OUT:g} s"

    def __init__(self, server: RedisStreams) -> None:
        self._server = server

    def version(self) -> str:
        return self._server.version()

    def place(self) -> Place:
        return StreamPlace(self._server.address)


# ---- nsqd's protocol -----------------------------------------------------------------------------


class NsqConnection:
    """A connection of nsqd's protocol, as far as one message at a time needs it."""

    def __init__(self, address: str) -> None:
        host, _, port = address.partition(":")
        self._socket = socket.create_connection((host, int(port)), PATIENCE)
        self.send(b"  V2")

    def send(self, command: bytes) -> None:
        self._socket.sendall(command)

    def ask(self, command: bytes) -> None:
        """Send a command that is answered, and check the answer."""
        self.send(command)
        kind, said = self.frame(PATIENCE)
        if kind != 0 or said != b"OK":
            raise RuntimeError(f"{command!r} was answered by {said!r}")

    def subscribe(self, topic: str) -> None:
        identity = b'{"msg_timeout": %d}' % round(TIME_OUT * 1e3)
        self.ask(b"IDENTIFY\n" + struct.pack(">I", len(identity)) + identity)
        self.ask(b"SUB %s %s\n" % (topic.encode(), CHANNEL.encode()))

    def frame(self, seconds: float) -> tuple[int, bytes]:
        """Type and bytes of the next frame that is no heartbeat. Raises queue.Empty."""
        self._socket.settimeout(seconds)
        try:
            while True:
                size, kind = struct.unpack(">II", self._exactly(8))
                said = self._exactly(size - 4)
                if said != b"_heartbeat_":
                    return kind, said
                self.send(b"NOP\n")
        except TimeoutError:
            raise queue.Empty from None

    def message(self, seconds: float) -> tuple[bytes, bytes]:
        """Id and body of the next message, which is handed out now."""
        self.send(b"RDY 1\n")
        try:
            kind, said = self.frame(seconds)
        finally:
            self.send(b"RDY 0\n")
        if kind != 2:
            raise RuntimeError(f"{said!r} came, and no message")
        return said[10:26], said[26:]

    def _exactly(self, size: int) -> bytes:
        found = b""
        while len(found) < size:
            piece = self._socket.recv(size - len(found))
            if not piece:
                raise RuntimeError("the server ended the connection")
            found += piece
        return found

    def close(self) -> None:
        self._socket.close()


class NsqPlace(Place):
    @staticmethod
    def hold(link: tuple[str, str]) -> object:
        address, topic = link
        connection = NsqConnection(address)
        connection.subscribe(topic)
        return connection, connection.message(PATIENCE)

    def __init__(self, address: str, topic: str) -> None:
        self.link = (address, topic)
        self._topic = topic
        self._out, self._in = NsqConnection(address), NsqConnection(address)
        self._in.subscribe(topic)

    def warm(self) -> None:
        """Wait for a first time-out: nsqd looks for those of a new channel seconds later than for
        others'."""
        self.send(b"first")
        self._in.message(BOUND)
        self._in.send(b"FIN %s\n" % self._in.message(PATIENCE)[0])

    def send(self, body: bytes) -> None:
        head = b"PUB %s\n" % self._topic.encode()
        self._out.ask(head + struct.pack(">I", len(body)) + body)

    def take(self) -> bytes:
        id_, body = self._in.message(BOUND)
        self._in.send(b"FIN %s\n" % id_)
        return body

    def close(self) -> None:
        for connection in (self._out, self._in):
            connection.close()


class ServerKills(Killing):
    """A server that speaks nsqd's protocol. One topic serves all runs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._topic = ""
        self.name = server.name  # type: ignore[misc]
        self.note = f"`msg_timeout` of {TIME_OUT:g} s (default 60)"  # type: ignore[misc]

    def version(self) -> str:
        return self._server.version()

    def place(self) -> Place:
        if self._topic:
            return NsqPlace(self._server.address("TCP"), self._topic)
        self._topic = self._server.topic()
        place = NsqPlace(self._server.address("TCP"), self._topic)
        place.warm()
        return place


# ---- pools ---------------------------------------------------------------------------------------


def held_once(path: str) -> int:
    """A task. Its first run writes its pid there and holds until it is killed; the second one
    returns when it began, in ns."""
    began = time.monotonic_ns()
    try:
        file = open(path, "x")
    except FileExistsError:
        return began
    with file:
        file.write(f"{os.getpid()}\n")
    signal.pause()
    raise AssertionError("it was not killed")


def _pid_in(path: Path) -> int:
    deadline = time.monotonic() + 3 * PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError):
            if (text := path.read_text()).endswith("\n"):
                return int(text)
        time.sleep(0.001)
    raise TimeoutError("no worker began the task")


class PoolKills(Contestant):
    """concurrent.futures.ProcessPoolExecutor, new for each kill: it does not survive one."""

    name = "ProcessPoolExecutor"
    lines: ClassVar[tuple[str, ...]] = (KILL,)
    note = "the time until BrokenProcessPool"

    def version(self) -> str:
        return ""

    def pool(self) -> Any:
        return ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn"))

    def ended(self, future: Future[int]) -> int | None:
        """When the pool was done with the killed task, in ns; None: BOUND is over."""
        try:
            future.result(BOUND)
        except BrokenProcessPool:
            return time.monotonic_ns()
        except TimeoutError:
            return None
        raise RuntimeError("the task had a result")

    def run(self, plan: Plan) -> Outcome:
        nanoseconds, lost = [], 0
        for _ in range(KILLS):
            with tempfile.TemporaryDirectory() as folder, self.pool() as pool:
                path = Path(folder, "pid")
                future = pool.submit(held_once, str(path))
                pid = _pid_in(path)
                began = time.monotonic_ns()
                os.kill(pid, signal.SIGKILL)
                ended = self.ended(future)
                if ended is not None:
                    nanoseconds.append(ended - began)
                lost += not self.goes_on(ended)
        return outcome_of(nanoseconds, lost)

    def goes_on(self, ended: int | None) -> bool:
        """Whether the task was not lost."""
        return False


class OurPoolKills(PoolKills):
    """shmq.Executor."""

    name = "shmq Executor"
    note = f"{WORKERS} workers; until a worker begins the task again"

    def pool(self) -> Any:
        import shmq

        return shmq.Executor(WORKERS)

    def ended(self, future: Future[int]) -> int | None:
        try:
            return future.result(BOUND)
        except TimeoutError:
            return None

    def goes_on(self, ended: int | None) -> bool:
        return ended is not None


def kills(servers: Sequence[Server], others: Sequence[Contestant]) -> list[Contestant]:
    """The contestants beside shmq's own; those that need a server use one of these."""
    redis = [StreamKills(other) for other in others if isinstance(other, RedisStreams)]
    return [*map(ServerKills, servers), QueueKills(), PoolKills(), *redis]
