"""The supervisor uses its disk: each scene returns what came and what must have come."""

from __future__ import annotations

import contextlib

from rig import DISK, Rig, again, drain_late, ended, heal, soon, typed

from shmq import _native, shm
from shmq.errors import ShmqError
from shmq.storage import metadata


def overflow(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """Far more than memory holds, out and in again."""
    rig.consumer("t", "c").close()
    rig.publish(rig.producer("t"), range(500))
    for _ in range(4):
        rig.round()
    came = rig.drain("t", "c", 250)
    heal()
    return rig, came + rig.drain("t", "c", 500), list(range(500))


def stop(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """Flushed with messages everywhere: in flight, on disk, ready, deferred; then the next one."""
    consumer = rig.consumer("t", "c")
    producer = rig.producer("t")
    rig.publish(producer, range(300))
    rig.round()
    assert len(consumer.take_many(20, 0)) == 20
    rig.publish(producer, range(900, 905), 3000)
    rig = ended(rig)
    with soon(3600):
        return rig, sorted(drain_late(rig, 305)), [*range(300), *range(900, 905)]


def later(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """More deferred messages than memory may hold, to chunks and back when they are due."""
    rig.consumer("t", "c").close()
    rig.publish(rig.producer("t"), range(300), 3000)
    for _ in range(3):
        rig.round()
    with soon(3600):
        came = drain_late(rig, 200)
        heal()
        rig.round()
        return rig, sorted(came + drain_late(rig, 300 - len(came))), list(range(300))


def empty(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """Emptied and filled again: nothing of before comes, also not after the next one's start."""
    rig.consumer("t", "c").close()
    producer, broker = rig.producer("t"), rig.supervisor._broker
    rig.publish(producer, range(300))
    rig.round()
    queue = rig.queue()
    broker.empty(queue.index, queue.serial)
    rig.round()
    rig.publish(producer, range(500, 900))
    rig.round()
    rig = ended(rig)
    return rig, rig.drain("t", "c", 400), list(range(500, 900))


def start_again(rig: Rig) -> Rig:
    """The next supervisor: on a disk that fails or, if that ends its start, on one that is well."""
    DISK.rearm()
    try:
        return Rig(rig.path, rig.instance)
    except (OSError, ShmqError) as exc:
        typed(exc)
        heal()
        return Rig(rig.path, rig.instance)


def begin(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """A start on files and nsqd.dat; one that fails leaves them for the next."""
    heal()
    rig.consumer("t", "c").close()
    rig.publish(rig.producer("t"), range(300))
    rig.round()
    rig.flush()
    rig.leave()
    shm.unlink_instance(rig.instance)
    rig = start_again(rig)
    came = rig.drain("t", "c", 300)
    heal()
    return rig, came + rig.drain("t", "c", 300), list(range(300))


def adopt(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """A supervisor that was killed, its segments and files taken up by the next one."""
    heal()
    rig.consumer("t", "c").close()
    rig.publish(rig.producer("t"), range(400))
    rig.round()
    rig.leave()
    rig = start_again(rig)
    came = rig.drain("t", "c", 400)
    heal()
    return rig, came + rig.drain("t", "c", 400), list(range(400))


def rename(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """A backlog with files becomes the first channel, whose name they get."""
    producer = rig.producer("t")
    rig.publish(producer, range(400))
    rig.round()
    rig.consumer("t", "c").close()
    rig.round()
    rig = again(rig)
    return rig, rig.drain("t", "c", 400), list(range(400))


def names(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """nsqd.dat is the old or the new one, whole."""
    writer, manager = rig.supervisor._metadata_writer, rig.supervisor._manager
    for topic in ("a", "b", "c"):
        manager.create_topic(topic)
        with contextlib.suppress(OSError):
            writer.flush()
        try:
            known = [found.name for found in metadata.load(rig.path)]
        except OSError as exc:  # the disk does not read either
            typed(exc)
        else:
            assert known == ["a", "b", "c"][: len(known)], known
    heal()
    writer.flush()
    return rig, [len(metadata.load(rig.path))], [3]


def results(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """A results store, flushed and read back: each key has its value, in memory or on disk."""
    fill_store(rig, range(300))
    rig = ended(rig)
    came = read_store(rig)
    fill_store(rig, range(300, 310))
    return rig, [*came, *read_store(rig)], [*range(300), *range(310)]


def results_begin(rig: Rig) -> tuple[Rig, list[int], list[int]]:
    """A start that reads a store's file; one that fails leaves it for the next."""
    heal()
    fill_store(rig, range(300))
    rig.flush()
    rig.leave()
    shm.unlink_instance(rig.instance)
    rig = start_again(rig)
    return rig, read_store(rig), list(range(300))


def store_of(rig: Rig) -> _native.Store:
    found = rig.client.find_store("r")
    assert found is not None, "the store is gone"
    return _native.Store(rig.client, *found, "r")


def fill_store(rig: Rig, numbers: range) -> None:
    rig.supervisor._results.create("r", 1000, 1 << 22)
    store = store_of(rig)
    for number in numbers:
        store.set(f"{number}", b"%06d" % number * 200, 3600 if number % 2 else None)


def read_store(rig: Rig) -> list[int]:
    """The numbers of the keys, each of which has its value."""
    bucket: int | None = 0
    found = []
    while bucket is not None:
        rows, bucket = store_of(rig).scan(bucket, True)
        for key, value, ttl in rows:
            assert value == b"%06d" % int(key) * 200, key
            assert (ttl is None) == (int(key) % 2 == 0), key
            found.append(int(key))
    return sorted(found)
