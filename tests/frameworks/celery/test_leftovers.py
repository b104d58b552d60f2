"""A killed program leaves nothing of the queues that go with their last consumer."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import kombu
import pytest
from support.processes import HELPERS, Child, eventually

import shmq
import shmq.integrations.celery.alias
from shmq.errors import Gone, NotRunning
from shmq.integrations.celery import attachment, leftovers
from shmq.integrations.celery import channel as channels
from shmq.integrations.celery.queues import Queue, Queues

TOPIC = "kombu.mine#ephemeral"


@pytest.fixture
def url(broker: shmq.Broker) -> Iterator[str]:
    yield f"shmq://{broker.instance}"
    attachment.detach(broker.instance)


@pytest.fixture
def connect(url: str, keep: Callable[[Any], Any]) -> Callable[[], Any]:
    """`connect()`: a channel of a connection of its own."""
    return lambda: keep(kombu.Connection(url)).channel()


@pytest.fixture
def topics(broker: shmq.Broker) -> Callable[[], set[str]]:
    """`topics()`: those that there are."""
    return lambda: {topic.name for topic in broker.stats().topics}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on its way for long."""
    monkeypatch.setattr(leftovers, "_YOUNG_SECONDS", 0.0)
    monkeypatch.setattr(leftovers, "_STRAY_SECONDS", 0.0)


def reply_queue(channel: Any, expires: float | None = None) -> Any:
    return kombu.Queue("mine", kombu.Exchange("replies"), auto_delete=True, expires=expires)(
        channel
    )


def delete(url: str) -> None:
    """As the one who declared it does, in another program."""
    with kombu.Connection(url) as connection:
        reply_queue(connection.channel()).delete()


