"""What the data path refuses, told to everybody: one word of the directory segment.

Each loop that writes to the disk notes here what it was refused and when that is over. The word
holds the errno of the first that is still refused. A supervisor clears it before it becomes one;
readers ignore it while no supervisor lives.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from shmq._native import Broker
from shmq.ownership import open_regular

_PROBE = "shmq.dat.0.tmp"  # as a leftover it is swept by the next start


class DiskTrouble:
    """Of one instance; any loop may call it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._met: dict[str, int] = {}

    def met(self, loop: str, exc: OSError) -> None:
        """The disk refused this loop's work."""
        with self._lock:
            self._met[loop] = exc.errno or errno.EIO
            self._tell()

    def over(self, loop: str) -> None:
        """It does this loop's work (again)."""
        with self._lock:
            if self._met.pop(loop, 0):
                self._tell()

    def clear(self) -> None:
        """What a dead supervisor left is no news."""
        with self._lock:
            self._met.clear()
            self._tell()

    def _tell(self) -> None:
        self._broker.disk_trouble(next(iter(self._met.values()), 0))


def probe(data_path: Path, nbytes: int = 1) -> None:
    """Write a few bytes into a file that has no name, so that nothing is left of it. Raises
    OSError."""
    try:
        fd = os.open(data_path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        named = None
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        named = data_path / _PROBE  # NFS and others have no O_TMPFILE
        fd = open_regular(named, os.O_CREAT | os.O_WRONLY)
    try:
        written = os.write(fd, bytes(nbytes))
        if written < nbytes:  # what is left does not hold it
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(data_path))
    finally:
        os.close(fd)
        if named is not None:
            os.unlink(named)
