"""The rows of the matrix: every public handle, made and used as a program would. Modules named
`rows_of_...` have those that need more than shmq itself.

Each makes what it covers in a process of its own (`holder`), and returns it with its owner. It
holds what it takes: messages in flight, a lease, tasks that run, items that were got with `ack`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import shmq
from shmq import sources
from shmq.remote.consumer import RemoteConsumer, RemoteMessage
from shmq.remote.lease import RemoteLeaseHolder
from shmq.remote.producer import RemoteProducer
from shmq.remote.rows import RemoteBatch

CHANNEL = "c"
WAITING = 5  # messages in the channel before and after
SECONDS = 60.0
GRACE = 0.1  # seconds


@dataclass(frozen=True)
class Site:
    """Where a handle is made. address: of the gateway. port: of 127.0.0.1, passed on to that
    address. topic: it has a channel with messages that wait. silent: a topic without channels."""

    instance: str
    address: str
    port: str
    directory: str
    topic: str
    silent: str


@dataclass
class Held:
    """owner: what is closed for the end "owner"; None for a handle that owns itself."""

    handle: Any
    owner: Any = None
    others: Any = None
    """Objects that are to be alive as long as the handle."""
    close: Callable[[], object] | None = None
    """How a program ends the handle; None: `close()`, or nothing if it has none."""


@dataclass(frozen=True)
class Row:
    """covers: the public classes whose ends it shows. own: it is of an instance of its own. tree:
    it is of the one that a tree of processes has. ends: those that it has; None: all. warm: the
    first one leaves topics and stores that are to stay. keeps: its process has one attachment for
    all of its kind, as long as it lives."""

    name: str
    make: Callable[[Site], Held]
    covers: tuple[type, ...]
    shows: bool
    own: bool
    tree: bool
    ends: tuple[str, ...] | None
    warm: bool
    keeps: bool

    @property
    def module(self) -> str:
        """The module that has it."""
        return self.make.__module__


ROWS: dict[str, Row] = {}


def handle(
    *covers: type,
    shows: bool = True,
    own: bool = False,
    tree: bool = False,
    ends: tuple[str, ...] | None = None,
    warm: bool = False,
    keeps: bool = False,
) -> Callable[[Callable[[Site], Held]], Callable[[Site], Held]]:
    """Add a row. shows: whether one can see from outside that the handle is there.
    own: whether it is of an instance of its own, whose supervisor is a child of its process; tree:
    whether that is the one of its tree of processes. ends, warm, keeps: as in Row."""

    def add(make: Callable[[Site], Held]) -> Callable[[Site], Held]:
        name = make.__name__
        ROWS[name] = Row(name, make, covers, shows, own or tree, tree, ends, warm, keeps)
        return make

    return add


def attached(site: Site) -> shmq.Broker:
    return shmq.attach(site.instance, timeout=SECONDS)


# ---- attached ----


@handle(shmq.Broker)
def broker(site: Site) -> Held:
    return Held(attached(site))


@handle(shmq.Producer)
def producer(site: Site) -> Held:
    owner = attached(site)
    made = owner.producer(site.silent)
    made.publish(b"x")
    return Held(made, owner)


@handle(shmq.Loan)
def loan(site: Site) -> Held:
    owner = attached(site)
    made = owner.producer(site.topic)
    lent = made.loan(1000)
    return Held(lent, owner, made, lambda: lent.__exit__(ValueError, ValueError(), None))


@handle(shmq.Consumer, shmq.Message)
def consumer(site: Site) -> Held:
    owner = attached(site)
    made = owner.consumer(site.topic, CHANNEL)
    message = made.take(SECONDS)
    assert message is not None
    return Held(made, owner, message)


@handle(shmq.Consumer, shmq.Batch)
def batch(site: Site) -> Held:
    owner = attached(site)
    made = owner.consumer(site.topic, CHANNEL)
    some = made.take_many(3, SECONDS)
    return Held(made, owner, some)


@handle(shmq.MultiConsumer)
def consumer_of_many(site: Site) -> Held:
    owner = attached(site)
    made = owner.consumer([site.topic, "many.*"], CHANNEL)
    message = made.take(SECONDS)
    assert message is not None
    return Held(made, owner, message)


@handle(shmq.LeaseHolder, shmq.Lease, shmq.LeasedBatch)
def lease_holder(site: Site) -> Held:
    owner = attached(site)
    made = owner.lease_holder(site.topic, CHANNEL, "holder", ttl=None, grace=GRACE)
    lease = made.lease(3, timeout=SECONDS)
    assert lease is not None
    rows = next(iter(made.read_lease(lease.id)))
    return Held(made, owner, rows)


@handle(shmq.Results)
def results(site: Site) -> Held:
    owner = attached(site)
    made = owner.results("kept")
    made.set("key", b"value")
    return Held(made, owner)


@handle(shmq.Results)
def wait_for_a_result(site: Site) -> Held:
    owner = attached(site)
    made = owner.results("kept")

    def wait() -> None:
        try:
            made.wait("never", None)
        except shmq.ShmqError:
            return  # its owner was closed, or the instance ended

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return Held(made, owner, thread)


@handle(shmq.DeadLetters, shmq.DeadLetter)
def dead_letters(site: Site) -> Held:
    owner = attached(site)
    return Held(owner.dead(site.topic, CHANNEL), owner)


@handle(shows=False)
def viewer(site: Site) -> Held:
    return Held(sources.open_readonly(site.instance))


# ---- queues and pools of an instance of their own ----


def put_and_get(queue: Any) -> Any:
    for number in range(WAITING):
        queue.put(number)
    assert queue.get() == 0
    return queue


@handle(shmq.Queue, tree=True)
def queue(site: Site) -> Held:
    return Held(put_and_get(shmq.Queue()))


@handle(shmq.JoinableQueue, tree=True)
def joinable_queue(site: Site) -> Held:
    return Held(put_and_get(shmq.JoinableQueue()))


@handle(shmq.SimpleQueue, tree=True)
def simple_queue(site: Site) -> Held:
    return Held(put_and_get(shmq.SimpleQueue()))


def sleep(seconds: float) -> None:
    time.sleep(seconds)


@handle(shmq.Executor, shmq.Future, tree=True)
def executor(site: Site) -> Held:
    made = shmq.Executor(2)
    assert made.submit(len, "abc").result() == 3
    future = made.submit(sleep, 0.2)
    return Held(made, None, future, made.shutdown)


@handle(shmq.Broker, own=True)
def embedded_broker(site: Site) -> Held:
    made = shmq.Broker(disk=False)
    made.producer("t").publish(b"x")
    return Held(made)


@handle(shmq.Broker, own=True)
def embedded_broker_on_disk(site: Site) -> Held:
    made = shmq.Broker()
    made.create_topic("t")
    return Held(made)


# ---- queues and pools of a broker ----


@handle(shmq.Queue)
def queue_of_a_broker(site: Site) -> Held:
    owner = attached(site)
    made = shmq.Queue(broker=owner, name="items")
    made.put(1)
    assert made.get() == 1
    return Held(made, owner)


@handle(shmq.Queue)
def private_queue_of_a_broker(site: Site) -> Held:
    owner = attached(site)
    made = shmq.Queue(broker=owner)
    made.put(1)
    made.put(2)
    assert made.get() == 1
    return Held(made, owner)


@handle(shmq.Executor, shmq.Future)
def executor_of_a_broker(site: Site) -> Held:
    owner = attached(site)
    made = shmq.Executor(2, broker=owner)
    assert made.submit(len, "abc").result() == 3
    return Held(made, owner, None, made.shutdown)


def prime(broker: shmq.Broker) -> None:
    """Make what rows make in their broker and is to stay there. A store without keys would be gone
    at a stop."""
    shmq.Queue(broker=broker, name="items").close()
    with shmq.Executor(1, broker=broker) as pool:
        assert pool.submit(len, "abc").result() == 3
    for name in ("tasks", "tasks.signs", "kept"):
        broker.results(name).set("stays", b"value")
    for row in ROWS.values():
        if not row.own:
            broker.create_channel(f"t.{row.name}", CHANNEL)
            bodies = [b"%d" % number for number in range(WAITING)]
            broker.producer(f"t.{row.name}").publish_many(bodies)
            broker.producer(f"silent.{row.name}").publish(b"x")


# ---- remote ----


def remote(site: Site) -> shmq.RemoteBroker:
    return shmq.connect(site.address, timeout=SECONDS, secret=f"the secret of {site.topic}")


@handle(shmq.RemoteBroker)
def remote_broker(site: Site) -> Held:
    made = remote(site)
    made.create_topic(site.topic)
    return Held(made)


@handle(RemoteProducer, shows=False)
def remote_producer(site: Site) -> Held:
    owner = remote(site)
    made = owner.producer(site.silent)
    return Held(made, owner)


@handle(RemoteConsumer, RemoteMessage)
def remote_consumer(site: Site) -> Held:
    owner = remote(site)
    made = owner.consumer(site.topic, CHANNEL)
    message = made.take(SECONDS)
    assert message is not None
    return Held(made, owner, message)


@handle(RemoteLeaseHolder, RemoteBatch)
def remote_lease_holder(site: Site) -> Held:
    owner = remote(site)
    made = owner.lease_holder(site.topic, CHANNEL, "holder", ttl=1.0, grace=GRACE)
    lease = made.lease(3, timeout=SECONDS)
    assert lease is not None
    rows = next(iter(made.read_lease(lease.id)))
    return Held(made, owner, rows)
