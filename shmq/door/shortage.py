"""Shortages of a process: of descriptors, memory, threads, or room in a file system. A server tells
who asked that it cannot go on, and says so in one line of its log."""

from __future__ import annotations

import errno
import os
from typing import Final

#: Errors for which closing files helps.
NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})
_SHORT: Final = NO_FILES | {errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT}
_NO_THREAD: Final = "can't start new thread"


def shortage(error: BaseException) -> str:
    """Return the system's words for a shortage; empty: the error is another one."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    if isinstance(error, OSError):
        return os.strerror(error.errno) if error.errno in _SHORT else ""
    text = str(error)
    if isinstance(error, RuntimeError) and _NO_THREAD in text:
        return _NO_THREAD
    if isinstance(error, ImportError):  # the dynamic linker has nothing but a text
        return next((word for word in map(os.strerror, _SHORT) if word in text), "")
    return ""
