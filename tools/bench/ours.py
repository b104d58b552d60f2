"""shmq among the contestants of tools/bench/bench.py: every message is acknowledged, one instance
serves all runs; and its C core without Python."""

from __future__ import annotations

import functools
import math
import mmap
import multiprocessing
import os
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from runs import (
    APART,
    CHECK_EVERY,
    END,
    EXPIRY,
    IN_PLACE,
    LARGE,
    LINES,
    LOOPED,
    MADE,
    MANY,
    MANY_PROCESSES,
    NUMPY,
    ONE,
    PATIENCE,
    QUIET,
    ROUND_TRIPS,
    TOGETHER,
    Contestant,
    Ends,
    Lacking,
    Outcome,
    Plan,
    Role,
    list_of_bodies,
    quantiles,
    report_of,
    run_many,
    run_pair,
)

CHANNEL = "bench"
LARGE_WINDOW = 16  # large bodies under way
Counter = Any  # an array of numbers in shared memory, or one element of it


@dataclass(frozen=True)
class Shmq:
    """The link: names, and words by which each side tells how far it is."""

    instance: str
    there: str
    back: str
    sent: Counter
    taken: Counter
    form: str


# ---- one way -------------------------------------------------------------------------------------


def shmq_send(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    plan, number = ends.plan, ends.number
    window = LARGE_WINDOW if plan.line == LARGE else plan.window or 1 << 62
    with shmq.attach(link.instance) as broker:
        publish, bodies, n = _publisher(broker.producer(link.there), plan, link.form)
        repeat = range(CHECK_EVERY if plan.line == ONE else 1)
        step = len(repeat) * n
        publish(bodies, timeout=PATIENCE)
        sent, paused = n, 0
        clock = time.monotonic_ns
        began = ends.start()
        end = began + int(plan.seconds * 1e9)
        while clock() < end:
            for _ in repeat:
                publish(bodies, timeout=PATIENCE)
            link.sent[number] = sent = sent + step
            if sum(link.sent) - sum(link.taken) > window:
                paused += 1
                while sum(link.sent) - sum(link.taken) > window // 2 and clock() < end:
                    time.sleep(0.0001)
        if plan.line != MANY:  # there the consumers end by themselves
            broker.producer(link.there).publish(END, timeout=PATIENCE)
        return {"began": began, "paused": paused}


def _publisher(producer: Any, plan: Plan, form: str) -> tuple[Callable[..., Any], Any, int]:
    """A call, its argument, and the number of messages it publishes."""
    if plan.line == LARGE:
        body = bytes(bytearray(os.urandom(plan.size)))
        write_in_place = functools.partial(_write_in_place, producer)
        return write_in_place if form == "loan" else producer.publish, body, 1
    if plan.line == ONE:
        return producer.publish, b"x" * plan.size, 1
    bodies: Any = list_of_bodies(plan)
    if form == "Arrow":
        import pyarrow

        bodies = pyarrow.array(bodies, pyarrow.binary())
    elif form == "numpy":
        import numpy

        bodies = numpy.full((plan.count, plan.size), ord("x"), numpy.uint8)
    return producer.publish_many, bodies, plan.count


def _write_in_place(producer: Any, data: bytes, timeout: float) -> None:
    with producer.loan(len(data), timeout=timeout, zero=False) as buffer:  # all of it is written
        buffer[:] = data


def shmq_receive(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    plan = ends.plan
    with shmq.attach(link.instance) as broker:
        consumer = broker.consumer(link.there, CHANNEL, max_in_flight=max(200, plan.count))
        loop = LOOPS[plan.line, link.form]
        first = consumer.take_many(1 if plan.line == LARGE else plan.count, timeout=3 * PATIENCE)
        first.finish()
        link.taken[0] = len(first)
        ends.start()
        received = loop(consumer, plan, link.taken)
        ended = time.monotonic_ns()
        return {"messages": received, "ended": ended}


def shmq_receive_until_quiet(link: Shmq, ends: Ends) -> dict[str, float]:
    """One of many: ends when nothing has come for a while. The first lists are counted too."""
    import shmq

    plan, received = ends.plan, 0
    with shmq.attach(link.instance) as broker:
        consumer = broker.consumer(link.there, CHANNEL, max_in_flight=max(200, plan.count))
        take_many, count = consumer.take_many, plan.count
        ended = ends.start()
        while batch := take_many(count, QUIET):
            received += len(batch.bodies())
            batch.finish()
            link.taken[ends.number] = received
            ended = time.monotonic_ns()
        return {"messages": received, "ended": ended}


def _take_one(consumer: Any, plan: Plan, taken: Counter) -> int:
    take, size, received, before = consumer.take, plan.size, 0, taken[0]
    while True:
        for _ in range(CHECK_EVERY):
            message = take(PATIENCE)
            body = message.body
            message.finish()
            if len(body) != size:
                return received
            received += 1
        taken[0] = before + received


def _take_lists(consumer: Any, plan: Plan, taken: Counter) -> int:
    take_many, count, size = consumer.take_many, plan.count, plan.size
    received, before = 0, taken[0]
    while True:
        batch = take_many(count, PATIENCE)
        bodies = batch.bodies()
        batch.finish()
        received += len(bodies)
        if len(bodies[-1]) != size:
            return received - 1
        taken[0] = before + received


def _take_loops(consumer: Any, plan: Plan, taken: Counter) -> int:
    take_many, count, size = consumer.take_many, plan.count, plan.size
    received, before = 0, taken[0]
    while True:
        batch = take_many(count, PATIENCE)
        bodies = batch.bodies()
        for body in bodies:
            received += len(body)
        batch.finish()
        if len(bodies[-1]) != size:
            return received // size
        taken[0] = before + received // size


def _take_numpy(consumer: Any, plan: Plan, taken: Counter) -> int:
    from numpy import frombuffer, uint8

    take_many, count, size = consumer.take_many, plan.count, plan.size
    received, before = 0, taken[0]
    while True:
        batch = take_many(count, PATIENCE)
        data = frombuffer(batch.column("data"), uint8)
        batch.finish()
        received += data.size
        if data.size % size:
            return received // size
        taken[0] = before + received // size


def _take_arrow(consumer: Any, plan: Plan, taken: Counter) -> int:
    take_many, count = consumer.take_many, plan.count
    size = plan.size
    received, before = 0, taken[0]
    while True:
        batch = take_many(count, PATIENCE)
        bodies = batch.to_arrow().column(3)
        batch.finish()
        received += len(bodies)
        if batch.column("data").nbytes % size:
            return received - 1
        taken[0] = before + received


def _take_large(consumer: Any, plan: Plan, taken: Counter) -> int:
    take, size, received, before = consumer.take, plan.size, 0, taken[0]
    while True:
        message = take(PATIENCE)
        body = message.body
        message.finish()
        if len(body) != size:
            return received
        received += 1
        taken[0] = before + received


def _take_views(consumer: Any, plan: Plan, taken: Counter) -> int:
    take, size, received, before = consumer.take, plan.size, 0, taken[0]
    while True:
        message = take(PATIENCE)
        if len(message) != size:
            message.finish()
            return received
        with message.view as view:
            _ = view[0], view[-1]
        message.finish()
        received += 1
        taken[0] = before + received


LOOPS: dict[tuple[str, str], Callable[[Any, Plan, Counter], int]] = {
    (ONE, "list"): _take_one,
    (MADE, "list"): _take_lists,
    (LOOPED, "list"): _take_loops,
    (NUMPY, "numpy"): _take_numpy,
    (NUMPY, "Arrow"): _take_arrow,
    (LARGE, "list"): _take_large,
    (LARGE, "loan"): _take_views,
}


# ---- there and back ------------------------------------------------------------------------------


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


def shmq_request(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    with shmq.attach(link.instance) as broker:
        request, topic, body = broker.request, link.there, b"x" * ends.plan.size
        samples = array("q")
        request(topic, body, 3 * PATIENCE)
        clock = time.monotonic_ns
        began = before = ends.start()
        end = began + int(ends.plan.seconds * 1e9)
        while before < end:
            request(topic, body, PATIENCE)
            now = clock()
            samples.append(now - before)
            before = now
        broker.producer(topic).publish(END)
        return {"began": began, "ended": before, **quantiles(samples)}


def shmq_reply(link: Shmq, ends: Ends) -> dict[str, float]:
    import shmq

    with shmq.attach(link.instance) as broker:
        take: Callable[[float], Any] = broker.consumer(link.there, CHANNEL).take
        size = ends.plan.size
        message = take(3 * PATIENCE)
        message.reply(message.body)
        message.finish()
        ends.start()
        while len(body := (message := take(PATIENCE)).body) == size:
            message.reply(body)
            message.finish()
        message.finish()
        return {}


# ---- the contestants -----------------------------------------------------------------------------


class OurBroker(Contestant):
    name = "shmq"
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, LOOPED, MANY, *ROUND_TRIPS)
    note = "take, body, finish"
    form = "list"
    there_and_back: ClassVar[tuple[Role, Role]] = (shmq_call, shmq_answer)

    def __init__(self, broker: Any, instance: str) -> None:
        self._broker, self._instance = broker, instance

    def version(self) -> str:
        import shmq

        return shmq.__version__

    def run(self, plan: Plan) -> Outcome:
        context = multiprocessing.get_context("spawn")
        sent, taken = (context.RawArray("Q", MANY_PROCESSES) for _ in range(2))
        kind = f"{plan.line}-{self.form}"
        link = Shmq(self._instance, f"{kind}-there", f"{kind}-back", sent, taken, self.form)
        for topic in (link.there, link.back):
            self._broker.create_channel(topic, CHANNEL)
            self._broker.empty_channel(topic, CHANNEL)
        if plan.line in ROUND_TRIPS:
            return run_pair(*self.there_and_back, link, plan)
        before = self._stats(link.there).spilled

        def level() -> float:
            return float(self._stats(link.there).depth) / plan.memory

        if plan.line == MANY:
            outcome = run_many(shmq_send, shmq_receive_until_quiet, link, plan, level)
        else:
            outcome = run_pair(shmq_send, shmq_receive, link, plan, level)
        outcome.spilled = self._stats(link.there).spilled - before
        return outcome

    def _stats(self, topic: str) -> Any:
        return self._broker.stats().channel(topic, CHANNEL)


class OurRequests(OurBroker):
    name = "shmq request"
    lines: ClassVar[tuple[str, ...]] = ROUND_TRIPS
    note = "request, reply: a message there, a value in a results store back"
    form = "request"
    there_and_back: ClassVar[tuple[Role, Role]] = (shmq_request, shmq_reply)


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


class OurLoans(OurBroker):
    name = "shmq in place"
    note = "loan, view, finish"
    lines: ClassVar[tuple[str, ...]] = (LARGE,)
    form = "loan"


class OurCopies(OurBroker):
    name = "shmq copied"
    note = "publish, body, finish"
    lines: ClassVar[tuple[str, ...]] = (LARGE,)


class Memcpy(Contestant):
    """The measure for writing in place: a copy into pages that are there, and nothing else."""

    name = "memcpy"
    lines: ClassVar[tuple[str, ...]] = (LARGE,)
    note = "into 64 MiB of warm shared pages, in turn"
    span = 64 << 20

    def version(self) -> str:
        return ""

    def run(self, plan: Plan) -> Outcome:
        body = bytes(bytearray(os.urandom(plan.size)))
        places = range(0, self.span, plan.size)
        done, seconds = 0, 0.0
        with mmap.mmap(-1, self.span) as memory, memoryview(memory) as view:
            for turn in range(1 << 30):
                began = time.monotonic_ns()
                for at in places:
                    view[at : at + plan.size] = body
                if turn:  # the first makes the pages
                    done += len(places)
                    seconds += (time.monotonic_ns() - began) / 1e9
                if seconds > plan.seconds:
                    break
        return Outcome(done, seconds)


class MemcpyInCache(Memcpy):
    name = "memcpy in cache"
    note = "always into the same 1 MiB"
    span = 1 << 20


class Taking(Contestant):
    """Takes bodies of one size without copying them. Alone, so that nothing else is measured."""

    lines: ClassVar[tuple[str, ...]] = (IN_PLACE,)
    note = "take, first and last byte of the view, finish"

    def __init__(self, broker: Any, size: int) -> None:
        self._broker, self._size = broker, size
        self.name = f"shmq {size >> 10} KiB"  # type: ignore[misc]

    def version(self) -> str:
        return ""

    def run(self, plan: Plan) -> Outcome:
        topic, nanoseconds, done = "in-place", 0, 0
        self._broker.create_channel(topic, CHANNEL)
        self._broker.empty_channel(topic, CHANNEL)
        body = bytes(self._size)
        end = time.monotonic_ns() + int(plan.seconds * 1e9)
        with (
            self._broker.producer(topic) as producer,
            self._broker.consumer(topic, CHANNEL, max_in_flight=200) as consumer,
        ):
            take = consumer.take
            while time.monotonic_ns() < end:
                for _ in range(LARGE_WINDOW):
                    producer.publish(body, timeout=PATIENCE)
                began = time.monotonic_ns()
                for _ in range(LARGE_WINDOW):
                    message = take(PATIENCE)
                    with message.view as view:
                        _ = view[0], view[-1]
                    message.finish()
                nanoseconds += time.monotonic_ns() - began
                done += LARGE_WINDOW
        return Outcome(done, nanoseconds / 1e9)


class Core(Contestant):
    """native/bench/bench_core.c: shmq.h without Python and without a supervisor beside it."""

    name = "C core"
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, NUMPY, *ROUND_TRIPS)
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
        report = self._report(plan, what, numbers)
        outcome = Outcome.reported(report)
        if plan.line not in ROUND_TRIPS:
            full, empty = report["waits_full"], report["waits_empty"]
            outcome.fill = full / (full + empty) if full + empty else None
        return outcome

    def _report(self, plan: Plan, what: str, numbers: dict[str, Any]) -> Any:
        return report_of(self._executable or Path(), what, numbers, plan.seconds)


class Expiring(Core):
    """The scan's part of a timeout: of this many in flight, the oldest go back."""

    lines: ClassVar[tuple[str, ...]] = (EXPIRY,)
    note = "in flight; shmq_expire, 256 at a time"

    def __init__(self, executable: Path | None, in_flight: int) -> None:
        super().__init__(executable)
        self._in_flight = in_flight
        self.name = f"10^{round(math.log10(in_flight))}"  # type: ignore[misc]

    def run(self, plan: Plan) -> Outcome:
        numbers = {"seconds": plan.seconds, "in_flight": self._in_flight, "memory": plan.memory}
        return Outcome.reported(self._report(plan, "expire", numbers))


def ours(broker: Any, instance: str) -> list[Contestant]:
    """shmq, in all the ways that are measured."""
    kinds = (OurBroker, OurRequests, OurNumpy, OurArrow, OurLoans, OurCopies)
    large = LINES[LARGE].size or 0
    return [
        *(kind(broker, instance) for kind in kinds),
        *(Taking(broker, size) for size in (8 << 10, large)),
    ]


def cores(executable: Path | None) -> list[Contestant]:
    """Contestants that need no instance."""
    return [
        Core(executable),
        *(Expiring(executable, count) for count in (10**3, 10**6)),
        Memcpy(),
        MemcpyInCache(),
    ]
