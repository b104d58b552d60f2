"""Staged rows: written but not committed; and their commit, which publishes them once.

Each attempt of a task writes an Arrow file of its own, in a directory that only this user may read
(`private`). It is in /dev/shm, so it lives as long as the queues in memory. A commit decides with
one file, the manifest, which attempts' files belong to the epoch. If the manifest exists already, a
driver was killed in the middle of that commit. The commit it began is then finished, with the files
that the manifest names, and files written since are ignored. The rows are published in pieces that
fit in the broker's memory. The store that publishes a piece also advances the writer's mark, so a
repeated commit continues after the last published piece. Finally the files are removed, the
manifest last. A write that nobody can repeat, because it has no name, needs neither manifest nor
mark.

The mark of a whole epoch also has a check sum of its rows, and of the run that published it. A run
that commits the epoch once more with other rows has two writes under one name, and the second one
is an error. A later run repeats the epoch after a death, and may have computed other rows.

Files that no commit ever names are removed by the next commit or abort on this instance, if their
application has died, or the task that wrote them: a task has its file locked until it is whole. The
end of the instance removes those of dead applications, too. A file's name identifies the
application by its process: the driver's JVM, whose Python workers also commit. The removal runs
only while no commit does (both lock the directory, and a lock ends with its holder), so no manifest
can name a file that is being removed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import hashlib
import json
import mmap
import os
import re
import threading
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.compute as pc

import shmq
from shmq import procfs, sources
from shmq.configurable import at_once
from shmq.private import NotOwn, Private
from shmq.spark.options import Settings
from shmq.staging_place import STAGED, StagingPlace, is_staged_by_the_living

#: A mark from here on says: the whole epoch is published. Above it are a check sum of the run that
#: published it (0: not known) and one of the rows, each below _SUM.
_DONE: Final = 1 << 62
_SUM: Final = 1 << 31
#: Rows, and bytes, that are published at once: their slots stay in a core's cache meanwhile.
_ROWS: Final = 2048
_BYTES: Final = 4 << 20
#: Bytes of a body up to which no limit is asked for: a batch of larger ones has few rows.
_SMALL: Final = 64 << 10
#: Pages that are looked at in one call.
_TOUCHED: Final = 1024
#: Files that a commit keeps mapped at most: each has a descriptor.
_MAPPED: Final = 64
_UNLINKED: Final = re.compile(r".+\.manifest\.[0-9a-f]+")  # a manifest before its link
_END: Final = b"ARROW1"  # of a whole file
_SCHEMA: Final = pa.schema([pa.field("body", pa.large_binary(), False)])


@dataclass(frozen=True)
class Staged:
    """The file that one attempt of a task has written. size: of the file, in bytes. sum: a check
    sum of its rows."""

    file: str
    rows: int
    size: int
    sum: int = 0


def directory(settings: Settings) -> Private:
    """The directory of this instance's staged rows, created if it is missing. Raises ShmqError if
    another user may read it, and NotRunning if the default directory has to be made and there is no
    such instance."""
    while True:
        try:
            if settings.staging:
                return Private(settings.staging, settings.instance)
            return StagingPlace(settings.instance, lambda: secret_of(settings)).open()
        except FileNotFoundError:  # a sweep removed the empty directory
            continue
        except NotOwn as exc:
            other = 'or name another directory: .option("staging", DIRECTORY)'
            raise NotOwn(f"{exc}; {other}") from None


def secret_of(settings: Settings) -> tuple[bytes, str]:
    """With what the name of the directory is made: the key of the instance's seals, and its
    memory."""
    with sources.open_readonly(settings.instance, owner=settings.owner) as source:
        return source.directory.seal_key, source.directory.identity


def application() -> str:
    """The process that this one works for, as `PID-START`: the nearest JVM among its ancestors, or
    itself; and that process's start time."""
    above = psutil.Process().parents()
    pid = next((process.pid for process in above if process.name() == "java"), os.getpid())
    return f"{pid}-{procfs.start_time(pid)}"


