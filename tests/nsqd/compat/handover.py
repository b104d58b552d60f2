"""Helpers for tests of a hand-over between shmq and nsqd."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from support.deliveries import Delivered
from support.processes import Child
from support.real_nsqd import Nsqd

import shmq
from shmq.storage.data_path import QueueFiles, existing_files

FILE = 1 << 20  # --max-bytes-per-file
SMALL = {"mem_queue_size": 1000, "max_bytes_per_file": FILE}  # a shmq with most of it on disk
ON_DISK = {"mem_queue_size": 0, "max_bytes_per_file": FILE}  # an nsqd with all of it on disk


def numbered(count: int, first: int = 0) -> list[bytes]:
    """Bodies of many lengths, no two alike."""
    return [b"%07d" % i + b"\n" * (i * 7919 % 151) for i in range(first, first + count)]


def publish(broker: shmq.Broker, topic: str, bodies: Sequence[bytes]) -> list[str]:
    """Their ids."""
    producer = broker.producer(topic)
    ids: list[int] = []
    for first in range(0, len(bodies), 250):
        ids += producer.publish_many(bodies[first : first + 250])
    return [f"{number:016x}" for number in ids]


def take(broker: shmq.Broker, topic: str, channel: str, count: int) -> Delivered:
    """Take and finish this many messages."""
    delivered = Delivered()
    with broker.consumer(topic, channel) as consumer:
        while lacking := count - len(delivered.ids):
            batch = consumer.take_many(min(lacking, 200), timeout=10)
            assert batch, f"{len(delivered.ids)} of {count} came"
            batch.finish()
            delivered.add(batch)
    return delivered


def stop(server: Child) -> None:
    """End a shmq: everything to disk."""
    assert server.kill(signal.SIGTERM) == 0, server.errors


def files(data_path: Path, base: str) -> QueueFiles:
    """The files of one queue."""
    return existing_files(data_path)[base]


def complaints(nsqd: Nsqd, base: str) -> list[str]:
    """nsqd's complaints about the files of a queue."""
    lines = [line for line in nsqd.log.splitlines() if f"DISKQUEUE({base})" in line]
    return [line for line in lines if "INFO" not in line]
