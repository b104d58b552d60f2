"""`shmq bench`: is this installation as fast as it should be on this machine?

A private instance and two processes of this package; nobody else's software (`tools/bench.py`
compares). Every line runs for the same time: the producer's loop, then one last body that ends the
consumer's.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
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

import click

import shmq
from shmq import interpreter, layout
from shmq.cli import OK, json_option
from shmq.cli.output import print_json, print_rows
from shmq.errors import ShmqError
from shmq.layout import QueueView

_THERE, _BACK, _CHANNEL = "bench-there", "bench-back", "bench"
_MEMORY = 100_000  # messages that fit memory
_WINDOW = 50_000  # the producer pauses when so many wait, so that nothing goes to disk
_PATIENCE = 10.0  # seconds without a message that mean something is broken
_CHECK_EVERY = 1000  # messages between two looks at clock and window

LINES = {"one": "one at a time", "lists": "lists", "roundtrip": "round trip"}


@dataclass(frozen=True)
class Plan:
    """One line's run, as the two processes are told it."""

    instance: str
    line: str
    seconds: float
    size: int
    count: int


@click.command()
@json_option
@click.option("--seconds", type=click.FloatRange(0.3, 600), default=3.0, show_default=True,
              metavar="SECONDS", help="Of all lines together.")  # fmt: skip
@click.option("--size", type=click.IntRange(2, 1 << 20), default=100, show_default=True,
              metavar="BYTES", help="Of a body.")  # fmt: skip
@click.option("--count", type=click.IntRange(1, 1000), default=200, show_default=True,
              metavar="N", help="Bodies in a list.")  # fmt: skip
def bench(as_json: bool, seconds: float, size: int, count: int) -> int:
    """Measure throughput and round trips on a private instance; other instances notice nothing.

    One producer and one consumer in processes of their own; every message is acknowledged.
    """
    instance = f"bench-{os.getpid()}"
    if not as_json:
        click.echo(
            f"shmq {shmq.__version__}, Python {platform.python_version()}, Linux "
            f"{platform.release()}, {len(os.sched_getaffinity(0))} cores; bodies of {size} bytes, "
            f"lists of {count}"
        )
    results = []
    with (
        tempfile.TemporaryDirectory(prefix="shmq-bench-") as path,
        shmq.Broker(path, instance, mem_queue_size=_MEMORY) as broker,
        click.progressbar(length=len(LINES) * _steps(seconds / len(LINES)), label="measuring",
                          file=sys.stderr, hidden=not sys.stderr.isatty()) as bar,
    ):  # fmt: skip
        try:
            for line in LINES:
                plan = Plan(instance, line, seconds / len(LINES), size, count)
                results.append(_run(broker, plan, bar.update))
        finally:  # nothing is worth writing to disk
            for topic in (_THERE, _BACK):
                with contextlib.suppress(ShmqError):
                    broker.delete_topic(topic)
    if as_json:
        for result in results:
            print_json(result)
    else:
        print_rows(["LINE", "MESSAGES/S", "MB/S", "P50 us", "P99 us"], [_row(r) for r in results])
    if any(result["spilled"] for result in results):
        click.echo("some messages went to disk: a slow consumer, the rates are lower for it",
                   err=True)  # fmt: skip
    return OK


def _steps(seconds: float) -> int:
    """Of the progress bar, for one line."""
    return max(1, round(seconds * 10))


def _row(result: dict[str, Any]) -> list[str]:
    rate = result["messages_per_second"]
    cells = [LINES[result["line"]], f"{rate:,.0f}", f"{rate * result['size'] / 1e6:.1f}"]
    times = [result.get("p50_us"), result.get("p99_us")]
    return cells + ["-" if value is None else f"{value:.1f}" for value in times]


def _run(broker: shmq.Broker, plan: Plan, advance: Callable[[int], Any]) -> dict[str, Any]:
    """Both processes of a line; what they measured."""
    for topic in (_THERE, _BACK):
        broker.create_channel(topic, _CHANNEL)
        broker.empty_channel(topic, _CHANNEL)
    before = broker.stats().channel(_THERE, _CHANNEL).spilled
    trip = plan.line == "roundtrip"
    with _worker("answer" if trip else "receive", plan) as second, \
            _worker("call" if trip else "send", plan) as first:  # fmt: skip
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
    """A fresh Python in one of the ROLES; ended with the block."""
    process = subprocess.Popen(
        interpreter.run_code("from shmq.cli import bench; bench.work()",
                             [role, json.dumps(asdict(plan))]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us, who end it
    )  # fmt: skip
    with process:  # closes the pipes and waits
        try:
            yield process
            _tell(process, "bye")
        except BaseException:
            process.kill()
            raise


def _tell(process: subprocess.Popen[bytes], word: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is noticed when it is asked
        process.stdin.write(word.encode() + b"\n")
        process.stdin.flush()


def _answer(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Its next line."""
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
    """What both say at their end, the bar moving meanwhile."""
    answers: dict[subprocess.Popen[bytes], dict[str, Any]] = {}
    deadline = time.monotonic() + seconds + 3 * _PATIENCE
    steps = _steps(seconds)
    with selectors.DefaultSelector() as selector:
        for process in (first, second):
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process)
        while len(answers) < 2:
            for key, _ in selector.select(0.1):
                answers[key.data] = _answer(key.data)
                selector.unregister(key.fileobj)
            if steps > 0:
                advance(1)
                steps -= 1
            if time.monotonic() > deadline:
                raise ShmqError("bench: the processes of the benchmark do not come to an end")
    advance(steps)
    return answers[first], answers[second]


# ---- what runs in the two processes ----


def work() -> None:
    """Entry of a worker: role and plan are arguments, it talks in lines of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, text = sys.argv[1:]
    try:
        plan = Plan(**json.loads(text))
        with shmq.attach(plan.instance) as broker:
            _say(**ROLES[role](broker, plan))
            sys.stdin.readline()  # both are done
    except (ShmqError, OSError, TimeoutError) as exc:
        _say(error=str(exc))


def _say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def _start() -> int:
    """Begin together with the other one."""
    gc.collect()
    gc.freeze()
    _say(ready=True)
    if not sys.stdin.readline():
        raise SystemExit(1)  # our parent ended
    return time.monotonic_ns()


def _pin(last: bool) -> None:
    """A round trip is between two cores, where there are two: the kernel's choice would decide."""
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
    """The channel's segment, to see how full it is."""
    with layout.open_readonly(instance) as source:
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
