"""Directories that killed processes of this user have left, which belong to no instance any more:
what was staged for memory that is gone, and data paths of embedded brokers."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path

from shmq import homes
from shmq.diagnostics.findings import Finding, problem
from shmq.diagnostics.readable import size
from shmq.errors import ShmqError
from shmq.staging_place import READS, staged_by_instance


def left_behind(instances: Container[str]) -> Iterator[Finding]:
    """A problem for each directory. instances: names of those that there are."""
    yield from _staged(instances)
    yield from _in_memory()
    yield from _temporary()


def _staged(instances: Container[str]) -> Iterator[Finding]:
    """Find rows and notes that this user has staged for instances of which nothing is left."""
    for directory, paths in staged_by_instance(os.geteuid()).items():
        name = directory.removesuffix(READS)
        if name in instances or not name:  # of many instances: nobody knows which
            continue
        what, does = "rows that were staged for", "writing to"
        if name != directory:
            what, does = "notes of what Spark has read from", "reading from"
        for path in paths:
            text = f"{path} has {what} instance {name}, of which nothing is left"
            remedy = (
                "the next broker that this user starts removes what dead applications have left of "
                f"it; if no Spark query goes on {does} that instance: rm -r {path}"
            )
            yield replace(problem("segments", text, remedy), instance=name)


def _in_memory() -> Iterator[Finding]:
    """Find data paths in /dev/shm of brokers without a disk."""
    for path in homes.memory_left():
        text = (
            f"{path} ({size(_bytes_in(path))}) has files of a broker without a disk, whose process "
            "was killed; nobody can use them"
        )
        remedy = f"shmq doctor --fix, or rm -r {path}"
        yield replace(problem("segments", text, remedy), fix=functools.partial(_removed, path))


def _temporary() -> Iterator[Finding]:
    """Find data paths among temporary files, where no broker looks for its messages."""
    for path in homes.temporary_left():
        quoted = shlex.quote(str(path))
        text = f"{path} is the data path of an embedded broker whose process was killed"
        if homes.holds_messages(path):
            yield problem(
                "data path",
                f"{text}; it holds messages, and no broker finds them by itself",
                f"take them: shmq serve --data-path {quoted}, or name it as data_path of an "
                f"embedded broker; or throw them away: rm -r {quoted}",
            )
        else:
            finding = problem("data path", f"{text}, without messages", f"rm -r {quoted}")
            yield replace(finding, fix=functools.partial(_removed_home, path))


def _removed(path: Path) -> str:
    if not homes.remove_memory(path):
        raise ShmqError("somebody uses it by now")
    return f"removed {path}"


def _removed_home(path: Path) -> str:
    homes.remove(path)
    if path.exists():
        raise ShmqError("somebody uses it by now")
    return f"removed {path}"


def _bytes_in(path: Path) -> int:
    used = 0
    for where, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(where, name)).st_blocks * 512
    return used
