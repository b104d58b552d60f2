"""Room that tests at full size need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shmq import shm

MIB = 1 << 20


def need_shared_memory(nbytes: int) -> None:
    """Skip the test unless /dev/shm has `size` bytes left, and the machine memory for them."""
    room = os.statvfs(shm.SHM_DIRECTORY)
    free = min(room.f_bavail * room.f_frsize, _available())
    if free < nbytes:
        pytest.skip(f"/dev/shm can take {free // MIB} MiB; this needs {nbytes // MIB} MiB")


def need_memory(nbytes: int) -> None:
    """Skip the test unless the machine has so much memory left."""
    free = _available()
    if free < nbytes:
        pytest.skip(f"{free // MIB} MiB of memory are left; this needs {nbytes // MIB} MiB")


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable")
