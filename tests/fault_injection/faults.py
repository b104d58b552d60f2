"""A program: the supervisor's disk side with a disk that fails, once for every system call.

    python faults.py SCENE STRIDE

A scene puts messages through the disk, with no thread but this one. It is run once to count its
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
import errno
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import policy_scenes
import scenes
from rig import DISK, LONG, Rig, heal

from shmq import shm
from shmq.storage import metadata
from shmq.storage.diskqueue import DiskQueue

KINDS = {
    "ENOSPC": errno.ENOSPC,
    "EDQUOT": errno.EDQUOT,
    "EFBIG": errno.EFBIG,
    "EIO": errno.EIO,
    "EMFILE": errno.EMFILE,
    "half": 0,
}
SCENES: dict[str, Callable[[Rig], tuple[Rig, list[int], list[int]]]] = {
    "overflow": scenes.overflow,
    "stop": scenes.stop,
    "begin": scenes.begin,
    "adopt": scenes.adopt,
    "rename": scenes.rename,
    "later": scenes.later,
    "empty": scenes.empty,
    "names": scenes.names,
    "results": scenes.results,
    "results_begin": scenes.results_begin,
    "limits": policy_scenes.limits,
    "dead": policy_scenes.dead,
    "expiry": policy_scenes.expiry,
    "settings": policy_scenes.settings,
    "properties": policy_scenes.properties,
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
        rig, came, wanted = SCENES[name](rig)
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
        metadata.store_reserve = believing(metadata.store_reserve)
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
