"""The scenes of test_leaks for the methods that only a supervisor calls, and for spills."""

from __future__ import annotations

import pytest
from conventions.leak_scenes import Scene, nothing, scene
from support.in_process_broker import World

from shmq import ShmqError
from shmq.client import Producer


@scene(
    "Broker.supervise",
    "Broker.supervisor_wait",
    "Broker.stopping",
    "Broker.names_written",
    "Broker.set_data_path",
    "Broker.disk_trouble",
)
def supervise(s: Scene) -> None:
    s.supervisor.stopping()
    s.supervisor.names_written(0, 1)
    s.supervisor.supervise(**s.world.limits)
    s.supervisor.set_data_path("/nowhere")
    s.supervisor.disk_trouble(28)
    s.supervisor.supervisor_wait(0)
    s.supervisor.supervisor_wait(0)


@scene("Broker.spiller_request", "Broker.spiller_pending", "Broker.scan_at")
def spiller_pending(s: Scene) -> None:
    s.supervisor.scan_at(0, 0)
    s.supervisor.spiller_pending()
    s.supervisor.spiller_request(s.queue)
    assert s.supervisor.spiller_pending() == [s.queue]
    s.supervisor.spiller_request(1 << 20)
    assert s.supervisor.spiller_pending() == []


@scene("Broker.close_directory", slow=True)
def close_directory(s: Scene) -> None:
    with World() as world:
        world.supervisor.close_directory()


@scene(
    "Broker.create_topic",
    "Broker.reserve_queue",
    "Broker.create_queue",
    "Broker.enter_queue",
    "Broker.take_over",
    "Broker.renamed",
    "Broker.trim",
    "Broker.erase_queue",
    "Broker.remove_queue",
    "Broker.remove_topic",
    slow=True,
)
def queues(s: Scene) -> None:
    topic, generation = s.supervisor.create_topic("other", 0)
    assert s.supervisor.take_over(topic, "c") is None
    backlog = s.world.create_queue("other", None)
    Producer(s.broker, topic, generation, "other", nothing, nothing).publish(b"x")  # type: ignore[arg-type]
    assert s.supervisor.take_over(topic, "c") == backlog
    s.supervisor.renamed(backlog[0], "other:c")
    assert s.supervisor.trim(backlog[0]) == 0
    with pytest.raises(ShmqError):
        s.supervisor.trim(1 << 20)
    with pytest.raises(ShmqError):
        s.supervisor.create_topic("not valid", 0)
    with pytest.raises(ShmqError):
        s.supervisor.remove_topic(topic, generation)
    assert s.supervisor.erase_queue(*backlog, idle=True)
    s.supervisor.remove_queue(*backlog, closed=True)
    s.world.drop_file(backlog[1])
    s.supervisor.remove_topic(topic, generation)


@scene("Broker.expire", "Broker.adopt", "Broker.rebuild", "Broker.audit")
def supervisors_work(s: Scene) -> None:
    s.message()
    s.producer.publish(b"x", defer=5, timeout=0)
    assert s.supervisor.expire(s.queue, 10, 1 << 62, 1 << 62) == (1, 1)
    s.supervisor.rebuild(s.queue)
    s.supervisor.adopt(s.queue)
    assert not s.supervisor.audit(s.queue)
    s.consumer.take_many(10, 0).finish()
    with pytest.raises(TypeError):
        s.supervisor.expire(s.queue, 1, "x", 5)  # type: ignore[arg-type]


@scene(
    "Broker.spill_begin",
    "Broker.restore",
    "Broker.evict_read_ahead",
    "Broker.disk_set",
    "Broker.disk_adopt",
    "Broker.stage_oldest",
    "Spill.count",
    "Spill.bytes",
    "Spill.lengths",
    "Spill.positions",
    "Spill.encode",
    "Spill.end",
)
def spill(s: Scene) -> None:
    s.producer.publish_many([b"x" * 20] * 8, timeout=0)
    s.supervisor.stage_oldest(s.queue, 1)
    view = s.world.queue_view(s.queue)
    read = view.read("disk_write")
    assert s.supervisor.disk_set(s.queue, read, read, 0)
    s.supervisor.spill_begin(s.queue, 2, 1 << 20)  # dropped: given back
    failed = s.supervisor.spill_begin(s.queue, 2, 1 << 20, True)
    assert failed is not None
    failed.end(0, False)
    batch = s.supervisor.spill_begin(s.queue, 4, 1 << 20)
    assert batch is not None
    data = batch.encode()
    assert (batch.count, batch.bytes) == (4, len(data) == sum(batch.lengths) and len(data))
    for number in range(4):
        batch.positions[number] = read + 50 * number
    assert batch.end(read + len(data), True)
    with pytest.raises(RuntimeError):
        batch.encode()
    assert s.supervisor.restore(s.queue, data, read, read + len(data)) == (4, len(data))
    assert s.supervisor.evict_read_ahead(s.queue) == 4
    assert s.supervisor.restore(s.queue, data, read, read + len(data)) == (4, len(data))
    with pytest.raises(ShmqError):
        s.supervisor.spill_begin(900, 2, 1)
    s.supervisor.disk_adopt(s.queue, read + len(data), read + len(data), 0, s.number)
    assert s.supervisor.evict_read_ahead(s.queue) == 0, (
        "what is in memory has no place there any more"
    )
    assert len(s.consumer.take_many(10, 0)) == 8
    s.broker.empty(s.queue, s.serial)


@scene("Broker.chunk_begin", "Broker.chunk_load", "Broker.chunk_depth", "Spill.position")
def chunks(s: Scene) -> None:
    s.producer.publish_many([b"x" * 20] * 4, defer=5, timeout=0)
    s.number += 1
    s.supervisor.chunk_begin(s.queue, s.number, 0, 2, 1 << 20)  # dropped: given back
    batch = s.supervisor.chunk_begin(s.queue, s.number, 0, 10, 1 << 20)
    assert batch is not None
    assert (batch.count, batch.position) == (4, s.number)
    data, dues = batch.encode(), bytes(batch.positions)
    assert batch.end(s.number, True)
    assert s.supervisor.chunk_load(s.queue, data, dues, s.number << 24) == 4
    s.supervisor.chunk_depth(s.queue, 0)
    with pytest.raises((TypeError, ValueError, ShmqError)):
        s.supervisor.chunk_load(s.queue, "text", dues, 0)
    s.broker.empty(s.queue, s.serial)


@scene("Broker.pump")
def pump(s: Scene) -> None:
    if s.supervisor.find_queue(s.topic, None) is None:
        s.world.create_queue("t", None)
    s.broker.pause_topic(s.topic, s.generation, True)
    s.producer.publish_many([b"x"] * 5, timeout=0)
    s.broker.pause_topic(s.topic, s.generation, False)
    assert s.supervisor.pump(s.topic, s.generation, 10) == 5
    s.consumer.take_many(10, 0).finish()


@scene("Broker.reap_scan", "Broker.reap_spare", "Broker.reap", slow=True)
def reap(s: Scene) -> None:
    client = s.world.attach()
    consumer = client.consumer("t", "c")
    s.producer.publish(b"x", timeout=0)
    message = consumer.take(0)
    assert message is not None
    client.die()
    s.supervisor.reap_spare(900, 1)
    assert s.world.reap() == {client.index: 1}
    s.world._clients.remove(client)
    again = s.consumer.take(0)
    assert again is not None
    again.finish()
