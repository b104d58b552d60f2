"""One broker per data path: an exclusive flock on the directory itself.

Source: nsqd, `internal/dirlock`. There is no lock file. nsqd takes the same lock, so shmq and nsqd
also exclude each other. The kernel drops the lock when the last process that inherited the
descriptor has ended.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from types import TracebackType

from shmq import ownership
from shmq.storage import StorageError, own_files

_log = logging.getLogger(__name__)


class DataPathLocked(StorageError):
    """Another broker holds the data path (`filename`)."""


class DirLock:
    """Holds a data path for this process: `with DirLock(path): ...`.

    The descriptor is closed on exec. A forked child shares the lock: it must only close the
    descriptor, because `release` in the child would free the lock for the parent as well.
    """

    def __init__(self, data_path: Path | str) -> None:
        """`data_path`: an existing directory. Nothing is opened before `acquire`."""
        self.path = Path(data_path)
        self._fd = -1

    @property
    def held(self) -> bool:
        """True if this object holds the lock now."""
        return self._fd >= 0

    def acquire(self) -> None:
        """Take the lock without waiting. Does nothing if this object has it already.

        Raises DataPathLocked if another process has it, FileNotFoundError if the directory does
        not exist, NotADirectoryError if it is something else, StorageError if the file system has
        no flock, or if everybody may write there, unless `own_files.share` was called for it. Logs
        a warning if a group or another user may.
        """
        if self.held:
            return
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            sentence = "data path does not exist; create the directory first"
            raise FileNotFoundError(errno.ENOENT, sentence, str(self.path)) from exc
        refused, warned = ownership.who_else_may_write(os.fstat(fd), str(self.path))
        if refused and own_files.is_shared(self.path):
            refused, warned = "", refused
        if refused:
            os.close(fd)
            sentence = f"data path is not safe: {refused}"
            raise StorageError(errno.EACCES, sentence, str(self.path))
        if warned:
            _log.warning("data path %s: %s", self.path, warned)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            holder = ownership.flock_holder(fd)
            os.close(fd)
            sentence = "failed to lock data path: in use by another instance of shmq or nsqd"
            if holder is not None and holder > 0:
                sentence += f": {ownership.process(holder)} holds its lock"
            raise DataPathLocked(exc.errno, sentence, str(self.path)) from exc
        except OSError as exc:
            os.close(fd)
            sentence = f"failed to lock data path: cannot flock directory ({exc.strerror})"
            raise StorageError(exc.errno, sentence, str(self.path)) from exc
        self._fd = fd
        own_files.hold(self.path, fd)

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        if self.held:
            fd, self._fd = self._fd, -1
            own_files.let_go(self.path)
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def __enter__(self) -> DirLock:
        self.acquire()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
