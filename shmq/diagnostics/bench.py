"""Measures whether this installation is as fast as this machine allows.

It starts a private instance, and two processes for each line of the result. All lines run for the
same time. The producer ends a line by one last body of another size, which ends the consumer's
loop. The loops are not those of tools/bench, which also measure other releases of shmq and other
brokers, and so must not take their loops from the release that they measure.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import shmq
from shmq import interpreter, sources
from shmq.errors import ShmqError
from shmq.views import QueueView

_THERE, _BACK, _CHANNEL = "bench-there", "bench-back", "bench"
_MEMORY = 100_000  # messages that fit in memory
_WINDOW = 50_000  # messages in the channel at which the producer pauses, so that none is spilled
_PATIENCE = 10.0  # seconds without a message after which the run has failed
_CHECK_EVERY = 1000  # messages between two checks of the clock and the window

LINES = ("one", "lists", "roundtrip")


@dataclass(frozen=True)
class Plan:
    """Parameters of one line, for its two processes."""

    instance: str
    line: str
    seconds: float
    size: int
    count: int


def steps(seconds: float) -> int:
    """Number of calls of `advance` with 1 for one line."""
    return max(1, round(seconds * 10))


def measure(
    seconds: float, size: int, count: int, advance: Callable[[int], Any]
) -> Iterator[dict[str, Any]]:
    """Measure all LINES, each for `seconds`. Raises ShmqError, OSError.

    size: bytes of a body; count: bodies in a list; advance: takes the steps of the progress made.
    Each result has `line`, `size`, `count`, `messages_per_second`, `spilled` (messages that went to
    disk) and, of round trips, `p50_us` and `p99_us`.
    """
    instance = f"bench-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory(prefix="shmq-bench-") as path,
        shmq.Broker(path, instance, mem_queue_size=_MEMORY) as broker,
    ):
        try:
            for line in LINES:
                yield _run(broker, Plan(instance, line, seconds, size, count), advance)
        finally:  # so that the stop of the broker writes no message to disk
            for topic in (_THERE, _BACK):
                with contextlib.suppress(ShmqError):
                    broker.delete_topic(topic)


def _run(broker: shmq.Broker, plan: Plan, advance: Callable[[int], Any]) -> dict[str, Any]:
    """Run the two processes of a line and return the result."""
    for topic in (_THERE, _BACK):
        broker.create_channel(topic, _CHANNEL)
        broker.empty_channel(topic, _CHANNEL)
    before = broker.stats().channel(_THERE, _CHANNEL).spilled
    trip = plan.line == "roundtrip"
    with (
        _worker("answer" if trip else "receive", plan) as second,
        _worker("call" if trip else "send", plan) as first,
    ):
        _answer(second)
        _answer(first)
        for process in (second, first):
            _tell(process, "go")
        sent, received = _await_both(first, second, advance, plan.seconds)
    result = {"line": plan.line, "size": plan.size, "count": plan.count}
    if trip:
        result |= {"messages_per_second": sent["trips"] / sent["seconds"]}
        result |= {"p50_us": sent["p50_us"], "p99_us": sent["p99_us"]}
    else:
        seconds = (received["ended"] - sent["began"]) / 1e9
        result |= {"messages_per_second": received["messages"] / seconds}
    spilled = broker.stats().channel(_THERE, _CHANNEL).spilled - before
    return {**result, "spilled": spilled}


@contextlib.contextmanager
def _worker(role: str, plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """Run one of the ROLES in a new Python process until the end of the block."""
    process = subprocess.Popen(
        interpreter.run_code(
            "from shmq.diagnostics import bench; bench.work()", [role, json.dumps(asdict(plan))]
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C goes to this process alone, which ends the worker
    )
    with process:  # the exit closes the pipes and waits
        try:
            yield process
            _tell(process, "bye")
        except BaseException:
            process.kill()
            raise


def _tell(process: subprocess.Popen[bytes], word: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # `_answer` notices that the process has ended
        process.stdin.write(word.encode() + b"\n")
        process.stdin.flush()


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """The next object that a worker prints. Raises ShmqError if the worker failed."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise ShmqError("bench: a process of the benchmark ended early (see above)")
    found: dict[str, Any] = json.loads(line)
    if "error" in found:
        raise ShmqError(f"bench: {found['error']}")
    return found


