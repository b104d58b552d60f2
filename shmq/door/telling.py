"""Errors as clients read them: without paths, users and processes of the host, which are no
business of who only knows a port. The log has the whole text.

Every text of an exception that leaves this process for a client goes through `told`.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import Final

from shmq.door.seldom import Seldom

#: Finds what is of the host: an absolute path, a user, a group, a process.
_OF_HOST: Final = re.compile(r"(?<![\w./:-])/[\w.~-]|\b(?:uid|gid|pid) \d")
#: Between the parts of an error's text.
_PARTS: Final = re.compile(r"(?<=[:;,]) | (?=\()")
_REST: Final = "the broker's log has the rest"

_whole = Seldom(logging.getLogger(__name__), "errors that clients were told a part of")


def told(error: BaseException) -> str:
    """The text of an error for a client; of a system error without the file's name. The log has
    what was left out."""
    text = str(error)
    if isinstance(error, MemoryError):
        text = "cannot allocate memory"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror.lower()
    shown = without_host(text)
    if shown != text:
        _whole(logging.WARNING, "a client was told a part of: %s", error)
    return shown


def without_host(text: str) -> str:
    """The parts of an error's text before the first that names a path, a user or a process of the
    host; and where the rest is."""
    if not _OF_HOST.search(text):
        return text
    kept = list(itertools.takewhile(lambda part: not _OF_HOST.search(part), _PARTS.split(text)))
    return f"{' '.join(kept).rstrip(':;,')}; {_REST}" if kept else _REST
