"""Checks that matter in a container: the memory limit of its cgroup beside the size of /dev/shm,
and /proc, which says in which PID namespace a process is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shmq import shm
from shmq.diagnostics.findings import Finding, ok, problem
from shmq.diagnostics.readable import size


def check_container(
    root: Path = Path("/"), directory: str = shm.SHM_DIRECTORY
) -> Iterator[Finding]:
    """Check that this process can tell its PID namespace, and that its memory limit leaves room for
    what /dev/shm may hold. root: where proc and sys are mounted."""
    if not (root / "proc/self/ns/pid").exists():
        yield problem(
            "container",
            "/proc/self/ns/pid cannot be read, so no broker can be attached to",
            "mount /proc in the container: mount -t proc proc /proc",
        )
        return
    limit, where = memory_limit(root)
    room = _room_of(directory)
    if limit is None:
        yield ok("container", "no cgroup limits the memory of this process")
    elif room is not None and room >= limit:
        yield problem(
            "container",
            f"{directory} may grow to {size(room)}, and the memory limit of this process is "
            f"{size(limit)} ({where}): shared memory counts, so the kernel kills processes before "
            "a publisher gets Full",
            f"raise the limit above {size(room)} and what the programs need, or make {directory} "
            "smaller (docker: --shm-size; Kubernetes: sizeLimit of the emptyDir)",
        )
    else:
        text = f"memory limit {size(limit)} ({where}), above what {directory} may hold"
        yield ok("container", text)


def memory_limit(root: Path = Path("/")) -> tuple[int | None, str]:
    """The least memory limit of this process's cgroups, and the file that says so. (None, "") if
    none has one."""
    found = [(limit, str(file)) for file in _limit_files(root) if (limit := _limit_in(file))]
    return min(found, default=(None, ""))


def _limit_files(root: Path) -> Iterator[Path]:
    """Files that may limit this process's memory, its own cgroup's first. A container that does not
    see its cgroup under its path in /proc sees it as the root of the hierarchy."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, name = root / "sys/fs/cgroup", "memory.max"
            elif "memory" in controllers.split(","):
                top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            else:
                continue
            at = Path(path.lstrip("/"))
            yield from (top / place / name for place in (at, *at.parents))


def _limit_in(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # `max`: no limit
        limit = int(file.read_text())
        return limit if limit < 1 << 60 else None  # cgroup v1's word for none
    return None


def _room_of(directory: str) -> int | None:
    with contextlib.suppress(OSError):
        room = os.statvfs(directory)
        return room.f_blocks * room.f_frsize
    return None
