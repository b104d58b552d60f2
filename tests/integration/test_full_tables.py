"""Each table that a process can fill, filled: the error says which one is full, and what it says to
do helps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

import shmq
from shmq.layout import constant

WRONG = "delete topics, channels"  # the remedy of a full table of those


def full(call: Callable[[], object], says: str) -> None:
    with pytest.raises(shmq.ShmqError, match=says) as info:
        call()
    assert "table is full" in str(info.value)
    assert WRONG not in str(info.value)
    assert "/dev/shm" not in str(info.value)


def test_names_of_lease_holders(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    most = constant("LEASE_HOLDERS")
    held = [broker.lease_holder("t", "c", f"h{number}") for number in range(most)]
    full(lambda: broker.lease_holder("t", "c", "more"), "64 names lease.*close a holder")
    held[0].close()
    broker.lease_holder("t", "c", "more")


def test_leases_of_a_channel(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    broker.producer("t").publish_many([b"x"] * 100)
    holder = broker.lease_holder("t", "c", "me")
    leases = [holder.lease(1) for _ in range(constant("LEASES"))]
    assert None not in leases
    full(lambda: holder.lease(1), "64 leases.*finish those that are open")
    assert leases[0] is not None
    holder.finish_lease(leases[0].id)
    assert holder.lease(1) is not None


def test_consumers(broker: shmq.Broker) -> None:
    broker.create_channel("t", "c")
    with contextlib.ExitStack() as stack:
        made = []

        def make() -> None:
            made.append(stack.enter_context(broker.consumer("t", "c")))

        def make_all() -> None:
            for _ in range(constant("SESSIONS") + 1):
                make()

        with pytest.raises(shmq.ShmqError) as info:
            make_all()
        assert "close some" in str(info.value)
        assert WRONG not in str(info.value)
        made.pop(0).close()
        make()


def test_results_stores(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker()
    most = constant("STORES")
    for number in range(most):
        broker.results(f"r{number}", 16, 1 << 16)
    with pytest.raises(shmq.ShmqError, match="table is full; delete topics, channels or results"):
        broker.results("more", 16, 1 << 16)
    broker.delete_results("r0")
    broker.results("more", 16, 1 << 16)


def test_topics(open_broker: Callable[..., shmq.Broker]) -> None:
    broker = open_broker(max_topics=3)
    for number in range(3):
        broker.create_topic(f"t{number}")
    with pytest.raises(shmq.ShmqError, match="table is full; delete topics"):
        broker.create_topic("more")
    broker.delete_topic("t0")
    broker.create_topic("more")
