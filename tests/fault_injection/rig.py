"""A program: the supervisor's disk side with a disk that fails, once for every system call.

    python rig.py SCENARIO STRIDE

A scenario puts messages through the disk, with no thread but this one. It is run once to count its
system calls on the data path; then once for each call (each STRIDE-th), with every kind of failure,
at that call alone and from it on until the disk is well again. Each time everything that was
published must be delivered once, in order, by this supervisor or the next one; and every error on
the way must be one that says what it is about. A line for each case that is not so; last, how many
there were. `mutant` as a third word: a supervisor that takes a failed write for a good one, which
must be found.

Run by tests/fault_injection/test_faults.py with the interposer preloaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shmq import _native, shm
from shmq._native import Full, ShmqError
from shmq.client import Batch, Consumer, Producer
from shmq.options import Options
from shmq.storage import metadata
from shmq.storage.dirlock import DirLock
from shmq.storage.diskqueue import DiskQueue
from shmq.supervisor import shutdown, startup
from shmq.supervisor.registry import Queue
from shmq.supervisor.supervisor import Supervisor

DISK = ctypes.CDLL(os.environ["LD_PRELOAD"].rpartition(":")[2])
KINDS = {
    "ENOSPC": errno.ENOSPC,
    "EIO": errno.EIO,
    "EMFILE": errno.EMFILE,
    "half": 0,
}
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
                    self.round()
                    if DISK.faults_armed:
                        heal()  # the disk is well again when nothing else helps
            else:
                raise AssertionError(f"there is never room for {number}")

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


# -- the scenarios: each returns what came and what must have come


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


SCENARIOS: dict[str, Callable[[Rig], tuple[Rig, list[int], list[int]]]] = {
    "overflow": overflow,
    "stop": stop,
    "begin": begin,
    "adopt": adopt,
    "rename": rename,
    "later": later,
    "empty": empty,
    "names": names,
}


def run(name: str, first: int, last: int, error: int) -> tuple[str, int]:
    """The failure of a case (empty if it passed) and the number of its calls."""
    path = Path(tempfile.mkdtemp(prefix="shmq-faults-", dir="/dev/shm"))  # fsync is quick there
    instance = f"test-faults-{os.getpid()}"
    rig = None

    def rearm() -> None:
        DISK.faults_watch(str(path).encode())
        DISK.faults_arm(first, last, error)
        DISK.faults_armed = last != 0

    DISK.rearm = rearm
    heal()
    try:
        rig = Rig(path, instance)
        rearm()
        rig, came, wanted = SCENARIOS[name](rig)
        if came != wanted:
            lost = sorted(set(wanted) - set(came))
            twice = len(came) - len(set(came))
            return f"came {len(came)} of {len(wanted)}; lost {lost[:5]}, twice {twice}", 0
    except Exception as exc:
        logging.getLogger().error("it ended", exc_info=True)
        return f"{type(exc).__name__}: {exc}", 0
    finally:
        calls = DISK.faults_count()
        heal()
        DISK.faults_watch(b"")
        if rig is not None:
            with contextlib.suppress(AttributeError):  # it was left already
                rig.leave()
        shm.unlink_instance(instance)
        shutil.rmtree(path)
    return "", calls


def cases(count: int, stride: int) -> Iterator[tuple[str, int, int, int]]:
    for first in range(1, count + 1, stride):
        for kind, error in KINDS.items():
            yield f"{kind} at call {first}", first, first, error
            if error:
                yield f"{kind} from call {first} on", first, LONG, error


def believing(write: Callable[..., None]) -> Callable[..., None]:
    """A write that takes every failure for success."""

    def write_or_not(*arguments: Any, **keywords: Any) -> None:
        with contextlib.suppress(OSError):
            write(*arguments, **keywords)

    return write_or_not


def main() -> int:
    name, stride = sys.argv[1], int(sys.argv[2])
    if "mutant" in sys.argv:
        DiskQueue.write = believing(DiskQueue.write)  # type: ignore[method-assign]
    logging.basicConfig(level="CRITICAL")
    wrong, count = run(name, 0, 0, 0)
    if wrong:
        print(f"without a fault: {wrong}")
    number = 0
    for what, first, last, error in cases(count, stride):
        wrong, _ = run(name, first, last, error)
        number += 1
        if wrong:
            print(f"{name}, {what}: {wrong}", flush=True)
    print(f"{number} cases, {count} calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
