"""How each public method that takes a number is called: with the numbers that a cell gives, and
otherwise with ones that are right.

A call gives back what it took, so that the next one finds the same. It has always something to
take or room to publish: a time limit without end is no reason to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import shmq
from limits.site import ASKED, CHANNEL, GONE, TOPIC, Site

Call = Callable[..., Any]

#: `Class.method` -> call(site, **numbers)
CALLS: dict[str, Call] = {}


def covers(*names: str) -> Callable[[Call], Call]:
    def add(call: Call) -> Call:
        for name in names:
            assert name not in CALLS
            CALLS[name] = call
        return call

    return add


def method(name: str, attribute: str, *words: Any, **numbers: Any) -> None:
    """A method of a handle of the site that leaves nothing behind."""
    verb = name.partition(".")[2]

    @covers(name)
    def call(site: Site, **given: Any) -> Any:
        made = getattr(getattr(site, attribute), verb)(*words, **(numbers | given))
        return asyncio.run(made) if verb.endswith("_async") else made


# ---- messages ----


def given_back(name: str, attribute: str, **numbers: Any) -> None:
    """A method that takes messages."""
    verb = name.partition(".")[2]

    @covers(name)
    def call(site: Site, **given: Any) -> Any:
        found = getattr(getattr(site, attribute), verb)(**(numbers | given))
        if verb.endswith("_async"):
            found = asyncio.run(found)
        if not found:
            assert given == {"timeout": 0}, "there was something to take"
        elif isinstance(found, bytes):
            site.producer.publish(found)
        else:
            found.requeue()


for _who, _attribute in (("Consumer", "consumer"), ("MultiConsumer", "many")):
    given_back(f"{_who}.take", _attribute, timeout=60)
    given_back(f"{_who}.take_many", _attribute, n=5, timeout=60)
    given_back(f"{_who}.take_async", _attribute, timeout=60)
    given_back(f"{_who}.take_many_async", _attribute, n=5, timeout=60)
given_back("Consumer.take_body", "consumer", timeout=60)
given_back("RemoteConsumer.take", "remote_consumer", timeout=60)
given_back("RemoteConsumer.take_many", "remote_consumer", n=5, timeout=60)


def requeued(name: str, attribute: str, take: str, *words: Any) -> None:
    """`requeue` of what a consumer took. A long delay is undone by publishing another."""

    @covers(name)
    def call(site: Site, delay: float | None = 0) -> None:
        held = getattr(getattr(site, attribute), take)(*words)
        assert held
        try:
            held.requeue(delay=delay)
        except BaseException:
            held.finish()
            site.producer.publish(b"x")
            raise
        if delay:
            site.producer.publish(b"x")


requeued("Message.requeue", "consumer", "take", 60)
requeued("Batch.requeue", "consumer", "take_many", 1, 60)
requeued("RemoteMessage.requeue", "remote_consumer", "take", 60)
requeued("RemoteMessages.requeue", "remote_consumer", "take_many", 1, 60)


@covers("Consumer.limit", "MultiConsumer.limit")
def limit(site: Site, max_in_flight: int = 10) -> None:
    for consumer in (site.consumer, site.many):
        try:
            consumer.limit(max_in_flight)
        finally:
            with contextlib.suppress(shmq.ShmqError):
                consumer.limit(200)


for _verb in ("publish", "publish_async"):
    method(f"Producer.{_verb}", "gone_producer", b"x", defer=0, timeout=60, ttl=60)
for _verb in ("publish_many", "publish_many_async"):
    method(f"Producer.{_verb}", "gone_producer", [b"x"], defer=0, timeout=60, ttl=60)
method("RemoteProducer.publish", "remote_producer", b"x", defer=0, timeout=60)
method("RemoteProducer.publish_many", "remote_producer", [b"x"], timeout=60)
method("RemoteProducer.defer", "remote_producer", b"x", seconds=1, timeout=60)


@covers("Producer.loan")
def loan(site: Site, nbytes: int = 10, **given: Any) -> None:
    with site.gone_producer.loan(nbytes, **given) as buffer:
        buffer[:1] = b"x"


@covers("Loan.truncate")
def truncate(site: Site, nbytes: int = 5) -> None:
    lent = site.gone_producer.loan(10)
    with lent:
        lent.truncate(nbytes)


# ---- brokers ----


@covers("Broker.consumer")
def consumer(site: Site, weights: Any = None, **given: Any) -> None:
    if weights is None:
        site.broker.consumer(TOPIC, CHANNEL, **given).close()
        return
    words = {"policy": "weighted", "weights": [weights, 1]}
    site.broker.consumer([TOPIC, GONE], CHANNEL, **words).close()  # type: ignore[call-overload]


@covers("RemoteBroker.consumer")
def remote_consumer(site: Site, **given: Any) -> None:
    with contextlib.closing(site.remote.consumer(GONE, CHANNEL, **given)) as made:
        made.take(0)


@covers("MultiConsumer.__init__")
def many(site: Site, **given: Any) -> None:
    site.broker.consumer([TOPIC, GONE], CHANNEL, **given).close()


@covers("RemoteBroker.__init__", "shmq.connect")
def connect(site: Site, timeout: float = 60) -> None:
    shmq.connect(site.tcp, timeout=timeout).close()


@covers("shmq.attach")
def attach(site: Site, **given: Any) -> None:
    shmq.attach(site.instance, **given).close()


method("Broker.peek", "broker", TOPIC, CHANNEL, n=5)
method("Broker.request", "broker", ASKED, b"x", timeout=60)
method("Broker.request_async", "broker", ASKED, b"x", timeout=60)


@covers("Broker.results")
def results(site: Site, **given: Any) -> None:
    site.broker.results("made", **({"max_keys": 16, "max_bytes": 1 << 16} | given))
    site.broker.delete_results("made")


def held(verb: str) -> None:
    @covers(f"Broker.{verb}")
    def call(site: Site, **given: Any) -> None:
        message = site.consumer.take(60)
        assert message is not None
        try:
            getattr(site.broker, verb)(TOPIC, CHANNEL, message.id, **given)
        finally:
            with contextlib.suppress(shmq.NotInFlight):
                message.finish()
            site.producer.publish(b"x")


held("finish_message")
held("requeue_message")

# ---- leases ----


def leased(names: tuple[str, ...], holder: str) -> None:
    """The methods of a holder. Each leases first, and gives back."""

    @contextlib.contextmanager
    def lease(site: Site) -> Iterator[tuple[Any, Any]]:
        mine = getattr(site, holder)
        made = mine.lease(3, timeout=60)
        assert made is not None
        try:
            yield mine, made
        finally:
            for each in mine.leases():
                mine.return_lease(each.id)

    whose, broker = names

    @covers(f"{whose}.lease")
    def take(site: Site, **given: Any) -> None:
        mine = getattr(site, holder)
        try:
            assert mine.lease(**({"n": 3, "timeout": 60} | given)) is not None
        finally:
            for each in mine.leases():
                mine.return_lease(each.id)

    @covers(f"{whose}.wait")
    def wait(site: Site, timeout: float = 60) -> None:
        getattr(site, holder).wait(timeout)

    @covers(f"{whose}.read_lease")
    def read(site: Site, **given: Any) -> None:
        with lease(site) as (mine, made):
            for rows in mine.read_lease(**({"lease": made.id} | given)):
                rows.bodies()

    @covers(f"{broker}.read_lease")
    def read_any(site: Site, **given: Any) -> None:
        with lease(site) as (_, made):
            reader = site.broker if broker == "Broker" else site.remote
            for rows in reader.read_lease(TOPIC, CHANNEL, **({"lease": made.id} | given)):
                rows.bodies()

    for verb in ("finish_lease", "return_lease", "look"):

        def one(site: Site, verb: str = verb, **given: Any) -> None:
            with lease(site) as (mine, made):
                number = given or {"through" if verb == "finish_lease" else "lease": made.id}
                getattr(mine, verb)(**number)
            if verb == "finish_lease":
                site.producer.publish_many([b"x"] * 3)

        covers(f"{whose}.{verb}")(one)
    if broker == "Broker":
        for verb in ("finish_lease", "return_lease"):

            def any_one(site: Site, verb: str = verb, **given: Any) -> None:
                with lease(site) as (_, made):
                    getattr(site.broker, verb)(TOPIC, CHANNEL, **({"lease": made.id} | given))
                if verb == "finish_lease":
                    site.producer.publish_many([b"x"] * 3)

            covers(f"Broker.{verb}")(any_one)


leased(("LeaseHolder", "Broker"), "holder")
leased(("RemoteLeaseHolder", "RemoteBroker"), "remote_holder")


@covers("Broker.lease_holder")
def lease_holder(site: Site, **given: Any) -> None:
    site.broker.lease_holder(TOPIC, CHANNEL, "other", **given).close()


@covers("RemoteBroker.lease_holder")
def remote_lease_holder(site: Site, **given: Any) -> None:
    number = given.pop("resume", None)
    if number is not None:
        given = {"resume": (number, 1)}
    with contextlib.suppress(shmq.LeaseFenced if number is not None else ()):
        site.remote.lease_holder(TOPIC, CHANNEL, "far", **given).close()


@covers("RemoteBroker.stage", "RemoteBroker.commit", "RemoteBroker.abandon")
def stage(site: Site, epoch: int | None = None) -> None:
    if epoch is None:
        epoch = site.next_epoch()
    with contextlib.suppress(shmq.ShmqError if epoch == 0 else ()):
        staged = site.remote.stage(GONE, "writer", epoch, [b"x"])
        site.remote.abandon(GONE, "writer", epoch)
        assert staged is not None
    site.remote.abandon(GONE, "writer", epoch)


# ---- results ----

method("Results.set", "results", b"k", b"v", ttl=60)
method("Results.incr", "results", b"number", by=1, ttl=60)
method("Results.wait", "results", b"there", timeout=60)
method("Results.wait_async", "results", b"there", timeout=60)
method("Results.wait_any", "results", [b"there"], timeout=60)
method("Results.wait_any_async", "results", [b"there"], timeout=60)


@covers("Results.add")
def add(site: Site, ttl: float | None = 60) -> None:
    site.results.add(b"added", b"v", ttl=ttl)
    site.results.delete(b"added")


# ---- dead letters ----

method("DeadLetters.peek", "dead", n=5)


@covers("DeadLetters.drop", "DeadLetters.redrive")
def drop(site: Site, n: int | None = 1) -> None:
    site.dead.drop(n)


# ---- queues and pools ----


@covers("Queue.__init__", "JoinableQueue.__init__")
def queue(site: Site, maxsize: int = 5) -> None:
    made = shmq.Queue(maxsize, broker=site.broker)
    made.put(1)
    assert made.get() == 1
    made.close()


@covers("Queue.put", "JoinableQueue.put")
def put(site: Site, timeout: float | None = 60) -> None:
    site.queue.put(1, timeout=timeout)
    assert site.queue.get() == 1


@covers("Queue.get", "JoinableQueue.get")
def get(site: Site, timeout: float | None = 60) -> None:
    site.queue.put(1)
    try:
        assert site.queue.get(timeout=timeout) == 1
    except BaseException:
        site.queue.get()
        raise


@covers("Queue.item", "JoinableQueue.item")
def item(site: Site, timeout: float | None = 60) -> None:
    site.queue.put(1)
    try:
        with site.queue.item(timeout) as value:
            assert value == 1
    except BaseException:
        site.queue.get()
        raise


@covers("Executor.__init__")
def executor(site: Site, **given: Any) -> None:
    with shmq.Executor(**({"max_workers": 1} | given)) as made:
        assert made.submit(abs, -1).result(60) == 1


@covers("Executor.map")
def mapped(site: Site, **given: Any) -> None:
    assert list(site.executor.map(abs, [-1], **({"timeout": 60} | given))) == [1]


@covers("Future.result", "Future.exception")
def result(site: Site, timeout: float | None = 60) -> None:
    future = site.executor.submit(abs, -1)
    assert future.result(60) == 1
    assert future.result(timeout) == 1
    assert future.exception(timeout) is None


@covers("Latency.percentile")
def percentile(site: Site, quantile: float = 0.5) -> None:
    assert site.consumer
    latency = site.broker.stats().channel(TOPIC, CHANNEL).latency
    assert latency is not None
    latency.percentile(quantile)
