"""How much room the rows that clients have staged may take in /dev/shm, and what is removed when.

A quarter of /dev/shm is left for queues. Of the rest one topic has three quarters at most, and one
client half (or what the access file gives it). Both also have a limit of files, which are an inode
and a page each. Several gateway processes may exceed these shares by what they take within a
second, but never take of the quarter.

An attempt is removed when nobody has staged anything for its epoch for `staged_ttl`. So while a
long job goes on, none of its attempts is removed. Those of an epoch whose commit has begun stay six
times as long after its last COMMIT. Those of memory that has ended, which no commit can publish,
are removed by a supervisor that stops in order, by `shmq rm`, and when rows are staged next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from typing import Final

from shmq.door.seldom import Seldom
from shmq.errors import Full
from shmq.gateway.asker import Asker
from shmq.private import Private

#: The part of /dev/shm that is left for queues, whatever clients stage.
_KEPT: Final = 0.25
#: The part of what may be staged that one topic may have, and one client.
_OF_TOPIC: Final = 0.75
_OF_CLIENT: Final = 0.5
#: Files of one client, more than the attempts that a commit may name; of one topic; and of all.
_CLIENT_FILES: Final = 20_000
_TOPIC_FILES: Final = 40_000
_ALL_FILES: Final = 65_000
#: Seconds for which the sizes are remembered, and at least so many times what looking took.
_REMEMBERED: Final = 1.0
_RARELY: Final = 20
#: How much longer the rows of a commit that has begun stay.
_BEGUN: Final = 6
#: Bytes of the smallest file: a page.
_PAGE: Final = 4096

_ATTEMPT: Final = re.compile(
    r"(?P<epoch>[0-9a-f]{32}\.[0-9]+)\.[0-9a-f]{32}\.(?P<topic>[0-9a-f]{16})-(?P<whose>[0-9a-f]{16})"
    r"\.rows"
)

#: Every file of an epoch.
_FILE: Final = re.compile(r"(?P<epoch>[0-9a-f]{32}\.[0-9]+)\.(?P<manifest>manifest)?")

_limits = Seldom(logging.getLogger(__name__), "limits of staged rows that clients hit")


class Space:
    """The sizes of what is staged, as one gateway process knows them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._bytes: dict[str, int] = {}  # of a topic or a client
        self._files: dict[str, int] = {}
        self._count = 0

    @staticmethod
    def owner(topic: str, asker: Asker) -> str:
        """The part of a file's name that says whose it is."""
        digest = hashlib.blake2b(topic.encode(), digest_size=8).hexdigest()
        return f"{digest}-{asker.whose:016x}"

    def take(self, here: Private, asker: Asker, topic: str, name: str, at: int, size: int) -> None:
        """Count a piece of a file that is going to be written. Raises Full, and then logs whose
        limit it is."""
        keys = self.owner(topic, asker).split("-")
        with self._lock:
            self._look(here)
            self._check(here, asker, topic, keys, size, not here.exists(name))
            if not at:
                self._count += 1
            for key in keys:
                self._bytes[key] = self._bytes.get(key, 0) + max(size, 0 if at else _PAGE)
                self._files[key] = self._files.get(key, 0) + (not at)

    def _look(self, here: Private) -> None:
        began = time.monotonic()
        if began < self._look_at:
            return
        self._bytes, self._files, self._count = {}, {}, 0
        for name in here.names():
            self._count += 1
            found = _ATTEMPT.fullmatch(name)
            if found is None:
                continue
            with contextlib.suppress(FileNotFoundError):
                size = max(here.size(name), _PAGE)
                for key in (found["topic"], found["whose"]):
                    self._bytes[key] = self._bytes.get(key, 0) + size
                    self._files[key] = self._files.get(key, 0) + 1
        now = time.monotonic()
        self._look_at = now + max(_REMEMBERED, _RARELY * (now - began))

    def _check(
        self, here: Private, asker: Asker, topic: str, keys: list[str], size: int, new: bool
    ) -> None:
        free = here.free(_KEPT)
        taken = sum(self._bytes.values()) // 2  # each file counts for a topic and for a client
        of_topic, of_client = int(_OF_TOPIC * (free + taken)), int(_OF_CLIENT * (free + taken))
        if asker.quota.staged_bytes is not None:
            of_client = asker.quota.staged_bytes
        what = ""
        if free < size:
            what = "a quarter of the shared memory is kept for queues"
        elif self._bytes.get(keys[0], 0) + size > of_topic:
            what = f"rows of {of_topic} bytes are staged for this topic"
        elif self._bytes.get(keys[1], 0) + size > of_client:
            what = f"this client may stage {of_client} bytes"
        elif new and self._files.get(keys[0], 0) >= _TOPIC_FILES:
            what = f"{_TOPIC_FILES} attempts are staged for this topic"
        elif new and self._files.get(keys[1], 0) >= _CLIENT_FILES:
            what = f"this client has staged {_CLIENT_FILES} attempts"
        elif new and self._count >= _ALL_FILES:
            what = f"{_ALL_FILES} attempts are staged"
        if what:
            _limits(logging.WARNING, "STAGE %s: client(%s): %s", topic, asker.address, what)
            raise Full(
                f"stage {size} bytes for {topic}: {what}; commit or abandon what was staged before"
            )


def sweep(here: Private, age: float) -> None:
    """Remove the attempts of epochs for which nobody has staged anything for `age` seconds, and the
    directory once it is empty. Does nothing while a commit is running."""
    fd = here.again()
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left: dict[str, list[str]] = {}
            youngest: dict[str, float] = {}
            begun: set[str] = set()
            for name in here.names():
                found = _FILE.match(name)
                if found is None:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    epoch = found["epoch"]
                    youngest[epoch] = min(youngest.get(epoch, float("inf")), here.age(name))
                    left.setdefault(epoch, []).append(name)
                    if found["manifest"]:
                        begun.add(epoch)
            for epoch, files in left.items():
                most = age * (_BEGUN if epoch in begun else 1)
                for name in sorted(files, key=lambda name: ".manifest" in name):
                    if youngest[epoch] > most:
                        here.unlink(name)
            here.remove()
    finally:
        os.close(fd)
