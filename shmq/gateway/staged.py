"""Rows that clients have staged: each attempt of a task in a file of its own, in a directory in
/dev/shm that only this user may read; and their commit, which publishes them once.

The first commit of an epoch writes the manifest, which decides which attempts belong to it. The
rows are published in pieces that fit in the broker's memory, split the same way every time. The
store that publishes a piece also advances the writer's mark, so a repeated commit goes on after the
last published piece. Finally the files are removed, the manifest last. Two processes may commit the
same epoch at the same time.

A file is a sequence of pieces as they were uploaded: the number of rows and the bytes that follow,
then the size of each body, then the bodies. A piece that was uploaded twice is there once, because
its place is told with it. Attempts that no commit has named are removed after a day. Those of
memory that has ended, which no commit can publish, are removed by a supervisor that stops in order,
by `shmq rm`, and when rows are staged next.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from shmq.broker import Broker
from shmq.errors import BadArgument, Full, MemoryLost, MessageTooBig, Rejected, ShmqError
from shmq.gateway.lease_requests import Values
from shmq.option_fields import TRANSIT
from shmq.private import Private, staging_directory

#: The position of the mark that says: the whole epoch is published.
_DONE: Final = 1 << 62
#: Rows, and bytes, that are published at once.
_ROWS: Final = 2048
_BYTES: Final = 4 << 20
#: Seconds for which one request waits for room, and for which it publishes; the client asks again,
#: so a host that has nothing to say is soon known to be away.
_ROOM: Final = 2.0
_PUBLISHING: Final = 2.0
#: Seconds after which an attempt that no commit has named is removed.
_ABANDONED: Final = 24 * 3600.0
#: The part of /dev/shm that is left for queues, whatever clients stage.
_KEPT: Final = 0.25

_PIECE: Final = struct.Struct("<II")
_ATTEMPT: Final = re.compile(r"[0-9a-f]{32}\.[0-9]+\.[0-9a-f]{32}\.rows")

_Attempt = dict[str, Any]
"""`attempt`, `rows` and `size`, as a commit names them."""


class StagedRows:
    """The staged rows of one instance; any process of its gateway."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tidied = False

    def _directory(self) -> Private:
        """The directory of the rows that belong to the broker's present memory."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # somebody removed it empty
                return Private(*self._all, self._memory)

    @property
    def _all(self) -> tuple[str, str, str, str]:
        return "/dev/shm", staging_directory(os.geteuid()), self._broker.instance, "gateway"

    @property
    def _memory(self) -> str:
        return self._broker.identity.replace("@", "-")

    def _tidy(self) -> None:
        """Remove the rows of memory that is gone."""
        if self._tidied:
            return
        self._tidied = True
        with contextlib.suppress(FileNotFoundError), Private(*self._all) as here:
            for name in here.names():
                if name == self._memory:
                    continue
                with Private(*self._all, name) as other:
                    for each in other.names():
                        other.unlink(each)
                    other.remove()

    # ---- STAGE ----

    def stage(self, topic: str, values: Values, rows: bytes) -> int:
        """Add a piece to an attempt's file. Returns the size of the file. Raises BadArgument for
        a piece that is none or does not belong there, MessageTooBig, and Full."""
        count, at = int(values["rows"]), int(values["at"])
        self._check(count, rows)
        name = _name(topic, values, values["attempt"])
        self._tidy()
        while True:
            with contextlib.suppress(FileNotFoundError), self._directory() as here:
                if here.free(_KEPT) < len(rows):
                    raise Full(
                        f"stage {len(rows)} bytes for {topic}: a quarter of /dev/shm is kept for "
                        "queues; commit or abandon what was staged before"
                    )
                return _append(here.append(name), topic, at, _PIECE.pack(count, len(rows)) + rows)

    def _check(self, count: int, rows: bytes) -> None:
        """Raises BadArgument, MessageTooBig."""
        if len(rows) < 5 * count:
            raise BadArgument(f"stage {count} rows: {len(rows)} bytes are too few for them")
        import numpy as np  # slow to import

        sizes = np.frombuffer(rows, "<u4", count).astype(np.int64)
        if int(sizes.sum()) != len(rows) - 4 * count or not int(sizes.min()):
            raise BadArgument(f"stage {count} rows: the sizes are not those of the bodies")
        most = self._broker.limit("max_msg_size")
        if int(sizes.max()) > most:
            raise MessageTooBig(f"stage a row of {int(sizes.max())} bytes: max_msg_size is {most}")

    # ---- COMMIT ----

    def commit(self, topic: str, values: Values) -> tuple[int, bool]:
        """Publish an epoch, unless it is published already. Returns the number of rows that were
        published now, and whether all are; if there was no room or no time for the rest, the next
        call goes on. Raises MemoryLost, Rejected, and ShmqError if rows are gone."""
        epoch, writer = int(values["epoch"]), str(values["writer"])
        if values["memory"] is not None and values["memory"] != self._broker.identity:
            raise MemoryLost(
                f"commit epoch {epoch} of {writer!r} to {topic}: its rows were staged with other "
                "memory, so it is not known how many of them were published; look at the topic, "
                "and go on under another writer"
            )
        producer = self._broker.producer(topic)
        with self._directory() as here:
            with _locked(here, fcntl.LOCK_SH):
                published, done = 0, True
                after = _published(producer, values)
                if after < _DONE:
                    try:
                        attempts = _decide(here, topic, values, bool(after))
                        found = self._publish(producer, here, topic, values, attempts, after)
                        published, done = found
                    except (FileNotFoundError, ShmqError):
                        if _published(producer, values) < _DONE:
                            raise
                        # another request has published the rest meanwhile and removed the files
                if done:
                    _clear(here, topic, writer, epoch)
            _sweep(here)
        return published, done

    def _publish(
        self,
        producer: Any,
        here: Private,
        topic: str,
        values: Values,
        attempts: Sequence[_Attempt],
        after: int,
    ) -> tuple[int, bool]:
        limits = self._broker.limits
        most = max(1, min(_ROWS, max(limits["mem_queue_size"], TRANSIT) // 4))
        size = min(_BYTES, limits["arena_size"] // 8)
        key, epoch = _key(values["writer"]), int(values["epoch"])
        at = published = 0
        end = time.monotonic() + _PUBLISHING
        names = [(_name(topic, values, item["attempt"]), item["size"]) for item in attempts]
        pieces = _pieces(here, names, most, size)
        piece = next(pieces, None)
        while piece is not None:
            following = next(pieces, None)
            data, ends, count = piece
            upto = at + count
            if upto > after:
                mark = _DONE if following is None else upto
                arguments = (data, ends, True, 0, count, *key, epoch, at, mark, _ROOM)
                try:
                    found = producer.publish_once(*arguments)
                except Rejected:
                    raise
                except Full:
                    return published, False
                published += count if found is not None else 0
                if following is not None and time.monotonic() > end:
                    return published, False
            at, piece = upto, following
        return published, True

    def abandon(self, topic: str, values: Values) -> None:
        """Remove the attempts of an epoch, unless its commit has begun."""
        with self._directory() as here:
            with _locked(here, fcntl.LOCK_SH):
                if not here.exists(_manifest(topic, values)):
                    _clear(here, topic, values["writer"], int(values["epoch"]))
            _sweep(here)


def _published(producer: Any, values: Values) -> int:
    """How many rows of an epoch are published already; `_DONE`: all of them."""
    epoch = int(values["epoch"])
    reached, rows = producer.mark(*_key(values["writer"]))
    if reached - 1 < epoch:
        return 0
    return int(rows) if reached - 1 == epoch else _DONE


def _prefix(topic: str, writer: str) -> str:
    return hashlib.blake2b(f"{topic}\0{writer}".encode(), digest_size=16).hexdigest()


def _key(writer: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"gateway\0{writer}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _name(topic: str, values: Values, attempt: str) -> str:
    return f"{_prefix(topic, values['writer'])}.{values['epoch']}.{attempt}.rows"


def _manifest(topic: str, values: Values) -> str:
    return f"{_prefix(topic, values['writer'])}.{values['epoch']}.manifest"


def _append(fd: int, topic: str, at: int, piece: bytes) -> int:
    """Add a piece to a file, which is closed. Returns the file's size."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        size, end = os.fstat(fd).st_size, at + len(piece)
        if size < at or size > end:
            raise BadArgument(f"stage at byte {at} for {topic}: {size} bytes are there")
        if size < end:  # it is new, or its first upload was cut short
            os.ftruncate(fd, at)
            _write(fd, at, piece)
        return end
    finally:
        os.close(fd)


