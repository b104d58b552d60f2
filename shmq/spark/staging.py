"""Rows that were written but not committed, and their publishing, once.

Each attempt of a task writes a file of its own (Arrow's, in /dev/shm, the life of the queue
itself), in a directory that nobody else may look into (`private`). The commit decides with one
file, the manifest, which of them are the epoch's: if there is one already, a driver was killed in
the middle of that commit, and what it began is finished, whatever was written since. The rows are
published in pieces that fit the broker's memory; each moves the writer's mark by the very store
that publishes it, so the next to try goes on behind it. Then the files go, the manifest last.

What nobody commits is removed by whoever commits or gives up next on this instance: files of an
application that has died, but for those that a manifest names. A file's name has the application's
process: the driver's JVM, whose workers also commit. No commit runs meanwhile (a lock on the
directory, which ends with its holder), so no manifest comes to name a file that is being removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import psutil
import pyarrow as pa
import pyarrow.compute as pc

import shmq
from shmq import layout
from shmq.spark.options import Settings
from shmq.spark.private import Private

#: How far the mark of a whole epoch is.
_DONE: Final = 1 << 62
#: What is published at once stays in a core's cache from the first look at its slots to the last.
_ROWS: Final = 2048
_BYTES: Final = 4 << 20
#: Least number of messages that a queue holds, whatever mem_queue_size says.
_TRANSIT: Final = 256
_STAGED: Final = re.compile(
    r"[0-9a-f]+\.[0-9]+\.(?P<pid>[0-9]+)-(?P<start>[0-9]+)\.[0-9a-f]+\.arrow"
)
_UNLINKED: Final = re.compile(r".+\.manifest\.[0-9a-f]+")  # what a manifest was to be made of
_SCHEMA: Final = pa.schema([pa.field("body", pa.large_binary(), False)])


@dataclass(frozen=True)
class Staged:
    """What one attempt of a task has written. size: of the file, in bytes."""

    file: str
    rows: int
    size: int


def directory(settings: Settings) -> Private:
    """Where the rows of this instance wait, made if it is missing. ShmqError if anybody else may
    look."""
    base = (settings.staging,) if settings.staging else ("/dev/shm", f"shmq-staged-{os.geteuid()}")
    while True:
        with contextlib.suppress(FileNotFoundError):  # a sweep removed it, empty, as it was made
            return Private(*base, settings.instance)


def application() -> str:
    """The process that this one works for: the nearest JVM above it, or itself; and its start."""
    above = psutil.Process().parents()
    pid = next((process.pid for process in above if process.name() == "java"), os.getpid())
    return f"{pid}-{layout.process_start_time(pid)}"


def _prefix(key: str, topic: str) -> str:
    return hashlib.blake2b(f"{topic}\0{key}".encode(), digest_size=16).hexdigest()


def _key(key: str) -> tuple[int, int]:
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def bodies_of(batch: pa.RecordBatch, settings: Settings) -> pa.Array:
    """The column that is published. ValueError for what cannot be a message."""
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
    if len(column) and not pc.min(pc.binary_length(column)).as_py():
        raise ValueError(
            f"column {settings.body!r} has an empty value: a message has 1 byte or more"
        )
    return column


def stage(
    batches: Iterable[pa.RecordBatch], settings: Settings, key: str, epoch: int, owner: str
) -> Staged | None:
    """Write what a task of the application `owner` publishes; None: nothing."""
    name = f"{_prefix(key, settings.topic)}.{epoch}.{owner}.{uuid.uuid4().hex}.arrow"
    rows = 0
    here, fd = _create(settings, name)
    with here:
        try:
            # Arrow opens paths only, and this one is the descriptor; through a file of Python's
            # the writing would take half as long again
            path = f"/proc/self/fd/{fd}"
            with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
                for batch in batches:
                    column = bodies_of(batch, settings)
                    rows += len(column)
                    writer.write_batch(pa.RecordBatch.from_arrays([column], schema=_SCHEMA))
            size = os.fstat(fd).st_size
        except BaseException:
            here.unlink(name)
            raise
        finally:
            os.close(fd)
        if rows:
            return Staged(name, rows, size)
        here.unlink(name)
    return None


def _create(settings: Settings, name: str) -> tuple[Private, int]:
    """The directory with a new file in it, and the file's descriptor."""
    while True:
        here = directory(settings)
        try:
            return here, here.create(name)
        except FileNotFoundError:  # a sweep removed the directory, empty, since it was opened
            here.close()
        except BaseException:
            here.close()
            raise


def drop(staged: Iterable[Staged | None], settings: Settings) -> None:
    """Forget attempts that will not be published."""
    with directory(settings) as here:
        for item in staged:
            if item is not None:
                here.unlink(item.file)
        sweep(here)


def abandon(settings: Settings, key: str, epoch: int) -> None:
    """Forget all attempts of an epoch, known or not, unless its commit has begun."""
    prefix = _prefix(key, settings.topic)
    with directory(settings) as here:
        with _locked(here, fcntl.LOCK_SH):
            if not here.exists(f"{prefix}.{epoch}.manifest"):
                _clear(here, prefix, epoch)
        sweep(here)


def sweep(here: Private) -> None:
    """Remove what applications left that have died, and the directory once nothing is in it; not
    now if a commit is running."""
    with contextlib.suppress(BlockingIOError), _locked(here, fcntl.LOCK_EX | fcntl.LOCK_NB):
        names = here.names()
        decided: set[str] = set()
        for name in names:
            if name.endswith(".manifest"):
                decided.update(item.file for item in _manifest(here, name))
        for name in names:
            found = _STAGED.fullmatch(name)
            if (found and name not in decided and not _lives(found)) or _UNLINKED.fullmatch(name):
                here.unlink(name)
        here.remove()


