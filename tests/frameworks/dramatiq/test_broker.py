"""Dramatiq's broker on shmq, with a worker in this process."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import dramatiq
import pytest
from dramatiq.encoder import JSONEncoder, PickleEncoder
from dramatiq.errors import ConnectionFailed, QueueNotFound
from dramatiq.middleware import Retries
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.results import ResultFailure, Results
from support import traps
from support.processes import eventually

import shmq
from shmq.integrations.dramatiq import Broker, RateLimiterBackend, ResultBackend
from shmq.integrations.link import Link
from shmq.seal import REASON


def test_a_message_is_processed_and_its_result_waits(broker: shmq.Broker) -> None:
    backend = ResultBackend(broker)
    app = Broker(broker, middleware=[Results(backend=backend)])

    @dramatiq.actor(broker=app, store_results=True)
    def add(a: int, b: int) -> int:
        return a + b

    worker = dramatiq.Worker(app, worker_timeout=100, worker_threads=2)
    worker.start()
    try:
        message = add.send(2, 3)
        assert message.get_result(backend=backend, block=True, timeout=60_000) == 5
        app.join("default", timeout=60_000)
    finally:
        worker.stop()


def test_a_result_that_can_never_fit_is_a_failure(broker: shmq.Broker) -> None:
    backend = ResultBackend(broker)
    app = Broker(broker, middleware=[Retries(), Results(backend=backend)])
    runs = []

    @dramatiq.actor(broker=app, store_results=True, max_retries=0)
    def long(fails: bool) -> str:
        runs.append(fails)
        if fails:
            raise KeyError("x" * (2 << 20))
        return "x" * (2 << 20)

    worker = dramatiq.Worker(app, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        for fails, kind in ((False, "MessageTooBig"), (True, "KeyError")):
            with pytest.raises(ResultFailure, match="max_msg_size") as caught:
                long.send(fails).get_result(backend=backend, block=True, timeout=60_000)
            assert caught.value.orig_exc_type == kind
            assert "--max-msg-size" in str(caught.value)
            assert len(str(caught.value)) < 2000
        app.join("default", timeout=60_000)
    finally:
        worker.stop()
    assert runs == [False, True]


@pytest.mark.parametrize("step", ["incr", "decr", "sum"])
def test_the_time_to_live_of_a_limiter_begins_anew_with_each_step(
    broker: shmq.Broker, step: str
) -> None:
    limits = RateLimiterBackend(broker)
    limits.add("key", 5, 3_600_000)
    if step == "incr":
        assert limits.incr("key", 1, 10, 7_200_000)
    elif step == "decr":
        assert limits.decr("key", 1, 0, 7_200_000)
    else:
        assert limits.incr_and_sum("key", list, 1, 10, 7_200_000)
    ((_, _, left),) = limits.store._scan(True)
    assert left > 3601e9
    before = left
    assert not limits.incr("key", 100, 10, 20_000_000)  # refused: nothing is changed
    ((_, _, left),) = limits.store._scan(True)
    assert left <= before


def test_a_limit_holds_for_longer_than_the_time_to_live(broker: shmq.Broker) -> None:
    """One holder stays while another one comes and goes."""
    limiter = ConcurrentRateLimiter(RateLimiterBackend(broker), "few", limit=2, ttl=1500)
    with limiter.acquire():
        began = time.monotonic()
        while time.monotonic() - began < 2:
            with limiter.acquire():
                time.sleep(0.01)
        with ExitStack() as stack:
            got = [stack.enter_context(limiter.acquire(raise_on_failure=False)) for _ in range(3)]
        assert got == [True, False, False]


def test_a_worker_that_stops_gives_back_what_it_did_not_begin(broker: shmq.Broker) -> None:
    app = Broker(broker, middleware=[])
    go = threading.Event()

    @dramatiq.actor(broker=app)
    def wait() -> None:
        go.wait()

    sent = [wait.send() for _ in range(10)]
    worker = dramatiq.Worker(app, worker_timeout=10, worker_threads=1)
    worker.start()
    (topic,) = app.topics("default")
    eventually(lambda: broker.channel_stats(topic, "workers").in_flight == 2)  # what it prefetches
    worker.workers[0].stop()
    go.set()
    worker.stop()
    stats = broker.channel_stats(topic, "workers")
    assert (stats.depth, stats.in_flight) == (len(sent) - stats.finished, 0)
    assert 1 <= stats.finished <= 2


def test_an_exception_of_an_actor_is_freed_at_once(broker: shmq.Broker) -> None:
    app = Broker(broker, middleware=[])
    made: list[weakref.ref[BaseException]] = []

    class Problem(Exception):
        def __init__(self) -> None:
            made.append(weakref.ref(self))

    @dramatiq.actor(broker=app)
    def fail() -> None:
        raise Problem

    worker = dramatiq.Worker(app, worker_timeout=10, worker_threads=1)
    logging.disable(logging.CRITICAL)
    gc.disable()
    worker.start()
    try:
        fail.send()
        eventually(lambda: made and made[0]() is None)
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)
        worker.stop()


def test_a_delay_may_be_longer_than_the_instance_allows(
    open_broker: Callable[..., shmq.Broker],
) -> None:
    broker = open_broker(max_req_timeout=0.05)
    app = Broker(broker, middleware=[])

    @dramatiq.actor(broker=app)
    def noop() -> None: ...

    began = time.monotonic()
    noop.send_with_options(delay=1500)
    consumer = app.consume("default", timeout=20)
    message = eventually(lambda: next(consumer))
    assert time.monotonic() - began >= 1.49
    assert message.delivery.attempts > 2  # it came back several times
    consumer.ack(message)
    consumer.close()


def test_a_message_that_cannot_be_decoded_is_a_dead_letter(broker: shmq.Broker) -> None:
    app = Broker(broker, middleware=[])
    app.declare_queue("default")
    (topic,) = app.topics("default")
    consumer = app.consume("default", timeout=10)
    broker.producer(topic).publish(b"not JSON")
    dead = broker.dead(topic, "workers")
    (letter,) = eventually(lambda: next(consumer) or dead.peek())
    assert letter.body == b"not JSON"
    assert (letter.error or "").startswith("Failed to decode message.")
    consumer.close()


def test_with_pickles_only_what_a_broker_has_sent_is_decoded(
    broker: shmq.Broker, tmp_path: Path
) -> None:
    app = Broker(broker, middleware=[])
    app.declare_queue("default")
    (topic,) = app.topics("default")
    consumer = app.consume("default", timeout=10)
    trace = tmp_path / "unpickled"
    dramatiq.set_encoder(PickleEncoder())
    try:
        broker.producer(topic).publish(traps.item(trace))
        dead = broker.dead(topic, "workers")
        (letter,) = eventually(lambda: next(consumer) or dead.peek())
        assert letter.error == REASON
        app.enqueue(dramatiq.Message("default", "actor", (1,), {}, {}))
        found = eventually(lambda: next(consumer))
        assert found.args == (1,)
        consumer.ack(found)
    finally:
        dramatiq.set_encoder(JSONEncoder())
        consumer.close()
    assert not trace.exists()


def test_names_of_queues_never_share_a_topic() -> None:
    app = Broker("nowhere", max_priority=9)
    names = ["default", "default.p1", "default.p3", "default.workers.dead", "x" * 60, "x" * 61]
    topics = [topic for name in names for topic in app.topics(name)]
    assert len(set(topics)) == 4 * len(names)
    assert all(len(f"{topic}.workers.dead") <= 64 for topic in topics)
    assert app.topics("default")[0] == "dramatiq.default"


def test_without_an_instance_dramatiqs_errors_are_raised() -> None:
    app = Broker("nowhere", middleware=[], timeout=0)
    app.declare_queue("default")
    with pytest.raises(ConnectionFailed):
        app.enqueue(dramatiq.Message("default", "noop", (), {}, {}))
    with pytest.raises(ConnectionFailed):
        app.consume("default")
    with pytest.raises(QueueNotFound):
        app.consume("other")


@pytest.mark.parametrize("error", [shmq.NotRunning, shmq.Gone])
def test_a_message_waits_while_the_broker_is_about_to_stop(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A worker that sends a failed message again acknowledges it, whether that came through."""
    tries = stopping(monkeypatch, error, 3)
    app = Broker(broker)

    @dramatiq.actor(broker=app)
    def ping() -> None: ...

    ping.send()
    assert len(tries) == 4
    assert app.size("default") == 1


