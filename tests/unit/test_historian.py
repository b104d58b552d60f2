"""The first look of a historian, in the thread of the test."""

from __future__ import annotations

from pathlib import Path

from support.still_supervisor import no_backlog, no_fork, still_supervisor

from shmq.chronicle import COUNTERS
from shmq.client import Producer
from shmq.supervisor.historian import _Table

PUBLISHED = COUNTERS.index("published")


def test_of_fresh_memory_nothing_is_old_at_the_first_look(data_path: Path, instance: str) -> None:
    with still_supervisor(instance, data_path) as (supervisor, client):
        topic = supervisor._manager.create_topic("t")
        queue = supervisor._manager.create_channel("t", "c")
        producer = Producer(client, topic.index, topic.generation, "t", no_backlog, no_fork)
        producer.publish(b"x")
        table = _Table(supervisor._registry)
        table.update(10.0, table.rows)
        assert table.rows.tolist() == [queue.index]
        assert table.moved[:, PUBLISHED].tolist() == [1]

        supervisor._broker.supervise(**supervisor._options.limits())  # as the next supervisor does
        table = _Table(supervisor._registry)
        table.update(10.0, table.rows)
        assert table.rows.tolist() == []
        producer.publish(b"y")
        table.update(10.0, table.rows)
        assert table.moved[:, PUBLISHED].tolist() == [1]
