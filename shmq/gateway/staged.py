"""Rows that clients have staged: each attempt of a task in a file of its own, in a directory in
/dev/shm that only this user may read; and their commit, which publishes them once.

A writer is a name together with a secret, of which only a hash is kept. A client that does not know
the secret is another writer: neither its commits nor its ABANDON reach these rows and this mark.

The first commit of an epoch writes the manifest, which decides which attempts belong to it. The
rows are published in pieces that fit in the broker's memory, split the same way every time. The
store that publishes a piece also advances the writer's mark, so a repeated commit goes on after the
last published piece. The mark of a whole epoch has the number of its rows and bytes, which tell a
repeated commit from another one. Finally the files are removed, the manifest last. Two processes
may commit the same epoch at the same time.

A file is a sequence of pieces as they were uploaded: the number of rows and the bytes that follow,
then the size of each body, then the bodies. A piece that was uploaded twice is there once, because
its place is told with it. `staged_space` has how much there may be, and what is removed when.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from shmq.broker import Broker
from shmq.configurable import at_once
from shmq.errors import BadArgument, Full, MemoryLost, MessageTooBig, Rejected, ShmqError
from shmq.gateway.asker import Asker
from shmq.gateway.lease_requests import Values
from shmq.gateway.staged_space import Space, sweep
from shmq.private import Private
from shmq.staging_place import StagingPlace

#: A mark from here on says: the whole epoch is published. Above it are the number of its rows and
#: that of their bytes, modulo _COUNT.
_DONE: Final = 1 << 62
_COUNT: Final = 1 << 31
#: Rows, and bytes, that are published at once.
_ROWS: Final = 2048
_BYTES: Final = 4 << 20
#: Seconds for which one request waits for room, and for which it publishes; the client asks again,
#: so a host that has nothing to say is soon known to be away.
_ROOM: Final = 2.0
_PUBLISHING: Final = 2.0

_PIECE: Final = struct.Struct("<II")

_Attempt = dict[str, Any]
"""`attempt`, `rows` and `size`, as a commit names them."""


class StagedRows:
    """The staged rows of one instance; any process of its gateway."""

    def __init__(self, broker: Broker, age: Callable[[], float]) -> None:
        """age: the option staged_ttl."""
        self._broker = broker
        self._age = age
        self._space = Space()
        self._tidied = False
        self._place = StagingPlace(
            broker.instance, lambda: (broker.directory().seal_key, broker.identity)
        )

    def _directory(self) -> Private:
        """The directory of the rows that belong to the broker's present memory."""
        while True:
            with contextlib.suppress(FileNotFoundError):  # somebody removed it empty
                return self._place.open("gateway", self._memory)

    @property
    def _memory(self) -> str:
        return self._broker.identity.replace("@", "-")

    def _tidy(self) -> None:
        """Remove the rows of memory that is gone."""
        if self._tidied:
            return
        self._tidied = True
        with contextlib.suppress(FileNotFoundError), self._place.open("gateway") as here:
            for name in here.names():
                if name == self._memory:
                    continue
                with self._place.open("gateway", name) as other:
                    for each in other.names():
                        other.unlink(each)
                    other.remove()

    def sweep(self) -> None:
        """Remove what nobody has touched for `staged_ttl`. It costs next to nothing while nothing
        is staged."""
        found = self._place.path("gateway")
        if found is not None and os.path.exists(found):
            with contextlib.suppress(FileNotFoundError), self._directory() as here:
                sweep(here, self._age())

    # ---- STAGE ----

    def stage(self, asker: Asker, topic: str, values: Values, rows: bytes) -> dict[str, Any]:
        """Add a piece to an attempt's file. Returns the size of the file, and the writer's secret
        if the client gave none. Raises BadArgument for a piece that is none or does not belong
        there, MessageTooBig, and Full."""
        count, at = int(values["rows"]), int(values["at"])
        self._check(count, rows)
        more: dict[str, Any] = {}
        if values["secret"] is None:
            more["secret"] = secrets.token_hex(16)
            values = {**values, **more}
        name = f"{_epoch(topic, values)}.{values['attempt']}.{Space.owner(topic, asker)}.rows"
        self._tidy()
        piece = _PIECE.pack(count, len(rows)) + rows
        while True:
            with contextlib.suppress(FileNotFoundError), self._directory() as here:
                self._space.take(here, asker, topic, name, at, len(piece))
                return {"size": _append(here.append(name), topic, at, piece), **more}

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
            raise MessageTooBig(
                f"stage a row of {int(sizes.max())} bytes: max_msg_size is {most}: make it "
                "smaller, or raise the broker's --max-msg-size"
            )

    # ---- COMMIT ----

    def commit(self, asker: Asker, topic: str, values: Values) -> tuple[int, bool]:
        """Publish an epoch, unless it is published already. Returns the number of rows that were
        published now, and whether all are; if there was no room or no time for the rest, the next
        call goes on. Raises MemoryLost, Rejected, BadArgument if the epoch was published with other
        rows or a later one was published, and ShmqError if rows are gone."""
        epoch, writer = int(values["epoch"]), str(values["writer"])
        if values["memory"] is not None and values["memory"] != self._broker.identity:
            raise MemoryLost(
                f"commit epoch {epoch} of {writer!r} to {topic}: its rows were staged with other "
                "memory, so it is not known how many of them were published; look at the topic, "
                "and go on under another writer"
            )
        named = {str(item["attempt"]): item for item in values["attempts"]}  # each counts once
        values = {**values, "attempts": list(named.values())}
        producer = self._broker.producer(topic)
        with self._directory() as here:
            with _locked(here, fcntl.LOCK_SH):
                published, done = 0, True
                after = _published(producer, values)
                if after < _DONE:
                    try:
                        attempts = _decide(here, topic, values, bool(after))
                        published, done = self._publish(
                            producer, here, topic, values, attempts, after, asker.whose
                        )
                    except (FileNotFoundError, ShmqError):
                        if _published(producer, values) < _DONE:
                            raise
                        # another request has published the rest meanwhile and removed the files
                elif not values["skip"]:
                    _compare(here, topic, values, after)
                if done:
                    _clear(here, topic, values)
            here.remove()
        return published, done

    def _publish(
        self,
        producer: Any,
        here: Private,
        topic: str,
        values: Values,
        attempts: Sequence[_Attempt],
        after: int,
        whose: int,
    ) -> tuple[int, bool]:
        most, size = at_once(self._broker, topic, _ROWS, _BYTES)
        key, epoch = _key(values), int(values["epoch"])
        at = published = bodies = 0
        end = time.monotonic() + _PUBLISHING
        pieces = _pieces(here, _files(here, topic, values, attempts), most, size, after)
        piece = next(pieces, None)
        while piece is not None:
            following = next(pieces, None)
            data, ends, count = piece
            upto, bodies = at + count, bodies + len(data)
            if upto > after:
                mark = _whole(upto, bodies) if following is None else upto
                arguments = (data, ends, True, 0, count, *key, epoch, at, mark, _ROOM)
                try:
                    found = producer.publish_once(*arguments, whose=whose)
                except Rejected:
                    raise
                except Full:
                    return published, False
                published += count if found is not None else 0
                if following is not None and time.monotonic() > end:
                    return published, False
            at, piece = upto, following
        return published, True

    def abandon(self, topic: str, values: Values) -> int:
        """Remove the writer's attempts of an epoch and those before it, unless its commit has
        begun. Returns the number of files."""
        count = 0
        with self._directory() as here:
            with _locked(here, fcntl.LOCK_SH):
                if not here.exists(_manifest(topic, values)):
                    count = _clear(here, topic, values)
            here.remove()
        return count