def _prefix(key: str, topic: str) -> str:
    return hashlib.blake2b(f"{topic}\0{key}".encode(), digest_size=16).hexdigest()


def _key(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def bodies_of(batch: pa.RecordBatch, settings: Settings) -> pa.Array:
    """The column that is published, as large_binary. Raises ValueError for a column or a value that
    cannot be a message, and MessageTooBig for one that this host's instance does not take: in the
    task, before a row of the write is published."""
    index = batch.schema.get_field_index(settings.body)
    if index < 0:
        raise ValueError(
            f"no column {settings.body!r} to publish to {settings.topic}, there are "
            f'{", ".join(batch.schema.names)}: select one as "body", or .option("body", NAME)'
        )
    column = batch.column(index)
    kinds = (
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_string,
        pa.types.is_large_string,
    )
    if not any(is_kind(column.type) for is_kind in kinds):
        raise ValueError(
            f"column {settings.body!r} is {column.type}: cast it to binary or string (or to_json)"
        )
    if column.null_count:
        raise ValueError(f"{column.null_count} of column {settings.body!r} are null")
    column = column.cast(pa.large_binary())
    if not len(column):
        return column
    sizes = pc.min_max(pc.binary_length(column)).as_py()
    if not sizes["min"]:
        raise ValueError(
            f"column {settings.body!r} has an empty value: a message has 1 byte or more"
        )
    if sizes["max"] > _SMALL and not settings.many:  # a gateway says it of its own instance
        with sources.open_readonly(settings.instance, owner=settings.owner) as source:
            most = source.directory.limits["max_msg_size"]
        if sizes["max"] > most:
            raise shmq.MessageTooBig(
                f"publish to {settings.topic}: a row of column {settings.body!r} has "
                f"{sizes['max']} bytes, and instance {settings.instance!r} takes {most}: make it "
                "smaller, or raise the broker's --max-msg-size"
            )
    return column


def stage(
    batches: Iterable[pa.RecordBatch], settings: Settings, key: str, epoch: int, owner: str
) -> Staged | None:
    """Write the rows of a task of the application `owner` to a file; None if there are no rows."""
    name = f"{_prefix(key, settings.topic)}.{epoch}.{owner}.{uuid.uuid4().hex}.arrow"
    rows = sum_of_all = 0
    here, fd = _create(settings, name)
    with here:
        try:
            # Arrow opens only paths, so this one names the descriptor. Through a file object of
            # Python writing would take half as long again.
            path = f"/proc/self/fd/{fd}"
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
                for batch in batches:
                    column = bodies_of(batch, settings)
                    rows += len(column)
                    sum_of_all += _sum(column)
                    writer.write_batch(pa.RecordBatch.from_arrays([column], schema=_SCHEMA))
            size = os.fstat(fd).st_size
        except OSError as exc:
            here.unlink(name)
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise shmq.Full(
                f"publish to {settings.topic}: {here.path} has no room for the rows of a task, "
                "which wait there for the end of the write: make it larger (mount -o "
                "remount,size=SIZE /dev/shm, docker run --shm-size), write fewer rows at once, or "
                'use a directory on disk: .option("staging", DIRECTORY)'
            ) from exc
        except BaseException:
            here.unlink(name)
            raise
        finally:
            os.close(fd)
        if rows:
            return Staged(name, rows, size, sum_of_all % _SUM)
        here.unlink(name)
    return None


def _sum(column: pa.Array) -> int:
    """A check sum of some rows: their number and bytes, and the first and last one. The sum of all
    bytes would take as long as a copy."""
    if not len(column):
        return 0
    ends = zlib.crc32(column[0].as_py(), zlib.crc32(column[-1].as_py()))
    return ends + len(column) + _bytes_of(column)


def _create(settings: Settings, name: str) -> tuple[Private, int]:
    """The directory, and the descriptor of a new file in it, which is locked: see `_is_left`."""
    while True:
        here = directory(settings)
        try:
            fd = here.create(name)
            fcntl.flock(fd, fcntl.LOCK_SH)
            if os.fstat(fd).st_nlink:
                return here, fd
            os.close(fd)  # a sweep took it for one of a dead task
        except FileNotFoundError:  # a sweep removed the empty directory since it was opened
            pass
        except BaseException:
            here.close()
            raise
        here.close()


def drop(staged: Iterable[Staged | None], settings: Settings) -> None:
    """Remove the files of attempts that will not be published."""
    with directory(settings) as here:
        for item in staged:
            if item is not None:
                here.unlink(item.file)
        sweep(here)


def abandon(settings: Settings, key: str, epoch: int) -> None:
    """Remove the files of all attempts of an epoch, known or not, unless its commit has begun."""
    prefix = _prefix(key, settings.topic)
    with directory(settings) as here:
        with _locked(here, fcntl.LOCK_SH):
            if not here.exists(f"{prefix}.{epoch}.manifest"):
                _clear(here, prefix, epoch)
        sweep(here)


def sweep(here: Private) -> None:
    """Remove the files of applications and tasks that have died, and the directory once it is
    empty. Does nothing while a commit is running."""
    with contextlib.suppress(BlockingIOError), _locked(here, fcntl.LOCK_EX | fcntl.LOCK_NB):
        names = here.names()
        decided: set[str] = set()
        for name in names:
            if name.endswith(".manifest"):
                decided.update(item.file for item in _manifest(here, name))
        for name in names:
            found = STAGED.fullmatch(name)
            if _UNLINKED.fullmatch(name):
                here.unlink(name)
            elif not found or name in decided:
                continue
            elif not is_staged_by_the_living(found) or _is_left(here, name):
                here.unlink(name)
        here.remove()


def _is_left(here: Private, name: str) -> bool:
    """Whether a file is of a task that was killed while it wrote. Spark may kill it after its job
    has failed and was cleaned up."""
    fd = here.append(name)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.pread(fd, len(_END), max(os.fstat(fd).st_size - len(_END), 0)) != _END
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(here: Private, how: int) -> Iterator[None]:
    """Hold the lock of the directory, shared for a commit, exclusive for a sweep. Raises
    BlockingIOError with LOCK_NB."""
    fd = here.again()
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def commit(
    staged: Sequence[Staged],
    settings: Settings,
    key: str,
    epoch: int,
    run: str = "",
    repeats: bool = True,
) -> int:
    """Publish the epoch, unless it is published already. Returns the number of rows that were
    published now.

    run: what tells this run of the writer from the ones before it; "": not known. repeats: the
    commit may be repeated after a death. Raises ShmqError if a later epoch is published already,
    unless failOnDataLoss=false; and if this run has published the epoch with other rows."""
    from shmq.spark.reading import attached

    prefix = _prefix(key, settings.topic)
    producer = attached(settings.instance, settings.owner).producer(settings.topic)
    mapped: collections.deque[Any] = collections.deque(maxlen=_MAPPED)
    with directory(settings) as here:
        with _locked(here, fcntl.LOCK_SH):
            reached, rows = producer.mark(*_key(key)) if repeats else (0, 0)
            published = 0
            if reached - 1 < epoch or (reached - 1 == epoch and rows < _DONE):
                after = rows if reached - 1 == epoch else 0
                if repeats:
                    files = _decide(here, f"{prefix}.{epoch}.manifest", staged, bool(after))
                else:
                    files = _present(here, staged)
                mark = _Mark(key, epoch, after, _whole(files, run)) if repeats else None
                readers = (_reader(here, item, mapped) for item in files)
                published = _publish(producer, readers, settings, mark)
            elif staged and settings.failOnDataLoss:
                _compare(
                    staged, settings, _Mark(key, epoch, rows, _whole(staged, run)), reached - 1
                )
            _clear(here, prefix, epoch)
        sweep(here)
    # Nobody waits while the kernel frees the pages: their names are gone, and a map ends without
    # the GIL. If there can be no thread, they end with this function.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=mapped.clear, name="shmq-unmap", daemon=True).start()
    return published


@dataclass(frozen=True)
class _Mark:
    """How far a writer's epoch is published: up to the position `after`; and the position that says
    that all of it is."""

    key: str
    epoch: int
    after: int
    whole: int


def _whole(staged: Sequence[Staged], run: str) -> int:
    """The mark of a whole epoch."""
    rows = sum(item.sum for item in staged) % _SUM
    return _DONE | (zlib.crc32(run.encode()) % _SUM if run else 0) * _SUM | rows


def _compare(staged: Sequence[Staged], settings: Settings, mark: _Mark, last: int) -> None:
    """Check a commit of an epoch that is published, or that is before `last`, which is. Raises
    ShmqError where to say nothing would hide that its rows are not published."""
    rows = sum(item.rows for item in staged)
    what = (
        f"publish {rows} rows to {settings.topic} as version {mark.epoch} of {mark.key!r}: nothing "
        "was published, because"
    )
    skip = 'To leave these rows out: .option("failOnDataLoss", "false")'
    if last > mark.epoch:
        raise shmq.ShmqError(
            f"{what} version {last} is published already. A query with a new checkpoint counts its "
            f"micro-batches from 0 again: give it another txnAppId. {skip}"
        )
    run, its = mark.whole - _DONE, mark.after - _DONE
    if run // _SUM and run // _SUM == its // _SUM and run % _SUM != its % _SUM:
        raise shmq.ShmqError(
            f"{what} other rows are published under this version already. Give each write of a "
            f"micro-batch a txnAppId of its own. {skip}"
        )


def _present(here: Private, staged: Sequence[Staged]) -> Sequence[Staged]:
    """Return the files that tasks have staged. Raises ShmqError if one of them is gone."""
    lost = [item.file for item in staged if not here.exists(_checked(item.file, "a task's result"))]
    if lost:
        raise shmq.ShmqError(
            f"{len(lost)} of {len(staged)} files that tasks staged in {here.path} are gone: "
            "the application that they were staged for was taken for dead"
        )
    return staged


def _decide(
    here: Private, manifest: str, staged: Sequence[Staged], begun: bool
) -> Sequence[Staged]:
    """The files that belong to the epoch, from its manifest, which is created if it is missing.
    begun: a part of the epoch is published already."""
    decided = here.exists(manifest)
    if begun and not decided:
        raise shmq.ShmqError(
            f"a part of this micro-batch was published before, the rest was in {here.path}, "
            "which is gone: publish what is missing by hand, or go on with a new txnAppId"
        )
    if not decided:
        _present(here, staged)
    if not staged and not decided:
        return []
    if not decided:
        mine = f"{manifest}.{uuid.uuid4().hex}"
        with open(here.create(mine), "w") as file:
            json.dump([asdict(item) for item in staged], file)
        with contextlib.suppress(FileExistsError):
            here.link(mine, manifest)
        here.unlink(mine)
    return _manifest(here, manifest)


def _manifest(here: Private, name: str) -> list[Staged]:
    """The files that a manifest names. Raises ShmqError if no commit of shmq can have written
    it."""
    try:
        found = [Staged(**item) for item in json.loads(bytes(here.read(name)))]
    except (ValueError, TypeError) as exc:
        raise shmq.ShmqError(
            f"{here.path / name} is no manifest of this version of shmq: finish that write with "
            f"the version that began it, or remove the file and publish its rows again ({exc})"
        ) from exc
    for item in found:
        _checked(item.file, str(here.path / name))
    return found


def _checked(name: str, where: str) -> str:
    """Return `name`, the name of a staged file. Raises ShmqError for any other name, which might
    contain a path."""
    if not STAGED.fullmatch(name):
        raise shmq.ShmqError(f"{where} names {name!r}, which is no file that a task staged")
    return name


def _clear(here: Private, prefix: str, epoch: int) -> None:
    """Remove the files of this writer's epochs up to this one, manifests last."""
    names = [name for name in here.names() if name.startswith(prefix)]
    for name in sorted(names, key=lambda name: ".manifest" in name):
        found = re.match(r"[0-9a-f]+\.([0-9]+)\.", name)
        if found and int(found[1]) <= epoch:
            here.unlink(name)


def _pieces(readers: Iterable[Any], rows: int, size: int, after: int) -> Iterator[pa.Array]:
    """Yield the rows of the files in order, as arrays that a queue has room for: at most `rows`
    rows of `size` bytes. One of them begins at row `after`: those before it are published, and the
    limits may have been others then."""
    done = 0
    for reader in readers:
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(0)
            start = 0
            while start < len(column):
                piece = column[start : start + rows]
                if done < after:
                    piece = piece[: after - done]
                while len(piece) > 1 and _bytes_of(piece) > size:
                    piece = piece[: len(piece) // 2]
                yield piece
                start += len(piece)
                done += len(piece)


def _reader(here: Private, item: Staged, mapped: collections.deque[Any]) -> Any:
    """A reader of a staged file, whose map is added to `mapped`. Raises ShmqError, and nothing of
    the file is published, if it is not as its task left it."""
    data = here.read(item.file)
    mapped.append(data)
    if len(data) != item.size:
        raise shmq.ShmqError(
            f"{here.path / item.file} has {len(data)} bytes, its task wrote {item.size}: somebody "
            "changed it; this write cannot be published"
        )
    with contextlib.suppress(RuntimeError):  # there can be no thread: only slower
        threading.Thread(target=_touch, args=(data,), name="shmq-touch", daemon=True).start()
    try:
        return pa.ipc.open_file(pa.py_buffer(data))
    except pa.ArrowInvalid as exc:
        raise shmq.ShmqError(f"{here.path / item.file} is not what its task wrote: {exc}") from exc


def _touch(data: Any) -> None:
    """Have the kernel map the pages of a staged file before the thread that publishes needs them:
    the faults are as long as the copies. Looking at the pages needs no GIL."""
    pages = np.frombuffer(data, np.uint8)[:: mmap.PAGESIZE]
    for start in range(0, len(pages), _TOUCHED):
        pages[start : start + _TOUCHED].max()


def _bytes_of(array: pa.Array) -> int:
    offsets = memoryview(array.buffers()[1]).cast("q")
    return int(offsets[array.offset + len(array)] - offsets[array.offset])


def _publish(producer: Any, readers: Iterable[Any], settings: Settings, mark: _Mark | None) -> int:
    rows, size = _room(settings)
    at = published = 0
    pieces = _pieces(readers, rows, size, 0 if mark is None else mark.after)
    piece = next(pieces, None)
    while piece is not None:
        following = next(pieces, None)
        upto = at + len(piece)
        if mark is None:
            producer.publish_many(piece, timeout=settings.timeout)
            published += len(piece)
        elif upto > mark.after:
            _, offsets, data = piece.buffers()
            first = producer.publish_once(
                b"" if data is None else data,
                offsets,
                True,
                piece.offset,
                len(piece),
                *_key(mark.key),
                mark.epoch,
                at,
                mark.whole if following is None else upto,
                settings.timeout,
            )
            published += len(piece) if first is not None else 0
        at, piece = upto, following
    return published


def _room(settings: Settings) -> tuple[int, int]:
    """How many rows and bytes of them the topic that is written to can take together."""
    from shmq.spark.reading import attached

    broker = attached(settings.instance, settings.owner)
    return at_once(broker, settings.topic, _ROWS, _BYTES)