def test_a_queue_of_replies_that_nobody_ever_took_from_goes(
    connect: Callable[..., Any], broker: shmq.Broker, keep: Callable[[Any], Any], url: str
) -> None:
    """A program that asked all workers, and was killed before it waited for their answers."""
    code = (
        "import os, signal, kombu, shmq.integrations.celery.alias\n"
        f"channel = kombu.Connection({url!r}).channel()\n"
        "exchange = kombu.Exchange('replies')\n"
        "kombu.Queue('mine', exchange, auto_delete=True, expires=0.1)(channel).declare()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = keep(Child([sys.executable, "-c", code], HELPERS))
    assert child.wait() == -signal.SIGKILL, child.errors
    channel = connect()

    def topics() -> set[str]:
        return {topic.name for topic in broker.stats().topics}

    assert "kombu.mine#ephemeral" in topics()
    taken = kombu.Queue("taken", auto_delete=True, expires=1)(channel)

    def gone() -> bool:
        kombu.Queue(f"other{time.monotonic_ns()}", auto_delete=True)(channel).declare()
        return "kombu.mine#ephemeral" not in topics()

    with kombu.Consumer(channel, [taken]):
        eventually(gone)
        assert "kombu.taken#ephemeral" in topics()
    assert "mine" not in {binding[0] for binding in channel.list_bindings()}


def test_bindings_of_killed_programs_are_forgotten(
    connect: Callable[..., Any],
    broker: shmq.Broker,
    keep: Callable[[Any], Any],
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import os, signal, kombu, shmq.integrations.celery.alias\n"
        f"channel = kombu.Connection({url!r}).channel()\n"
        "queue = kombu.Queue('mine', kombu.Exchange('x'), auto_delete=True)\n"
        "kombu.Consumer(channel, [queue]).consume()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = keep(Child([sys.executable, "-c", code], HELPERS))
    assert child.wait() == -signal.SIGKILL, child.errors
    eventually(lambda: "kombu.mine#ephemeral" not in [t.name for t in broker.stats().topics])
    channel = connect()
    assert "mine" in {binding[0] for binding in channel.list_bindings()}
    kombu.Queue("other", auto_delete=True)(channel).declare()
    assert "mine" in {binding[0] for binding in channel.list_bindings()}, "it may be on its way"
    monkeypatch.setattr(leftovers, "_YOUNG_SECONDS", 0.0)
    kombu.Queue("next", auto_delete=True)(channel).declare()
    assert "mine" not in {binding[0] for binding in channel.list_bindings()}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_that_is_killed_while_it_declares_leaves_nothing(
    connect: Callable[[], Any],
    keep: Callable[[Any], Any],
    url: str,
    topics: Callable[[], set[str]],
    hasty: None,
    when: str,
) -> None:
    """Before or after the queue itself was made."""
    code = (
        "import os, signal, kombu, shmq.integrations.celery.alias\n"
        "from shmq.integrations.celery.queues import Queue\n"
        "make = Queue.make\n"
        "def killed(queue):\n"
        f"    make(queue) if {when!r} == 'after' else None\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Queue.make = killed\n"
        f"channel = kombu.Connection({url!r}).channel()\n"
        "queue = kombu.Queue('mine', kombu.Exchange('x'), auto_delete=True, expires=0.1)\n"
        "queue(channel).declare()"
    )
    child = keep(Child([sys.executable, "-c", code], HELPERS))
    assert child.wait() == -signal.SIGKILL, child.errors
    assert (TOPIC in topics()) == (when == "after")
    queues = connect().connection.queues

    def nothing() -> bool:
        queues.sweep()
        return TOPIC not in topics() and "mine" not in queues.exchanges.ephemeral_queues()

    eventually(nothing)


def test_a_reply_that_comes_while_its_queue_is_deleted_leaves_nothing(
    connect: Callable[[], Any],
    url: str,
    topics: Callable[[], set[str]],
    hasty: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The one who asked went on, and the worker had just seen the queue."""
    reply_queue(connect()).declare()
    exists = Queue.exists

    def late(queue: Queue) -> bool:
        found = exists(queue)
        if queue.name == "mine":
            monkeypatch.setattr(Queue, "exists", exists)
            delete(url)
        return found

    monkeypatch.setattr(Queue, "exists", late)
    answering = connect()
    kombu.Producer(answering).publish("late", exchange="replies", routing_key="")
    queues = answering.connection.queues

    def nothing() -> bool:
        queues.sweep()
        return not any(topic.startswith("kombu.mine") for topic in topics())

    eventually(nothing)


def test_a_reply_to_a_queue_whose_binding_has_gone_makes_no_queue(
    connect: Callable[[], Any],
    url: str,
    topics: Callable[[], set[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply_queue(connect()).declare()
    step = channels.Channel._step

    def late(self: Any, message: Any) -> int:
        delete(url)  # the binding has just said where the message goes
        return step(self, message)

    monkeypatch.setattr(channels.Channel, "_step", late)
    kombu.Producer(connect()).publish("late", exchange="replies", routing_key="")
    assert not any(topic.startswith("kombu.mine") for topic in topics())


def test_a_queue_that_is_declared_while_it_is_forgotten_keeps_its_bindings(
    connect: Callable[[], Any], hasty: None
) -> None:
    """A worker comes back under its name while another program meets that it had gone."""
    channel = connect()
    queue = reply_queue(channel)
    queue.declare()
    exchanges = channel.connection.queues.exchanges
    missing = exchanges.queue("mine")
    exchanges.declare_queue("mine", {**missing, "used": time.time()})
    assert not exchanges.forget_queue("mine", missing)
    assert "mine" in {binding[0] for binding in channel.list_bindings()}
    unbind = exchanges.unbind

    def slowly(binding: Any) -> None:
        exchanges.unbind = unbind
        queue.declare()
        unbind(binding)

    exchanges.unbind = slowly
    assert exchanges.forget_queue("mine", exchanges.queue("mine"))
    assert "mine" in {binding[0] for binding in channel.list_bindings()}


def test_a_queue_that_is_consumed_is_nobodys_leftover(
    connect: Callable[[], Any], topics: Callable[[], set[str]], hasty: None
) -> None:
    """Also if nobody knows it any more."""
    channel = connect()
    queues: Queues = channel.connection.queues
    with kombu.Consumer(channel, [reply_queue(channel)]):
        queues.exchanges.delete_queue("mine")
        for _ in range(3):
            queues.sweep()
        assert TOPIC in topics()


def test_who_takes_messages_sweeps(
    connect: Callable[[], Any], topics: Callable[[], set[str]], hasty: None
) -> None:
    """A worker whose loop is not kombu's, too (gevent), or a program that only listens."""
    channel = connect()
    client, transport = channel.connection.client, channel.connection
    shmq_topic = transport.queues.broker
    shmq_topic.create_channel(TOPIC, "queue#ephemeral")  # nobody has noted it

    def gone() -> bool:
        transport._tidy_at = 0.0
        with pytest.raises(TimeoutError):
            client.drain_events(timeout=0.01)
        return TOPIC not in topics()

    eventually(gone)


# ---- a broker that stops ----


@pytest.mark.parametrize("error", [NotRunning, Gone])
def test_every_try_that_the_policy_allows_is_made(
    connect: Callable[[], Any], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that stops is there until it has stored all messages."""
    publish, tries = Queues.publish, []

    def stopping(*words: Any, **how: Any) -> None:
        tries.append(1)
        if len(tries) <= 3:
            raise error("the broker is stopping")
        publish(*words, **how)

    monkeypatch.setattr(Queues, "publish", stopping)
    channel = connect()
    queue = kombu.Queue("q")
    policy = {"max_retries": 3, "interval_start": 0}
    producer = kombu.Producer(channel)
    producer.publish("x", routing_key="q", declare=[queue], retry=True, retry_policy=policy)
    assert len(tries) == 4
    assert connect().queue_declare("q", passive=True).message_count == 1


def test_a_connection_to_a_broker_that_stops_is_none(
    connect: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect().connection.client
    assert client.connected

    def stopping(broker: shmq.Broker) -> None:
        raise NotRunning("the broker is stopping")

    monkeypatch.setattr(attachment, "not_stopping", stopping)
    assert not client.connected