def _published(producer: Any, values: Values) -> int:
    """How many rows of an epoch are published already; from `_DONE` on: all of them, or those of a
    later epoch (`_DONE` itself)."""
    epoch = int(values["epoch"])
    reached, rows = producer.mark(*_key(values))
    if reached - 1 < epoch:
        return 0
    return int(rows) if reached - 1 == epoch else _DONE


def _whole(rows: int, size: int) -> int:
    """The mark of a whole epoch. size: of the bodies."""
    return _DONE | (rows % _COUNT) * _COUNT | size % _COUNT


def _compare(here: Private, topic: str, values: Values, mark: int) -> None:
    """Check that a commit is that of the epoch that is published. Raises BadArgument: to say `done`
    would hide that its rows are not published."""
    attempts = values["attempts"]
    rows = sum(int(item["rows"]) for item in attempts)
    what = f"commit epoch {values['epoch']} of {values['writer']!r} to {topic}"
    if mark == _DONE and rows:
        raise BadArgument(
            f"{what}: a later epoch of this writer is published already, so these {rows} rows are "
            "not: go on with an epoch above that one, or `skip` this one"
        )
    there = list(_found(here, topic, values))
    size = mark % _COUNT
    if attempts and all(item["attempt"] in there for item in attempts):
        size = _measured(here, _files(here, topic, values, attempts))[1] % _COUNT
    if mark != _DONE and (rows % _COUNT, size) != (mark // _COUNT % _COUNT, mark % _COUNT):
        raise BadArgument(
            f"{what}: it is published already, with {mark // _COUNT % _COUNT} rows, and not with "
            f"these {rows}: go on with the next epoch, or `skip` this one"
        )


def _prefix(topic: str, values: Values) -> str:
    writer, secret = values["writer"], values["secret"]
    return hashlib.blake2b(f"{topic}\0{writer}\0{secret}".encode(), digest_size=16).hexdigest()


def _key(values: Values) -> tuple[int, int]:
    text = f"gateway\0{values['writer']}\0{values['secret']}"
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _epoch(topic: str, values: Values) -> str:
    """How the names of an epoch's files begin."""
    return f"{_prefix(topic, values)}.{values['epoch']}"


def _manifest(topic: str, values: Values) -> str:
    return f"{_epoch(topic, values)}.manifest"


def _found(here: Private, topic: str, values: Values) -> dict[str, str]:
    """The attempts of an epoch that are staged, and the names of their files."""
    begin = f"{_epoch(topic, values)}."
    names = (name for name in here.names() if name.startswith(begin) and name.endswith(".rows"))
    return {name.split(".")[2]: name for name in names}


def _files(
    here: Private, topic: str, values: Values, attempts: Sequence[_Attempt]
) -> list[tuple[str, int]]:
    """The files of the attempts, and their sizes. Raises FileNotFoundError."""
    found = _found(here, topic, values)
    try:
        return [(found[item["attempt"]], item["size"]) for item in attempts]
    except KeyError as exc:
        raise FileNotFoundError(f"the attempt {exc} is not staged") from None


def _measured(here: Private, files: Sequence[tuple[str, int]]) -> tuple[int, int]:
    """The rows of these files, and the bytes of their bodies."""
    rows = size = 0
    for name, length in files:
        data, at = memoryview(here.read(name)), 0
        while at + _PIECE.size <= min(length, len(data)):
            count, nbytes = _PIECE.unpack_from(data, at)
            rows, size = rows + count, size + nbytes - 4 * count
            at += _PIECE.size + nbytes
    return rows, size


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
                "and the rest of its rows is gone: publish it by hand"
            )
        found = _found(here, topic, values)
        lost = [item for item in named if item["attempt"] not in found]
        if lost:
            raise ShmqError(
                f"{len(lost)} of {len(named)} attempts of epoch {values['epoch']} of "
                f"{values['writer']!r} are not staged here: they were staged with another secret, "
                "committed under another epoch, abandoned, or nobody touched them for staged_ttl"
            )
        if not named:
            return []
        rows = sum(int(item["rows"]) for item in named)
        staged = _measured(here, _files(here, topic, values, named))[0]
        if staged != rows:
            raise BadArgument(
                f"commit epoch {values['epoch']} of {values['writer']!r} to {topic}: {rows} rows "
                f"are named, and {staged} are staged"
            )
        mine = f"{manifest}.{uuid.uuid4().hex}"
        with open(here.create(mine), "w") as file:
            json.dump(named, file)
        with contextlib.suppress(FileExistsError):
            here.link(mine, manifest)
        here.unlink(mine)
    here.touch(manifest)
    decided: list[_Attempt] = json.loads(bytes(here.read(manifest)))
    return decided


