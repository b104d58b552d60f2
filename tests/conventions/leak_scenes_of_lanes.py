"""The scenes of test_leaks for consumers of many queues, and for results stores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conventions.leak_scenes import Scene, scene

from shmq import ShmqError, _native
from shmq.client import Batch, Consumer


class Lanes(_native.Lanes):
    """As MultiConsumer, for the world of a scene."""

    told: int

    def _names(self) -> None:
        self.told = getattr(self, "told", 0) + 1

    def _gone(self, consumer: Consumer) -> None:
        self.remove(consumer)


@scene(
    "Lanes.add",
    "Lanes.remove",
    "Lanes.consumers",
    "Lanes.take",
    "Lanes.take_many",
    "Lanes.wait",
    "Lanes.wake",
    "Lanes.pass_on",
    "Lanes.limit",
    "Lanes.reopen",
    "Lanes.close",
    "Lanes.closed",
    "Lanes.max_in_flight",
    "Message.topic",
    "Batch.topic",
)
def lanes(s: Scene) -> None:
    made = Lanes(s.broker, True, (2, 1), 5, Batch, True)
    one, other = s.make_consumer(), s.make_consumer()
    made.add(one, 0)
    made.add(other, 1)
    assert made.consumers == [one, other]
    assert made.take(0) is None
    assert made.told == 1
    assert len(made.take_many(3, 0)) == 0
    assert made.take_many(3, 0).topic is None
    assert not made.wait(0)
    made.wake()
    assert not made.wait(_native.now() + 10**9)
    s.producer.publish_many([b"x"] * 3, timeout=0)
    assert made.wait(_native.now() + 10**9)
    made.pass_on()
    kept = made.take(0)
    assert kept.topic == "t"
    batch = made.take_many(2, 0)
    assert (batch.topic, len(batch)) == ("t", 2)
    batch.finish()
    made.limit(1)
    assert made.max_in_flight == 1
    assert made.take(0) is None
    made.remove(other)
    made.remove(other)
    assert not made.reopen(s.broker)
    for wrong in (None, 5, s.producer):
        with pytest.raises(TypeError):
            made.add(wrong, 0)  # type: ignore[arg-type]
    with pytest.raises(ShmqError):
        made.add(other, 2)
    with pytest.raises(ValueError, match="already"):
        made.add(one, 0)
    for weights in ((), (0,), (1 << 40,), "ab", (-1,)):
        with pytest.raises((ShmqError, TypeError, ValueError, OverflowError)):
            _native.Lanes(s.broker, True, weights, 5, Batch, False)  # type: ignore[arg-type]
    kept.finish()
    made.close()
    assert made.closed
    with pytest.raises(ShmqError):
        made.take(0)
    dropped = Lanes(s.broker, False, [1], 5, Batch, False)
    dropped.add(other, 0)
    s.broker.empty(s.queue, s.serial)


@scene(
    "Broker.find_store",
    "Broker.request_store",
    "Broker.reserve_store",
    "Broker.create_store",
    "Broker.enter_store",
    "Broker.remove_store",
    "reopen_store",
    "Store.retire",
)
def make_and_remove_a_store(s: Scene) -> None:
    store = s.make_store()
    assert s.broker.find_store("r") == (0, store.serial)
    assert s.broker.find_store("other") is None
    for name, limits in (("no good", (1, 1 << 20)), ("r", (0, 0))):
        with pytest.raises(ShmqError):
            s.broker.request_store(name, *limits, timeout=0)
    with pytest.raises(ShmqError, match="not answered"):
        s.broker.request_store("another", 5, 1 << 20, 0)
    assert s.supervisor.next_request() is None
    with pytest.raises(ShmqError):
        s.supervisor.create_store(store.fd, 500, 5, "r", 5, 1 << 20)
    with pytest.raises(ShmqError):
        s.supervisor.enter_store(500, 5, "r", 5, 1 << 20)
    store.handle.retire()
    with pytest.raises(ShmqError):
        _native.Store(s.broker, 0, store.serial, "r")
    _native.reopen_store(store.fd)
    with pytest.raises(ShmqError):
        _native.reopen_store(s.world.fd_of(s.serial))
    _native.Store(s.broker, 0, store.serial, "r").get("k")
    s.supervisor.remove_store(0, store.serial)
    with pytest.raises(ShmqError):
        s.supervisor.remove_store(0, store.serial)
    s.world.drop_file(store.serial)


@scene(
    "Store.name",
    "Store.set",
    "Store.add",
    "Store.get",
    "Store.pop",
    "Store.delete",
    "Store.incr",
    "Store.wait",
    "Store.wait_any",
    "Store.stripe",
    "Store.seen",
    "Store.wait_news",
    "Store.scan",
    "Store.info",
    "Store.sweep",
    "Store.trim",
)
def use_a_store(s: Scene) -> None:
    r = s.make_store().handle
    assert (r.name, r._broker) == ("r", s.supervisor)
    for size in (5, 5000, 70_000):
        r.set("k", bytearray(size), 3600)
        assert r.get(b"k") == bytes(size)
        assert r.wait("k", 0) == bytes(size)
        assert r.wait_any(["x", "k"], 0) == ("k", bytes(size))
        assert not r.add(memoryview(b"k"), b"")
        assert [(key, len(value)) for key, value, _ in r.scan(0, True, 10)[0]] == [(b"k", size)]
        assert r.pop("k") == bytes(size)
    assert r.get("k", default=5) == 5
    assert r.wait("k", 0) is None
    assert (r.incr("n", 3), r.incr("n", 3, most=5), r.get("n")) == (3, None, b"3")
    assert (r.delete("n", b"4"), r.delete("n", value=b"3"), r.delete("n")) == (False, True, False)
    waiter = _native.Waiter(s.supervisor)
    r.wait_news(waiter, 1 << r.stripe("k"), r.seen(), 1)
    waiter.close()
    assert len(r.info()) == 9
    assert r.sweep() == (0, False)
    r.trim()
    bad: list[Callable[[], object]] = [
        lambda: r.set("", b""),
        lambda: r.set(5, b""),  # type: ignore[arg-type]
        lambda: r.set("k", "text"),  # type: ignore[arg-type]
        lambda: r.set("k", b"", 0),
        lambda: r.delete("k", "text"),  # type: ignore[arg-type]
        lambda: r.incr("k", 1, least="x"),  # type: ignore[arg-type]
        lambda: r.wait_any([]),
        lambda: r.wait_any([5]),  # type: ignore[list-item]
        lambda: r.wait_any(5),  # type: ignore[arg-type]
        lambda: r.wait_news(r, 1, [], 0),  # type: ignore[arg-type]
        lambda: r.wait_news(waiter, 1, r.seen(), 0),
        lambda: r.set("k", bytes(1 << 20)),
    ]
    for call in bad:
        with pytest.raises((ShmqError, TypeError, ValueError)):
            call()
    s.remove_store(r)
