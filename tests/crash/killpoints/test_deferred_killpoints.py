"""A supervisor dies while it writes in front of what is on disk, or moves deferred messages; the
next one goes on. Nothing is lost, nothing comes twice, nothing deferred comes before it is due."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crash.killpoints import points
from support.deliveries import Background, Drain, take_all
from support.processes import WATCHDOG, Child, arm_server, eventually
from support.recount import recount

import shmq
from shmq.storage import deferred

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"%07d" % i for i in range(start, start + count)]


@pytest.mark.parametrize(("point", "count"), points.PREPENDED)
def test_a_flush_in_front_of_the_disk_cut_short_keeps_everything_in_order(
    killpoints: Path, serve: Serve, attach: Attach, instance: str, point: str, count: int
) -> None:
    options = {"mem_queue_size": 256, "in_flight_slots": 256}
    server = serve(killpoint=(point, count), **options)
    broker = attach()
    broker.create_channel("t", "c")
    for first in range(0, 1500, 100):
        broker.producer("t").publish_many(numbered(100, first))
    assert broker.consumer("t", "c", max_in_flight=50).take_many(50, WATCHDOG).bodies()
    arm_server(server)
    server.kill(signal.SIGTERM)
    server.die()
    server = serve(**options)
    broker.close()
    assert server.kill(signal.SIGTERM) == 0
    serve(**options)
    assert take_all(attach(), "t", "c").bodies == numbered(1500)
    recount(instance, "t", "c")


@pytest.mark.parametrize(("point", "count"), points.DEFERRED)
def test_a_move_of_deferred_messages_cut_short_keeps_each_once(
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    keep: Callable[[Any], Any],
    instance: str,
    data_path: Path,
    point: str,
    count: int,
) -> None:
    server = serve(killpoint=(point, count), in_flight_slots=256)
    broker = attach()
    broker.create_channel("t", "c")
    producer = broker.producer("t")
    arm_server(server)
    due = time.time() + 7

    def publish() -> None:
        for first in range(0, 1000, 20):
            producer.publish_many(numbered(20, first), defer=max(due - time.time(), 0.1))

    publishing = keep(Background(publish))
    drain = keep(Drain(broker, "t", "c"))
    server.die()
    serve(in_flight_slots=256)
    publishing.result()
    while time.time() < due:
        assert not drain.delivered.bodies
        time.sleep(0.01)
    drain.close()
    came = take_all(broker, "t", "c", into=drain.delivered)
    assert came.twice == []
    assert sorted(came.bodies) == numbered(1000)
    recount(instance, "t", "c")
    eventually(lambda: not deferred.existing(data_path))


@pytest.mark.parametrize("point", ["chunk.state", "chunk.written", "chunk.committed"])
def test_a_flush_of_deferred_messages_cut_short_is_finished_by_the_next_one(
    killpoints: Path,
    serve: Serve,
    attach: Attach,
    instance: str,
    data_path: Path,
    point: str,
) -> None:
    server = serve(killpoint=(point, 2 if point != "chunk.state" else 5000))
    broker = attach()
    broker.create_channel("t", "c")
    for first in range(0, 7000, 500):  # two chunks
        broker.producer("t").publish_many(numbered(500, first), defer=3600.0)
    broker.close()
    arm_server(server)
    server.kill(signal.SIGTERM)
    server.die()
    assert serve().kill(signal.SIGTERM) == 0
    bodies = []
    for files in deferred.existing(data_path).values():
        for file in files:
            contents = deferred.decode((data_path / file.name).read_bytes())
            assert not contents.wrong
            bodies += [entry.record[30:] for entry in contents.entries]
    assert sorted(bodies) == numbered(7000)
