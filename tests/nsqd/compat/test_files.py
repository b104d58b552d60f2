"""Files of one that the other has no use for: what was set aside, and deferred messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nsqd.compat.handover import ON_DISK, SMALL, complaints, files, numbered, publish, stop, take
from support.deliveries import take_all
from support.processes import Child, eventually
from support.real_nsqd import Nsqd

import shmq
from shmq.storage import deferred, metadata
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.metadata import ChannelMeta, TopicMeta
from shmq.storage.positions import unpack
from shmq.storage.records import RECORD_OVERHEAD, encode_records, scan_records

pytestmark = pytest.mark.peers

Serve = Callable[..., Child]
Attach = Callable[[], shmq.Broker]
Start = Callable[..., Nsqd]


def damage(data_path: Path, base: str) -> tuple[bytes, bytes]:
    """Make the length of the second record of the second file impossible; the bytes of that file,
    and of the record."""
    queue = DiskQueue(data_path, base)
    path = queue.file_path(queue.files()[1])
    data = bytearray(path.read_bytes())
    second, third = map(int, scan_records(data, 1 << 20).offsets[1:3])
    data[second : second + 4] = b"\xff" * 4
    path.write_bytes(data)
    return bytes(data), bytes(data[second:third])


def put(queue: DiskQueue, position: int, bodies: list[bytes]) -> int:
    """Write messages from a position on; the new one."""
    count = len(bodies)
    records = encode_records([1] * count, [0] * count, list(range(count)), bodies)
    lengths = [RECORD_OVERHEAD + len(body) for body in bodies]
    plan = queue.plan(position, lengths)
    queue.write(records, plan, lengths, write_position=position)
    return int(plan[-1])


def bad_files(data_path: Path) -> dict[str, bytes]:
    """Of the channel; of its topic, where it is ahead of its writer, nsqd sets aside good ones."""
    return {path.name: path.read_bytes() for path in data_path.glob("t:c.*.bad*")}


def test_each_leaves_alone_what_the_other_set_aside(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    small = {"mem_queue_size": 0, "max_bytes_per_file": 20_000}
    bodies = numbered(1000)
    peer = nsqd(**small)
    peer.post("/topic/create?topic=t")
    peer.post("/channel/create?topic=t&channel=c")
    peer.publish("t", bodies)
    eventually(lambda: peer.channel("t", "c")["depth"] == len(bodies))
    peer.stop()
    by_nsqd, _ = damage(data_path, "t:c")

    peer = nsqd(**small)
    left = peer.take_all("t", "c").bodies
    peer.publish("t", bodies)
    eventually(lambda: peer.channel("t", "c")["depth"] == len(bodies))
    peer.stop()
    assert 0 < len(left) < len(bodies)
    assert list(bad_files(data_path).values()) == [by_nsqd]

    _, by_shmq = damage(data_path, "t:c")
    server = serve(**small)
    came = take_all(attach(), "t", "c").bodies
    assert len(came) == len(bodies) - 1
    set_aside = bad_files(data_path)
    assert sorted(set_aside.values()) == sorted([by_nsqd, by_shmq])
    publish(attach(), "t", bodies)
    stop(server)

    peer = nsqd(**small)
    assert peer.take_all("t", "c").bodies == bodies
    peer.stop()
    assert complaints(peer, "t:c") == []
    assert bad_files(data_path) == set_aside


def test_a_file_that_was_read_to_its_end_is_no_damage_to_nsqd(nsqd: Start, data_path: Path) -> None:
    metadata.store(data_path, [TopicMeta("t", False, (ChannelMeta("c"),))])
    queue = DiskQueue(data_path, "t:c", max_bytes_per_file=1000)
    read = put(queue, 0, numbered(9))
    write = read
    while unpack(write)[0] == unpack(read)[0]:
        read, write = write, put(queue, write, [b"last"])
    queue.sync(1, read, write)
    peer = nsqd(**ON_DISK)
    assert peer.take_all("t", "c").bodies == [b"last"]
    peer.stop()
    assert complaints(peer, "t:c") == []
    assert bad_files(data_path) == {}


def test_nsqd_ignores_deferred_messages_and_shmq_finds_them_again(
    serve: Serve, attach: Attach, nsqd: Start, data_path: Path
) -> None:
    server = serve(**SMALL)
    broker = attach()
    broker.create_channel("t", "c")
    now, later, soon = numbered(3000), numbered(500, 3000), numbered(500, 3500)
    publish(broker, "t", now)
    producer = broker.producer("t")
    due = time.time() + 600
    producer.publish_many(later, defer=600.0)
    producer.publish_many(soon, defer=1.0)
    with_backlog = broker.producer("backlog")
    with_backlog.publish_many(later, defer=600.0)
    stop(server)
    chunks = {path.name: path.read_bytes() for path in data_path.glob("*.deferred.*")}
    assert {name.partition(".")[0] for name in chunks} == {"t:c", "backlog"}

    peer = nsqd(**ON_DISK)
    assert peer.take_all("t", "c").bodies == now
    peer.publish("t", now)
    eventually(lambda: peer.channel("t", "c")["depth"] == len(now))
    assert peer.stats()["backlog"]["depth"] == 0
    peer.stop()
    assert complaints(peer, "t:c") == []
    assert {path.name: path.read_bytes() for path in data_path.glob("*.deferred.*")} == chunks

    server = serve(**SMALL)
    broker = attach()
    came = take(broker, "t", "c", len(now) + len(soon)).bodies
    assert [body for body in came if body in set(now)] == now
    assert sorted(body for body in came if body not in set(now)) == soon
    stats = broker.stats()
    assert stats.channel("t", "c").deferred == len(later)
    stop(server)
    for base in ("t:c", "backlog"):
        entries = [
            entry
            for file in deferred.existing(data_path)[base]
            for entry in deferred.decode((data_path / file.name).read_bytes()).left(file.read)
        ]
        assert sorted(entry.record[30:] for entry in entries) == later
        assert all(abs(entry.due / 1e9 - due) < 60 for entry in entries)
    assert files(data_path, "t:c").bad == []