def _await_both(
    first: subprocess.Popen[bytes],
    second: subprocess.Popen[bytes],
    advance: Callable[[int], Any],
    seconds: float,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Wait for the results of both workers, and advance the progress bar meanwhile."""
    answers: dict[subprocess.Popen[bytes], dict[str, Any]] = {}
    deadline = time.monotonic() + seconds + 3 * _PATIENCE
    left = steps(seconds)
    with selectors.DefaultSelector() as selector:
        for process in (first, second):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process)
        while len(answers) < 2:
            for key, _ in selector.select(0.1):
                answers[key.data] = _answer(key.data)
                selector.unregister(key.fileobj)
            if left > 0:
                advance(1)
                left -= 1
            if time.monotonic() > deadline:
                raise ShmqError("bench: the processes of the benchmark do not come to an end")
    advance(left)
    return answers[first], answers[second]


# ---- code of the two processes ----


def work() -> None:
    """Main function of a worker. `sys.argv` has the role and the plan; it prints lines of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, text = sys.argv[1:]
    try:
        plan = Plan(**json.loads(text))
        with shmq.attach(plan.instance) as broker:
            _say(**ROLES[role](broker, plan))
            sys.stdin.readline()  # wait until both workers are done
    except (ShmqError, OSError, TimeoutError) as exc:
        _say(error=str(exc))


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def _start() -> int:
    """Wait until both workers are ready. Returns the time in ns."""
    gc.collect()
    gc.freeze()
    _say(ready=True)
    if not sys.stdin.readline():
        raise SystemExit(1)  # the parent has ended
    return time.monotonic_ns()


def _pin(last: bool) -> None:
    """Pin this process to the first or the last core. A round trip is measured between two cores if
    there are two; the scheduler's choice would otherwise decide the result."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {cores[-1 if last else 0]})


def _take(take: Callable[[float], Any]) -> Any:
    message = take(_PATIENCE)
    if message is None:
        raise TimeoutError(f"no message came for {_PATIENCE:g} s")
    return message


def _send(broker: shmq.Broker, plan: Plan) -> dict[str, Any]:
    producer = broker.producer(_THERE)
    body = b"x" * plan.size
    publish: Callable[..., Any] = producer.publish
    what: Any = body
    calls, step = _CHECK_EVERY, _CHECK_EVERY
    if plan.line == "lists":
        publish, what = producer.publish_many, [body] * plan.count
        calls = max(1, _CHECK_EVERY // plan.count)
        step = calls * plan.count
    publish(what, timeout=_PATIENCE)
    with _queue(plan.instance) as queue:
        began = _start()
        end = began + int(plan.seconds * 1e9)
        sent = 0
        while time.monotonic_ns() < end:
            for _ in range(calls):
                publish(what, timeout=_PATIENCE)
            sent += step
            if queue.ring_length("ready") > _WINDOW:
                while queue.ring_length("ready") > _WINDOW // 2:
                    time.sleep(0.0005)
    producer.publish(b"e", timeout=_PATIENCE)
    return {"began": began, "sent": sent}


@contextlib.contextmanager
def _queue(instance: str) -> Iterator[QueueView]:
    """A view of the channel's segment, which shows how full the channel is."""
    with sources.open_readonly(instance) as source:
        topic = source.directory.find_topic(_THERE)
        assert topic is not None
        entry = source.directory.find_queue(topic.index, _CHANNEL)
        assert entry is not None
        yield source.queue(entry)


def _receive(broker: shmq.Broker, plan: Plan) -> dict[str, Any]:
    consumer = broker.consumer(_THERE, _CHANNEL, max_in_flight=max(200, plan.count))
    lists = plan.line == "lists"
    first = consumer.take_many(plan.count if lists else 1, timeout=3 * _PATIENCE)
    first.finish()
    _start()
    received = (_receive_lists if lists else _receive_ones)(consumer, plan)
    return {"messages": received, "ended": time.monotonic_ns()}


def _receive_ones(consumer: shmq.Consumer, plan: Plan) -> int:
    take, size, received = consumer.take, plan.size, 0
    while True:
        message = _take(take)
        body = message.body
        message.finish()
        if len(body) != size:
            return received
        received += 1


def _receive_lists(consumer: shmq.Consumer, plan: Plan) -> int:
    received = 0
    while True:
        batch = consumer.take_many(plan.count, timeout=_PATIENCE)
        bodies = batch.bodies()
        batch.finish()
        if not bodies:
            raise TimeoutError(f"no message came for {_PATIENCE:g} s")
        if len(bodies[-1]) != plan.size:
            return received + len(bodies) - 1
        received += len(bodies)


def _call(broker: shmq.Broker, plan: Plan) -> dict[str, Any]:
    _pin(last=False)
    publish, take = broker.producer(_THERE).publish, broker.consumer(_BACK, _CHANNEL).take
    body, samples = b"x" * plan.size, array("q")
    publish(body)
    _take(take).finish()
    began = before = _start()
    end = began + int(plan.seconds * 1e9)
    while before < end:
        publish(body)
        message = _take(take)
        _ = message.body
        message.finish()
        now = time.monotonic_ns()
        samples.append(now - before)
        before = now
    publish(b"e")
    hundredths = statistics.quantiles(samples, n=100) if len(samples) > 1 else [*samples] * 99
    return {
        "trips": len(samples),
        "seconds": (before - began) / 1e9,
        "p50_us": hundredths[49] / 1e3,
        "p99_us": hundredths[98] / 1e3,
    }


def _reply(broker: shmq.Broker, plan: Plan) -> dict[str, Any]:
    _pin(last=True)
    publish, take = broker.producer(_BACK).publish, broker.consumer(_THERE, _CHANNEL).take
    message = _take(lambda timeout: take(3 * timeout))
    publish(message.body)
    message.finish()
    _start()
    while True:
        message = _take(take)
        body = message.body
        message.finish()
        if len(body) != plan.size:
            return {}
        publish(body)


ROLES: dict[str, Callable[[shmq.Broker, Plan], dict[str, Any]]] = {
    "send": _send,
    "receive": _receive,
    "call": _call,
    "answer": _reply,
}
