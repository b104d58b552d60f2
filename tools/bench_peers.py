"""The contestants of tools/bench.py: how each carries bodies from one process to another.

Each contestant makes a link in the parent; the link goes to two fresh processes (spawned, not
forked), which open their ends of it and run the loops below. What is in a loop is measured, what is
before `job.start` is not. Every loop uses its contestant's cheapest documented calls for bytes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import time
import uuid
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

ONE, MADE, LOOPED, NUMPY = "one", "lists", "loops", "numpy"
APART, TOGETHER = "roundtrip", "roundtrip1"
ROUND_TRIPS = (APART, TOGETHER)
LINES = {
    ONE: "one at a time",
    MADE: "lists, bodies made",
    LOOPED: "lists, bodies looped over",
    NUMPY: "numpy and Arrow",
    APART: "blocking round trip, two cores",
    TOGETHER: "blocking round trip, one core",
}
PATIENCE = 10.0  # seconds to wait for a message or for room; longer means something is broken
CHECK_EVERY = 100  # messages between two looks at the clock
END = b"end"  # the last body of a run; shorter than any other


@dataclass(frozen=True)
class Plan:
    """What is the same for all contestants of a line."""

    line: str
    seconds: float
    size: int
    count: int  # bodies in a list
    capacity: int  # messages that wait at most, for peers that can be told
    memory: int  # shmq's mem_queue_size
    window: int  # messages shmq's producer lets be under way before it pauses; 0: no such limit

    @property
    def cpus(self) -> tuple[int, int] | None:
        """Where the two processes of a round trip run, because the kernel's choice between one
        core and two would decide the figure; None: where it likes."""
        cpus = sorted(os.sched_getaffinity(0))
        if self.line not in ROUND_TRIPS:
            return None
        return (cpus[0], cpus[-1] if self.line == APART else cpus[0])


class Lacking(Exception):
    """A contestant that is not there, and why."""


# ---- the two processes -----------------------------------------------------------------------


class Ends:
    """One side of a run: reports when it is ready and begins together with the other one."""

    def __init__(self, plan: Plan, pipe: Any) -> None:
        self.plan, self._pipe = plan, pipe

    def start(self) -> int:
        gc.collect()
        gc.freeze()
        self._pipe.send("ready")
        self._pipe.recv()
        return time.monotonic_ns()


def _child(
    role: Callable[..., dict[str, float]], link: Any, plan: Plan, cpu: int | None, pipe: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    try:
        pipe.send(role(link, Ends(plan, pipe)))
        pipe.recv()  # the other side is done too: closing now loses nothing (it did with zmq)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent is gone
            pipe.send(error if type(error).__module__ == "builtins" else RuntimeError(repr(error)))


@dataclass
class Outcome:
    """One run: messages and seconds, or round trips and their quantiles in microseconds."""

    messages: int
    seconds: float
    p50_us: float | None = None
    p99_us: float | None = None
    fill: float | None = None  # median of the queue's fill level, 0 to 1
    spilled: int = 0
    paused: int = 0  # times the producer waited for the window

    @property
    def rate(self) -> float:
        return self.messages / self.seconds


def run_pair(
    first: Callable[..., dict[str, float]],
    second: Callable[..., dict[str, float]],
    link: Any,
    plan: Plan,
    level: Callable[[], float | None],
) -> Outcome:
    """Run both roles in processes of their own; `level` is asked 20 times a second meanwhile."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        here, there = plan.cpus or (None, None)
        for role, cpu in ((second, there), (first, here)):  # who takes is there before who sends
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_child, args=(role, link, plan, cpu, theirs), daemon=True, name=role.__name__
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _receive(pipe, 30)
        for pipe in pipes:
            pipe.send("go")
        levels = _sample(level, pipes[0], plan.seconds)
        reports = [_receive(pipe, plan.seconds + 3 * PATIENCE) for pipe in pipes]
        for pipe in pipes:
            pipe.send("done")
        for process in processes:
            process.join(PATIENCE)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join(1)
                process.kill()
    report = {**reports[0], **reports[1]}
    return Outcome(
        messages=int(report["messages"]),
        seconds=(report["ended"] - report["began"]) / 1e9,
        p50_us=report.get("p50_us"),
        p99_us=report.get("p99_us"),
        fill=sorted(levels)[len(levels) // 2] if levels else None,
        paused=int(report.get("paused", 0)),
    )


def _receive(pipe: Any, timeout: float) -> Any:
    if not pipe.poll(timeout):
        raise TimeoutError(f"no answer from a process of the run within {timeout:.0f} s")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _sample(level: Callable[[], float | None], pipe: Any, seconds: float) -> list[float]:
    """Fill levels while the producer is at it, without the first tenth."""
    levels = []
    began = time.monotonic()
    while (past := time.monotonic() - began) < seconds and not pipe.poll(0.05):
        now = level()
        if now is not None and past > seconds / 10:
            levels.append(now)
    return levels


def list_of_bodies(plan: Plan) -> list[bytes]:
    """Each another object, or pickle would send one and 199 references to it."""
    return [bytes(bytearray(b"x" * plan.size)) for _ in range(plan.count)]


def quantiles(samples: array[int]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "messages": len(ordered),
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
    }


# ---- loops of the contestants that only send and receive ----------------------------------------


def send_loop(link: Link, ends: Ends) -> dict[str, float]:
    plan, send = ends.plan, link.sender()
    many = plan.line != ONE
    body: Any = list_of_bodies(plan) if many else b"x" * plan.size
    repeat = range(1 if many else CHECK_EVERY)
    send(body)  # what is set up at the first message is set up now
    clock = time.monotonic_ns
    began = ends.start()
    end = began + int(plan.seconds * 1e9)
    while clock() < end:
        for _ in repeat:
            send(body)
    send([END] if many else END)
    link.close()
    return {"began": began}


def receive_loop(link: Link, ends: Ends) -> dict[str, float]:
    plan, receive = ends.plan, link.receiver()
    size = plan.size
    received = 0
    receive()
    if plan.line == ONE:
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


def call_loop(links: tuple[Link, Link], ends: Ends) -> dict[str, float]:
    send, receive = links[0].sender(), links[1].receiver()
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
    receive, send = links[0].receiver(), links[1].sender()
    size = ends.plan.size
    send(receive())
    ends.start()
    while len(body := receive()) == size:
        send(body)
    links[1].close()
    return {}


class Link(ABC):
    """One direction. Goes to the processes by pickling; each then opens one end."""

    @abstractmethod
    def sender(self) -> Callable[[Any], Any]: ...

    @abstractmethod
    def receiver(self) -> Callable[[], Any]: ...

    def close(self) -> None:  # noqa: B027  # most have nothing to do
        """Called by the sending side when all is sent."""

    def level(self) -> float | None:
        return None


class Contestant(ABC):
    name: ClassVar[str]
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, LOOPED, *ROUND_TRIPS)
    note: ClassVar[str] = ""
    list_note: ClassVar[str] = ""

    @abstractmethod
    def version(self) -> str:
        """Raises ImportError or Lacking when it cannot run here."""

    @abstractmethod
    def run(self, plan: Plan) -> Outcome: ...