def _lives(name: re.Match[str]) -> bool:
    return layout.process_start_time(int(name["pid"])) == int(name["start"])


@contextlib.contextmanager
def _locked(here: Private, how: int) -> Iterator[None]:
    """Shared: a commit runs; alone: none does. BlockingIOError."""
    fd = here.again()
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def commit(staged: Sequence[Staged], settings: Settings, key: str, epoch: int) -> int:
    """Publish the epoch, unless it was; how many rows were published now."""
    from shmq.spark.reading import attached

    prefix = _prefix(key, settings.topic)
    producer = attached(settings.instance, settings.owner).producer(settings.topic)
    with directory(settings) as here:
        with _locked(here, fcntl.LOCK_SH):
            reached, rows = producer.mark(*_key(key))
            published = 0
            if reached - 1 < epoch or (reached - 1 == epoch and rows < _DONE):
                after = rows if reached - 1 == epoch else 0
                manifest = f"{prefix}.{epoch}.manifest"
                files = _decide(here, manifest, staged, bool(after))
                published = _publish(producer, here, files, settings, key, epoch, after)
            _clear(here, prefix, epoch)
        sweep(here)
    return published


def _decide(
    here: Private, manifest: str, staged: Sequence[Staged], begun: bool
) -> Sequence[Staged]:
    """The files that are the epoch's."""
    decided = here.exists(manifest)
    if begun and not decided:
        raise shmq.ShmqError(
            f"a part of this micro-batch was published before, the rest was in {here.path}, "
            "which is gone: publish what is missing by hand, or go on with a new writer_id"
        )
    lost = [item.file for item in staged if not here.exists(_checked(item.file, "a task's result"))]
    if lost and not decided:
        raise shmq.ShmqError(
            f"{len(lost)} of {len(staged)} files that tasks staged in {here.path} are gone: "
            "the application that they were staged for was taken for dead"
        )
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
    """What a manifest says. ShmqError if no commit of shmq can have written it."""
    try:
        found = [Staged(**item) for item in json.loads(bytes(here.read(name)))]
    except (ValueError, TypeError) as exc:
        raise shmq.ShmqError(
            f"{here.path / name} is no manifest of this version of shmq: finish that write with "
            f"the version that began it, or remove the file and publish its rows anew ({exc})"
        ) from exc
    for item in found:
        _checked(item.file, str(here.path / name))
    return found


def _checked(name: str, where: str) -> str:
    """A name of a staged file. ShmqError for any other, which might have a path."""
    if not _STAGED.fullmatch(name):
        raise shmq.ShmqError(f"{where} names {name!r}, which is no file that a task staged")
    return name


def _clear(here: Private, prefix: str, epoch: int) -> None:
    """What is left of this writer's epochs up to this one; manifests last."""
    names = [name for name in here.names() if name.startswith(prefix)]
    for name in sorted(names, key=lambda name: ".manifest" in name):
        found = re.match(r"[0-9a-f]+\.([0-9]+)\.", name)
        if found and int(found[1]) <= epoch:
            here.unlink(name)


def _pieces(here: Private, files: Iterable[Staged], rows: int, size: int) -> Iterator[pa.Array]:
    """Arrays that a queue has room for, in order, the same at every try."""
    for item in files:
        reader = _reader(here, item)
        for number in range(reader.num_record_batches):
            column = reader.get_batch(number).column(0)
            start = 0
            while start < len(column):
                piece = column[start : start + rows]
                while len(piece) > 1 and _bytes_of(piece) > size:
                    piece = piece[: len(piece) // 2]
                yield piece
                start += len(piece)


def _reader(here: Private, item: Staged) -> Any:
    """A staged file, which must be as its task left it: nothing of it is published if not."""
    data = here.read(item.file)
    if len(data) != item.size:
        raise shmq.ShmqError(
            f"{here.path / item.file} has {len(data)} bytes, its task wrote {item.size}: somebody "
            "changed it; this write cannot be published"
        )
    try:
        return pa.ipc.open_file(pa.py_buffer(data))
    except pa.ArrowInvalid as exc:
        raise shmq.ShmqError(f"{here.path / item.file} is not what its task wrote: {exc}") from exc


def _bytes_of(array: pa.Array) -> int:
    offsets = memoryview(array.buffers()[1]).cast("q")
    return int(offsets[array.offset + len(array)] - offsets[array.offset])


def _publish(
    producer: Any, here: Private, files: Sequence[Staged], settings: Settings, key: str, epoch: int,
    after: int,
) -> int:  # fmt: skip
    limits = attached_limits(settings)
    rows = max(1, min(_ROWS, max(limits["mem_queue_size"], _TRANSIT) // 4))
    size = min(_BYTES, limits["arena_size"] // 8)
    at = published = 0
    pieces = _pieces(here, files, rows, size)
    piece = next(pieces, None)
    while piece is not None:
        following = next(pieces, None)
        upto = at + len(piece)
        if upto > after:
            _, offsets, data = piece.buffers()
            first = producer.publish_marked(
                b"" if data is None else data, offsets, True, piece.offset, len(piece), *_key(key),
                epoch, at, _DONE if following is None else upto, settings.timeout,
            )  # fmt: skip
            published += len(piece) if first is not None else 0
        at, piece = upto, following
    return published


def attached_limits(settings: Settings) -> dict[str, int]:
    """Of the broker that is published to."""
    from shmq.spark.reading import attached

    return attached(settings.instance, settings.owner).limits