def test_the_wait_for_a_broker_that_stops_has_an_end(
    broker: shmq.Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = stopping(monkeypatch, shmq.NotRunning, 1 << 30)
    app = Broker(broker, timeout=0.1)

    @dramatiq.actor(broker=app)
    def ping() -> None: ...

    with pytest.raises(ConnectionFailed, match="stopping"):
        ping.send()
    broker.close()
    del tries[:]
    with pytest.raises(ConnectionFailed, match="stopping"):
        ping.send()
    assert len(tries) == 1, "the program has closed its broker"


def stopping(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], times: int
) -> list[tuple[str, ...]]:
    """Have so many tries to publish fail. Returns the tries."""
    producer, tries = Link.producer, []

    def failing(self: Link, *words: str) -> shmq.Producer:
        tries.append(words)
        if len(tries) <= times:
            raise error("the broker is stopping")
        return producer(self, *words)

    monkeypatch.setattr(Link, "producer", failing)
    return tries


def test_the_counters_of_rate_limiters_keep_to_their_bounds(broker: shmq.Broker) -> None:
    limits = RateLimiterBackend(broker)
    assert limits.add("key", 1, 60_000)
    assert not limits.add("key", 1, 60_000)
    assert limits.incr("key", 1, 2, 60_000)
    assert not limits.incr("key", 1, 2, 60_000)
    assert limits.decr("key", 1, 0, 60_000)
    assert limits.decr("key", 1, 0, 60_000)
    assert "key" not in limits.store  # the next holder begins a new time to live
    assert not limits.decr("key", 1, 0, 60_000)
    for number in range(3):
        assert limits.incr_and_sum(f"sum{number}", lambda: ["sum0", "sum1", "sum2"], 1, 3, 60_000)
    assert not limits.incr_and_sum("sum0", lambda: ["sum0", "sum1", "sum2"], 1, 3, 60_000)
    assert limits.store.get("sum0") == b"1"
    assert not limits.wait("event", 10)
    limits.wait_notify("event", 60_000)
    assert limits.wait("event", None)


def test_a_forked_child_attaches_anew(broker: shmq.Broker) -> None:
    app = Broker(broker.instance, middleware=[])
    limits = RateLimiterBackend(broker.instance)

    def use(key: str) -> None:
        app.enqueue(dramatiq.Message("default", "noop", (key,), {}, {}))
        limits.incr("uses", 1, 100, 60_000)

    app.declare_queue("default")
    use("parent")
    child = multiprocessing.get_context("fork").Process(target=use, args=("child",))
    child.start()
    child.join()
    assert child.exitcode == 0
    use("parent again")
    assert limits.store.get("uses") == b"3"
    consumer = app.consume("default", prefetch=10, timeout=1000)
    found = [next(consumer) for _ in range(3)]
    assert [each.args[0] for each in found if each] == ["parent", "child", "parent again"]
    for each in found:
        consumer.ack(each)
    consumer.close()
    app.close()
    limits.close()
