"""A program: garbage in each word of a queue's header, then the supervisor goes on, stops or dies.

    python scribble.py STRIDE [mutant|WORD]

Three queues hold messages in memory, on disk, in flight and deferred; a word of one's header is
overwritten (each STRIDE-th case). Then the supervisor works on, and either flushes everything and
ends or is found dead; the next one takes up what is there. The other two queues must deliver all
they had, once and in order; the one that was hit all it had, at least once. A line for each case
that is not so; last, how many there were. mutant: nothing is salvaged, which must be found. WORD:
only the words that begin so.

Run by tests/fault_injection/test_faults.py, with the interposer preloaded that rig.py wants.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import rig as faults
from rig import Rig

from shmq import _native, shm
from shmq.supervisor import salvage

VALUES = (0, 1, 2**64 - 1, 0x7FFFFFFF7FFFFFFF, 0x0123456789ABCDEF)
SECONDS = 20  # until a case counts as hanging
COUNT = 300
LATE = range(900, 905)

#: Where garbage that may be true cannot be told from the truth: the words, the most that they are
#: believed where one chunk was written, and what is believed.
BELIEVED = {
    "disk_read": (2**64, "messages before the read position were read"),
    "deferred_read": (2 << 24, "messages before it were read"),
    "deferred_gone": (1, "chunks up to it were emptied"),
    "deferred_write": (2**40, "chunks above it do not count"),
}


def words() -> Iterator[tuple[int, str]]:
    """Offset of each 8 bytes of the header that mean anything, and what lies there."""
    found: dict[int, str] = {}
    for name, (_, offset, size, count) in _native.LAYOUT["queue"].items():
        for at in range(offset & ~7, offset + min(size * count, 64), 8):
            found.setdefault(at, name)
    return iter(sorted(found.items()))


def fill(rig: Rig) -> None:
    for topic, channels in (("t", "cd"), ("u", "c")):
        taking = [rig.consumer(topic, channel) for channel in channels]
        producer = rig.producer(topic)
        rig.publish(producer, range(COUNT))
        rig.round()
        assert all(len(consumer.take_many(10, 0)) == 10 for consumer in taking)
        rig.publish(producer, LATE[:3], 3000)
        for queue in rig.supervisor._registry.topic(topic).queues.values():
            assert rig.supervisor._spiller._deferred.write_all(queue)
            assert queue.view.read("deferred_write") == 1
        rig.publish(producer, LATE[3:], 3000)


def hit(rig: Rig, at: int, value: int) -> None:
    """Overwrite a word of the first queue's header."""
    (serial,) = (q.serial for q in rig.supervisor._registry.queues if str(q) == "t:c")
    fd = shm.open_queue(rig.instance, serial)
    os.pwrite(fd, value.to_bytes(8, "little"), at)
    os.close(fd)


def what_came(rig: Rig, topic: str, channel: str) -> list[int]:
    queue = rig.supervisor._registry.topic(topic).queues[channel]  # type: ignore[union-attr]
    came: list[int] = []
    rig.supervisor._broker.pause_channel(queue.index, queue.serial, False)
    for _ in range(6):
        rig.supervisor._broker.expire(queue.index, 10_000, None, _native.realtime())
        more = rig.drain(topic, channel, faults.LONG, patience=4)
        came += more
        if not more and len(came) >= COUNT + len(LATE):
            break
    return came


def run(at: int, name: str, value: int, ending: str) -> str:
    """The failure; empty if it passed."""
    path = Path(tempfile.mkdtemp(prefix="shmq-faults-", dir="/dev/shm"))
    instance = f"test-scribble-{os.getpid()}"
    rig = Rig(path, instance)
    try:
        fill(rig)
        hit(rig, at, value)
        rig.round()
        if ending == "stop":
            rig.flush()
            rig.leave()
            shm.unlink_instance(instance)
        else:
            rig.leave()
        rig = Rig(path, instance)
        with faults.soon(3600):
            for topic, channel in (("t", "d"), ("u", "c"), ("t", "c")):
                came = what_came(rig, topic, channel)
                lost = sorted({*range(COUNT), *LATE} - set(came))
                believed = (topic, channel) == ("t", "c") and value <= BELIEVED.get(name, (-1,))[0]
                if lost and not believed:
                    return f"{topic}:{channel} lost {len(lost)}: {lost[:5]}"
                if (topic, channel) != ("t", "c") and len(came) != COUNT + len(LATE):
                    return f"{topic}:{channel} got {len(came)}"
    except Exception as exc:
        logging.getLogger().error("it ended", exc_info=True)
        return f"{type(exc).__name__}: {exc}"
    finally:
        signal.alarm(SECONDS)
        with contextlib.suppress(Exception):
            rig.leave()
        signal.alarm(0)
        shm.unlink_instance(instance)
        for bad in Path("/dev/shm").glob(f"shmq.{instance}.*.bad"):
            bad.unlink()
        shutil.rmtree(path)
    return ""


def looks_held(at: int, value: int) -> bool:
    """Whether the garbage cannot be told from a lock that is held: it names process 1, and the
    kernel does not show that one's mappings."""
    if at != _native.LAYOUT["queue"]["deliver"][1] or value != 1:
        return False
    try:
        return not Path("/proc/1/maps").read_bytes()
    except OSError:
        return True


def hangs(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"it hangs for {SECONDS} s")


def main() -> int:
    stride = int(sys.argv[1])
    only = sys.argv[2] if len(sys.argv) > 2 else ""
    if only == "mutant":
        only, salvage._append = "", lambda disk, positions, records: None
    logging.basicConfig(level="CRITICAL")
    faults.heal()
    signal.signal(signal.SIGALRM, hangs)
    cases = [
        (at, name, value)
        for at, name in words()
        for value in VALUES
        if name.startswith(only) and not looks_held(at, value)
    ]
    number = 0
    for ending in ("stop", "adopt"):
        for at, name, value in cases[::stride]:
            signal.alarm(SECONDS)
            wrong = run(at, name, value, ending)
            number += 1
            if wrong:
                print(f"{ending}: {name} at {at} = {value:#x}: {wrong}", flush=True)
    print(f"{number} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
