"""The file of the audit log, if the options name one."""

from __future__ import annotations

import errno
import logging
import logging.handlers
import os
import stat
from typing import Any


class AuditFile(logging.handlers.WatchedFileHandler):
    """Appends to a file, and creates it again after logrotate moved it away."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be opened."""
        super().__init__(path, encoding="utf-8")

    def _open(self) -> Any:
        # nothing is written to a link, a pipe or a device that another user put there
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(self.baseFilename, flags | os.O_CLOEXEC | os.O_NOCTTY, 0o600)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "the audit log must be a plain file", self.baseFilename)
        return os.fdopen(fd, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """The disk is full, or the file cannot be created again: write the line to the log."""
        logging.getLogger().handle(record)
