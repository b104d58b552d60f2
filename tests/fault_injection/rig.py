"""A supervisor taken apart, whose system calls on the data path can be made to fail.

Its loops are driven from the one thread of the program that imports this: `faults.py`, or
`scribble.py`, with the interposer preloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shmq import _native, shm
from shmq.client import Batch, Consumer, Producer
from shmq.errors import Full, ShmqError
from shmq.options import Options
from shmq.settings import NONE
from shmq.storage.dirlock import DirLock
from shmq.supervisor import dead_letters, shutdown, startup
from shmq.supervisor.loops import Bell
from shmq.supervisor.registry import Queue
from shmq.supervisor.scan import Scanner
from shmq.supervisor.supervisor import Supervisor

DISK = ctypes.CDLL(os.environ["LD_PRELOAD"].rpartition(":")[2])
LONG = 1 << 30
SECOND = 10**9


class Rig:
    """A supervisor taken apart, and a client."""

    def __init__(self, path: Path, instance: str) -> None:
        self.path, self.instance = path, instance
        options = Options.from_keywords(
            instance=instance,
            data_path=str(path),
            mem_queue_size=256,
            in_flight_slots=256,
            max_bytes_per_file=16_384,
            sync_every=50,
        )
        self.lock = DirLock(path)
        self.lock.acquire()
        self.supervisor = Supervisor(options)
        try:
            self.directory = startup.enter(options)
            try:
                self.supervisor._begin_or_undo(self.directory)
            except BaseException:
                self.close_directory()
                raise
        except BaseException:
            self.lock.release()
            raise
        self.client = _native.Broker(
            shm.open_directory(instance),
            lambda serial: shm.open_queue(instance, serial),
            0,
            instance,
        )

    def round(self) -> None:
        """A round of the spiller and the metadata writer; a disk that failed is tried at once."""
        spiller = self.supervisor._spiller
        for queue in self.supervisor._registry.queues:
            spiller._states[queue].retry_at.clear()
        spiller._policy.is_fast = lambda *_: False  # type: ignore[method-assign]
        spiller._round(time.monotonic())
        with contextlib.suppress(OSError):
            self.supervisor._metadata_writer.flush()

    def scan(self) -> None:
        """A round of the scanner: what times out, is due, has expired or is dead. Letters that had
        to wait are tried at once."""
        dead_letters._LATER_NS = 0  # type: ignore[misc]
        s = self.supervisor
        scanner, bell = Scanner(s._broker, s._registry, s._options), Bell()
        for queue in s._registry.queues:
            scanner._expire(queue.index, bell)

    def configure(self, topic: str, channel: str, **words: Any) -> Queue:
        """A channel with these settings."""
        queue = self.supervisor._manager.create_channel(topic, channel)
        settings = NONE.changed(words).to_native()
        self.supervisor._broker.configure(queue.index, queue.serial, settings)
        return queue

    def producer(self, topic: str) -> Producer:
        made = self.supervisor._manager.create_topic(topic)
        backlog = lambda: self.supervisor._manager.create_backlog(topic)  # noqa: E731
        return Producer(self.client, made.index, made.generation, topic, backlog, fail)  # type: ignore[arg-type]

    def queue(self) -> Queue:
        """The only one."""
        (queue,) = self.supervisor._registry.queues
        return queue

    def consumer(self, topic: str, channel: str) -> Consumer:
        queue = self.supervisor._manager.create_channel(topic, channel)
        return Consumer(self.client, queue.index, queue.serial, topic, channel, 200, 0, Batch, fail)  # type: ignore[arg-type]

    def publish(self, producer: Producer, numbers: range, defer: float | None = None) -> None:
        for number in numbers:
            for _ in range(2000):
                try:
                    producer.publish(b"%06d" % number + bytes(200), defer, 0)
                    break
                except Full:
                    self.advance()
            else:
                raise AssertionError(f"there is never room for {number}")

    def advance(self) -> None:
        """A round where nothing goes on; the disk is well again when nothing else helps."""
        self.round()
        if DISK.faults_armed:
            heal()

    def drain(self, topic: str, channel: str, count: int, patience: int = 30) -> list[int]:
        """Everything there is, in the order in which it comes."""
        consumer, came, idle = self.consumer(topic, channel), [], 0
        while idle < patience:
            batch = consumer.take_many(100, 0)
            came += [int(body[:6]) for body in batch.bodies()]
            batch.finish()
            idle = 0 if len(batch) else idle + 1
            self.round()
            if len(came) >= count and idle > 3:
                break
        consumer.close()
        return came

    def flush(self) -> None:
        """The end, as after SIGTERM. Raises OSError."""
        s = self.supervisor
        s._broker.stopping()
        s._results.flush()
        shutdown.flush(s._broker, s._registry, s._manager, s._spiller, s._metadata_writer)

    def leave(self) -> None:
        """As if it had been killed, or had ended: the next one finds what is there."""
        for queue in self.supervisor._registry.queues:
            queue.disk.close()
        with contextlib.suppress(ShmqError):
            self.client.detach()
        with contextlib.suppress(ShmqError):
            self.supervisor._broker.detach()
        self.close_directory()
        del self.supervisor, self.client
        self.lock.release()

    def close_directory(self) -> None:
        fcntl.flock(self.directory.fd, fcntl.LOCK_UN)  # a mapping would keep it
        self.directory.close()


def fail() -> None:
    raise AssertionError("nobody forks")


def heal() -> None:
    DISK.faults_arm(0, 0, 0)
    DISK.faults_armed = False


def again(rig: Rig) -> Rig:
    """The next supervisor, on a disk that is well; of an instance that ended, or that was left."""
    rig.leave()
    heal()
    return Rig(rig.path, rig.instance)


def ended(rig: Rig) -> Rig:
    """Stop it; what cannot be written stays in shared memory for the next one."""
    try:
        rig.flush()
    except OSError as exc:
        typed(exc)
    else:
        rig.leave()
        shm.unlink_instance(rig.instance)
        heal()
        return Rig(rig.path, rig.instance)
    return again(rig)


def typed(exc: BaseException) -> None:
    """An error says what it is about."""
    assert isinstance(exc, ShmqError | OSError), repr(exc)
    assert not isinstance(exc, OSError) or exc.errno, repr(exc)


@contextlib.contextmanager
def soon(seconds: int) -> Iterator[None]:
    """The system clock is so much later for the supervisor."""
    real = _native.realtime
    _native.realtime = lambda: real() + seconds * SECOND
    try:
        yield
    finally:
        _native.realtime = real


def drain_late(rig: Rig, count: int) -> list[int]:
    """As `drain`, with what is due."""
    came: list[int] = []
    for _ in range(20):
        for queue in rig.supervisor._registry.queues:
            rig.supervisor._broker.expire(queue.index, LONG, None, _native.realtime())
        came += rig.drain("t", "c", count - len(came))
        if len(came) >= count:
            break
    return came