def _clear(here: Private, topic: str, values: Values) -> int:
    """Remove the files of this writer's epochs up to this one, manifests last. Returns their
    number."""
    begin, count = f"{_prefix(topic, values)}.", 0
    names = [name for name in here.names() if name.startswith(begin)]
    for name in sorted(names, key=lambda name: ".manifest" in name):
        number = name.split(".")[1]
        if number.isdigit() and int(number) <= int(values["epoch"]):
            here.unlink(name)
            count += 1
    return count


_Piece = tuple[memoryview, Any, int]
"""Bodies one after the other, where each begins (int64), and how many they are."""


def _pieces(
    here: Private, names: Sequence[tuple[str, int]], rows: int, size: int, after: int
) -> Iterator[_Piece]:
    """Yield the rows of the files in order, in pieces that a queue has room for: at most `rows`
    rows of `size` bytes. One of them begins at row `after`: those before it are published, and the
    limits may have been others then."""
    import numpy as np  # slow to import

    done = 0
    for name, length in names:
        data = memoryview(here.read(name))
        if len(data) != length:
            attempt = name.split(".")[2]
            raise ShmqError(
                f"attempt {attempt} has {len(data)} bytes, and the commit says {length}: this "
                "write cannot be published; name the size that STAGE answered last"
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
                if done < after:
                    stop = min(stop, start + after - done)
                done += stop - start
                first, last = int(ends[start]), int(ends[stop])
                yield bodies[first:last], ends[start : stop + 1] - first, stop - start
                start = stop
