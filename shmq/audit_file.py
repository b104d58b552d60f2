"""The file of the audit log, if the options name one."""

from __future__ import annotations

import logging
import logging.handlers
import os
from typing import Any

from shmq import ownership


class AuditFile(logging.handlers.WatchedFileHandler):
    """Appends to a file, and creates it again after logrotate moved it away."""

    def __init__(self, path: str) -> None:
        """Raises OSError if the file cannot be opened, or others may write it."""
        super().__init__(path, encoding="utf-8")

    def _open(self) -> Any:
        # nothing is written to a link, a pipe or a device that another user put there
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        fd = ownership.open_regular(self.baseFilename, flags)
        try:
            ownership.check_log(os.fstat(fd), self.baseFilename, "the audit log")
        except BaseException:
            os.close(fd)
            raise
        return os.fdopen(fd, "a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line. The file may have to be created again, and that may fail too."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """The disk is full, or the file cannot be created again: write the line to the log."""
        logging.getLogger().handle(record)