def _write(fd: int, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


@contextlib.contextmanager
def _locked(here: Private, how: int) -> Iterator[None]:
    """Hold the lock of the directory: shared for a commit, exclusive for a sweep. Raises
    BlockingIOError with LOCK_NB."""
    fd = here.again()
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _decide(here: Private, topic: str, values: Values, begun: bool) -> Sequence[_Attempt]:
    """The attempts that belong to the epoch, from its manifest, which is created if it is missing.
    begun: a part of the epoch is published already."""
    manifest, named = _manifest(topic, values), list(values["attempts"])
    if not here.exists(manifest):
        if begun:
            raise ShmqError(
                f"a part of epoch {values['epoch']} of {values['writer']!r} was published before, "
                f"and the rest was in {here.path}, which is gone: publish it by hand"
            )
        lost = [item for item in named if not here.exists(_name(topic, values, item["attempt"]))]
        if lost:
            raise ShmqError(
                f"{len(lost)} of {len(named)} attempts of epoch {values['epoch']} of "
                f"{values['writer']!r} are not staged here: they were committed under another "
                "epoch, abandoned, or older than a day"
            )
        if not named:
            return []
        mine = f"{manifest}.{uuid.uuid4().hex}"
        with open(here.create(mine), "w") as file:
            json.dump(named, file)
        with contextlib.suppress(FileExistsError):
            here.link(mine, manifest)
        here.unlink(mine)
    found: list[_Attempt] = json.loads(bytes(here.read(manifest)))
    return found


def _clear(here: Private, topic: str, writer: str, epoch: int) -> None:
    """Remove the files of this writer's epochs up to this one, manifests last."""
    prefix = _prefix(topic, writer)
    names = [name for name in here.names() if name.startswith(prefix)]
    for name in sorted(names, key=lambda name: ".manifest" in name):
        number = name.split(".")[1]
        if number.isdigit() and int(number) <= epoch:
            here.unlink(name)


def _sweep(here: Private) -> None:
    """Remove attempts that were left, and the directory once it is empty. Does nothing while a
    commit is running."""
    with contextlib.suppress(BlockingIOError), _locked(here, fcntl.LOCK_EX | fcntl.LOCK_NB):
        names = here.names()
        begun = {name.rpartition(".manifest")[0] for name in names if ".manifest" in name}
        for name in names:
            if _ATTEMPT.fullmatch(name) and ".".join(name.split(".")[:2]) not in begun:
                with contextlib.suppress(FileNotFoundError):
                    if here.age(name) > _ABANDONED:
                        here.unlink(name)
        here.remove()


_Piece = tuple[memoryview, Any, int]
"""Bodies one after the other, where each begins (int64), and how many they are."""


def _pieces(
    here: Private, names: Sequence[tuple[str, int]], rows: int, size: int
) -> Iterator[_Piece]:
    """Yield the rows of the files in order, in pieces that a queue has room for: at most `rows`
    rows of `size` bytes. The split is the same every time."""
    import numpy as np  # slow to import

    for name, length in names:
        data = memoryview(here.read(name))
        if len(data) != length:
            raise ShmqError(
                f"{here.path / name} has {len(data)} bytes, and {length} were staged: this write "
                "cannot be published"
            )
        at = 0
        while at < length:
            count, nbytes = _PIECE.unpack_from(data, at)
            at += _PIECE.size
            sizes = np.frombuffer(data, "<u4", count, at)
            ends = np.zeros(count + 1, np.int64)
            np.cumsum(sizes, out=ends[1:])
            bodies = data[at + 4 * count : at + nbytes]
            at += nbytes
            start = 0
            while start < count:
                most = int(np.searchsorted(ends, ends[start] + size, "right")) - 1
                stop = min(max(most, start + 1), start + rows, count)
                first, last = int(ends[start]), int(ends[stop])
                yield bodies[first:last], ends[start : stop + 1] - first, stop - start
                start = stop
