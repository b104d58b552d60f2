"""Publishes disk errors of the data path to all processes, in one word of the directory segment.

Each loop that writes to the disk notes here when a write is refused and when it works again. The
word holds the errno of the oldest refusal that still stands. A supervisor clears it before clients
believe it to be alive; readers ignore the word while no supervisor lives.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from shmq._native import Broker
from shmq.storage.own_files import check_place, open_file

_PROBE = "shmq.dat.0.tmp"  # a name that the next start removes if it is left over


class DiskTrouble:
    """The disk errors of one instance. Any loop may call it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lock = threading.Lock()
        self._met: dict[str, int] = {}

    def met(self, loop: str, exc: OSError) -> None:
        """Note that the disk refused this loop's work."""
        with self._lock:
            self._met[loop] = exc.errno or errno.EIO
            self._tell()

    def over(self, loop: str) -> None:
        """Note that the disk does this loop's work (again)."""
        with self._lock:
            if self._met.pop(loop, 0):
                self._tell()

    def clear(self) -> None:
        """Forget what a dead supervisor noted."""
        with self._lock:
            self._met.clear()
            self._tell()

    def _tell(self) -> None:
        self._broker.disk_trouble(next(iter(self._met.values()), 0))


def probe(data_path: Path, nbytes: int = 1) -> None:
    """Write `nbytes` bytes into a file without a name, which leaves nothing behind. Raises OSError
    if the disk refuses, or if the name of the data path means another directory now."""
    check_place(data_path)
    try:
        fd = os.open(data_path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        named = None
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        named = data_path / _PROBE  # NFS and some other file systems have no O_TMPFILE
        fd = open_file(named, os.O_CREAT | os.O_WRONLY)
    try:
        written = os.write(fd, bytes(nbytes))
        if written < nbytes:  # the disk became full in the middle
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(data_path))
    finally:
        os.close(fd)
        if named is not None:
            os.unlink(named)