class Peer(Contestant):
    @abstractmethod
    def link(self, plan: Plan) -> Link: ...

    def run(self, plan: Plan) -> Outcome:
        if plan.line in ROUND_TRIPS:
            links = self.link(plan), self.link(plan)
            return run_pair(call_loop, answer_loop, links, plan, lambda: None)
        link = self.link(plan)
        return run_pair(send_loop, receive_loop, link, plan, link.level)


# ---- multiprocessing ----------------------------------------------------------------------------


class QueueLink(Link):
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queue: Any = multiprocessing.get_context("spawn").Queue(capacity)

    def sender(self) -> Callable[[Any], Any]:
        return self._queue.put  # type: ignore[no-any-return]

    def receiver(self) -> Callable[[], Any]:
        return self._queue.get  # type: ignore[no-any-return]

    def close(self) -> None:
        self._queue.close()
        self._queue.join_thread()

    def level(self) -> float | None:
        return float(self._queue.qsize()) / self._capacity


class MultiprocessingQueue(Peer):
    name = "mp.Queue"
    note = "a thread of the producer feeds it"
    list_note = "a list is one object"

    def version(self) -> str:
        return ""

    def link(self, plan: Plan) -> Link:
        return QueueLink(plan.capacity if plan.line == ONE else max(1, plan.capacity // plan.count))


class PipeLink(Link):
    def __init__(self, as_bytes: bool) -> None:
        self._as_bytes = as_bytes
        self._reader, self._writer = multiprocessing.get_context("spawn").Pipe(duplex=False)

    def sender(self) -> Callable[[Any], Any]:
        return self._writer.send_bytes if self._as_bytes else self._writer.send

    def receiver(self) -> Callable[[], Any]:
        return self._reader.recv_bytes if self._as_bytes else self._reader.recv


class MultiprocessingPipe(Peer):
    name = "mp.Pipe"
    note = "send_bytes; holds 64 KiB"
    list_note = "a list is one object"

    def version(self) -> str:
        return ""

    def link(self, plan: Plan) -> Link:
        return PipeLink(plan.line in (ONE, *ROUND_TRIPS))


# ---- faster-fifo --------------------------------------------------------------------------------


def _same(body: Any) -> Any:
    return body


class FifoLink(Link):
    def __init__(self, plan: Plan, raw: bool) -> None:
        import faster_fifo
        import faster_fifo_reduction  # noqa: F401  # makes it go to spawned processes

        self._many = plan.line in (MADE, LOOPED)
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

    def receiver(self) -> Callable[[], Any]:
        if self._many:
            get_many, count = self._queue.get_many, self._count
            return lambda: get_many(timeout=PATIENCE, max_messages_to_get=count)
        get = self._queue.get
        return lambda: get(timeout=PATIENCE)

    def level(self) -> float | None:
        return float(self._queue.qsize()) / self._capacity


class FasterFifo(Peer):
    name = "faster-fifo"
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


# ---- pyzmq --------------------------------------------------------------------------------------


class ZmqLink(Link):
    def __init__(self, plan: Plan, directory: Path) -> None:
        self._address = f"ipc://{directory}/{uuid.uuid4().hex}"
        self._many = plan.line in (MADE, LOOPED)
        waiting = plan.capacity // (plan.count if self._many else 1)
        self._mark = max(1, waiting // 2)  # of each of the two sides
        self._socket: Any = None

    def _open(self, kind: str) -> Any:
        import zmq

        self._socket = zmq.Context.instance().socket(getattr(zmq, kind))
        self._socket.set_hwm(self._mark)
        self._socket.linger = 0  # it is closed when both sides are done
        self._socket.sndtimeo = self._socket.rcvtimeo = int(3 * PATIENCE * 1000)
        if kind == "PUSH":
            self._socket.bind(self._address)
        else:
            self._socket.connect(self._address)
        return self._socket

    def sender(self) -> Callable[[Any], Any]:
        socket = self._open("PUSH")
        return socket.send_multipart if self._many else socket.send  # type: ignore[no-any-return]

    def receiver(self) -> Callable[[], Any]:
        socket = self._open("PULL")
        return socket.recv_multipart if self._many else socket.recv  # type: ignore[no-any-return]


class Zmq(Peer):
    name = "pyzmq ipc"
    note = "PUSH and PULL"
    list_note = "a list is one multipart message"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch

    def version(self) -> str:
        import zmq

        return f"{zmq.__version__}, libzmq {zmq.zmq_version()}"

    def link(self, plan: Plan) -> Link:
        return ZmqLink(plan, self._scratch)


# ---- shmq ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shmq:
    """The link: names, and a word by which the consumer tells how far it is."""

    instance: str
    there: str
    back: str
    taken: Any
    form: str


CHANNEL = "bench"


def shmq_send(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    plan, taken = ends.plan, link.taken
    with shmq.attach(link.instance) as broker:
        producer = broker.producer(link.there)
        bodies, n = _bodies(plan, link.form)
        publish: Any = producer.publish if plan.line == ONE else producer.publish_many
        repeat = range(CHECK_EVERY if plan.line == ONE else 1)
        step = len(repeat) * n
        publish(bodies, timeout=PATIENCE)
        sent, paused = n, 0
        window = plan.window or 1 << 62
        clock = time.monotonic_ns
        began = ends.start()
        end = began + int(plan.seconds * 1e9)
        while clock() < end:
            for _ in repeat:
                publish(bodies, timeout=PATIENCE)
            sent += step
            if sent - taken.value > window:
                paused += 1
                while sent - taken.value > window // 2 and clock() < end:
                    time.sleep(0.0001)
        producer.publish(END, timeout=PATIENCE)
        return {"began": began, "paused": paused}


def _bodies(plan: Plan, form: str) -> tuple[Any, int]:
    if plan.line == ONE:
        return b"x" * plan.size, 1
    bodies = list_of_bodies(plan)
    if form == "Arrow":
        import pyarrow

        return pyarrow.array(bodies, pyarrow.binary()), plan.count
    if form == "numpy":
        import numpy

        return numpy.full((plan.count, plan.size), ord("x"), numpy.uint8), plan.count
    return bodies, plan.count


def shmq_receive(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    with shmq.attach(link.instance) as broker:
        consumer = broker.consumer(link.there, CHANNEL, max_in_flight=max(200, ends.plan.count))
        loop = {ONE: _take_one, MADE: _take_lists, LOOPED: _take_loops, NUMPY: _take_numpy}[
            ends.plan.line
        ]
        if link.form == "Arrow":
            loop = _take_arrow
        first = consumer.take_many(ends.plan.count, timeout=3 * PATIENCE)
        first.finish()
        link.taken.value = len(first)
        ends.start()
        received = loop(consumer, ends.plan, link.taken)
        ended = time.monotonic_ns()
        return {"messages": received, "ended": ended}


def _take_one(consumer: Any, plan: Plan, taken: Any) -> int:
    take, size, received, before = consumer.take, plan.size, 0, taken.value
    while True:
        for _ in range(CHECK_EVERY):
            message = take(PATIENCE)
            body = message.body
            message.finish()
            if len(body) != size:
                return received
            received += 1
        taken.value = before + received


def _take_lists(consumer: Any, plan: Plan, taken: Any) -> int:
    take_many, count, size = consumer.take_many, plan.count, plan.size
    received, before = 0, taken.value
    while True:
        batch = take_many(count, PATIENCE)
        bodies = batch.bodies()
        batch.finish()
        received += len(bodies)
        if len(bodies[-1]) != size:
            return received - 1
        taken.value = before + received


def _take_loops(consumer: Any, plan: Plan, taken: Any) -> int:
    take_many, count, size = consumer.take_many, plan.count, plan.size
    received, before = 0, taken.value
    while True:
        batch = take_many(count, PATIENCE)
        bodies = batch.bodies()
        for body in bodies:
            received += len(body)
        batch.finish()
        if len(bodies[-1]) != size:
            return received // size
        taken.value = before + received // size


def _take_numpy(consumer: Any, plan: Plan, taken: Any) -> int:
    from numpy import frombuffer, uint8

    take_many, count, size = consumer.take_many, plan.count, plan.size
    received, before = 0, taken.value
    while True:
        batch = take_many(count, PATIENCE)
        data = frombuffer(batch.column("data"), uint8)
        batch.finish()
        received += data.size
        if data.size % size:
            return received // size
        taken.value = before + received // size


def _take_arrow(consumer: Any, plan: Plan, taken: Any) -> int:
    take_many, count = consumer.take_many, plan.count
    size = plan.size
    received, before = 0, taken.value
    while True:
        batch = take_many(count, PATIENCE)
        bodies = batch.to_arrow()["body"]
        batch.finish()
        received += len(bodies)
        if batch.column("data").nbytes % size:
            return received - 1
        taken.value = before + received


def shmq_call(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    with shmq.attach(link.instance) as broker:
        publish = broker.producer(link.there).publish
        take: Callable[[float], Any] = broker.consumer(link.back, CHANNEL).take
        body = b"x" * ends.plan.size
        samples = array("q")
        publish(body)
        take(3 * PATIENCE).finish()
        clock = time.monotonic_ns
        began = before = ends.start()
        end = began + int(ends.plan.seconds * 1e9)
        while before < end:
            publish(body)
            message = take(PATIENCE)
            message.body  # noqa: B018
            message.finish()
            now = clock()
            samples.append(now - before)
            before = now
        publish(END)
        return {"began": began, "ended": before, **quantiles(samples)}


def shmq_answer(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    with shmq.attach(link.instance) as broker:
        publish = broker.producer(link.back).publish
        take: Callable[[float], Any] = broker.consumer(link.there, CHANNEL).take
        size = ends.plan.size
        message = take(3 * PATIENCE)
        publish(message.body)
        message.finish()
        ends.start()
        while True:
            message = take(PATIENCE)
            body = message.body
            if len(body) != size:
                message.finish()
                return {}
            publish(body)
            message.finish()


class OurBroker(Contestant):
    """shmq itself: every message is acknowledged, one instance serves all runs."""

    name = "shmq"
    note = "take, body, finish"
    form = "list"

    def __init__(self, broker: Any, instance: str) -> None:
        self._broker, self._instance = broker, instance

    def version(self) -> str:
        import shmq

        return shmq.__version__

    def run(self, plan: Plan) -> Outcome:
        taken = multiprocessing.get_context("spawn").RawValue("Q", 0)
        kind = f"{plan.line}-{self.form}"
        link = Shmq(self._instance, f"{kind}-there", f"{kind}-back", taken, self.form)
        self._broker.create_channel(link.there, CHANNEL)
        self._broker.create_channel(link.back, CHANNEL)
        self._broker.empty_channel(link.there, CHANNEL)
        self._broker.empty_channel(link.back, CHANNEL)
        if plan.line in ROUND_TRIPS:
            return run_pair(shmq_call, shmq_answer, link, plan, lambda: None)
        before = self._spilled(link.there)
        outcome = run_pair(
            shmq_send, shmq_receive, link, plan, lambda: self._depth(link.there) / plan.memory
        )
        outcome.spilled = self._spilled(link.there) - before
        return outcome

    def _depth(self, topic: str) -> int:
        return int(self._broker.stats().channel(topic, CHANNEL).depth)

    def _spilled(self, topic: str) -> int:
        return int(self._broker.stats().channel(topic, CHANNEL).spilled)


class OurNumpy(OurBroker):
    name = "shmq numpy"
    note = "2-D uint8; the consumer's column"
    lines: ClassVar[tuple[str, ...]] = (NUMPY,)
    form = "numpy"


class OurArrow(OurBroker):
    name = "shmq Arrow"
    note = "binary array; to_arrow()"
    lines: ClassVar[tuple[str, ...]] = (NUMPY,)
    form = "Arrow"

    def version(self) -> str:
        import pyarrow

        return f"{super().version()}, pyarrow {pyarrow.__version__}"


class Core(Contestant):
    """native/bench/bench_core.c: shmq.h without Python and without a supervisor beside it."""

    name = "C core"
    lines = (ONE, MADE, NUMPY, *ROUND_TRIPS)
    note = "shmq.h from C, bodies copied"

    def __init__(self, executable: Path | None) -> None:
        self._executable = executable

    def version(self) -> str:
        if self._executable is None:
            raise Lacking("no build/*/bench_core and no C compiler's result")
        return str(self._executable)

    def run(self, plan: Plan) -> Outcome:
        what = {ONE: "one", APART: "roundtrip", TOGETHER: "roundtrip"}.get(plan.line, "batch")
        numbers: dict[str, Any] = {
            "seconds": plan.seconds,
            "size": plan.size,
            "batch": plan.count,
            "memory": plan.memory,
        }
        if plan.cpus:
            numbers["cpus"] = "{},{}".format(*plan.cpus)
        arguments = [str(item) for name, value in numbers.items() for item in (f"--{name}", value)]
        done = subprocess.run(
            [os.fspath(self._executable or ""), what, *arguments],
            capture_output=True,
            text=True,
            timeout=plan.seconds + 3 * PATIENCE,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or f"exit status {done.returncode}")
        report = json.loads(done.stdout)
        outcome = Outcome(int(report["messages"]), report["seconds"])
        if plan.line in ROUND_TRIPS:
            outcome.p50_us, outcome.p99_us = report["p50_us"], report["p99_us"]
        else:
            full, empty = report["waits_full"], report["waits_empty"]
            outcome.fill = full / (full + empty) if full + empty else None
        return outcome
