"""Rows that were written but not committed, and their publishing, once.

Each attempt of a task writes a file of its own (Arrow's, in /dev/shm, the life of the queue
itself). The commit decides with one file, the manifest, which of them are the epoch's: if there is
one already, a driver was killed in the middle of that commit, and what it began is finished,
whatever was written since. The rows are published in pieces that fit the broker's memory; each
moves the writer's mark by the very store that publishes it, so the next to try goes on behind it.
Then the files go, the manifest last.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
import pyarrow.compute as pc

import shmq
from shmq import layout
from shmq.spark.options import Settings

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
    """What one attempt of a task has written."""

    file: str
    rows: int


def directory(settings: Settings) -> Path:
    """Where the rows of this instance wait, made if it is missing; nobody else may look."""
    base = settings.staging or f"/dev/shm/shmq-staged-{os.getuid()}"
    path = Path(base, settings.instance)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


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
    path, rows = directory(settings) / name, 0
    try:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
            for batch in batches:
                column = bodies_of(batch, settings)
                rows += len(column)
                writer.write_batch(pa.RecordBatch.from_arrays([column], schema=_SCHEMA))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    if rows:
        return Staged(name, rows)
    path.unlink()
    return None


def drop(staged: Iterable[Staged | None], settings: Settings) -> None:
    """Forget attempts that will not be published."""
    here = directory(settings)
    for item in staged:
        if item is not None:
            (here / item.file).unlink(missing_ok=True)
    sweep(here)


def abandon(settings: Settings, key: str, epoch: int) -> None:
    """Forget all attempts of an epoch, known or not, unless its commit has begun."""
    here, prefix = directory(settings), _prefix(key, settings.topic)
    with _locked(here, fcntl.LOCK_SH):
        if not (here / f"{prefix}.{epoch}.manifest").exists():
            _clear(here, prefix, epoch)
    sweep(here)


def sweep(here: Path) -> None:
    """Remove what applications left that have died; not now if a commit is running."""
    with contextlib.suppress(BlockingIOError), _locked(here, fcntl.LOCK_EX | fcntl.LOCK_NB):
        names = os.listdir(here)
        decided: set[str] = set()
        for name in names:
            if name.endswith(".manifest"):
                decided.update(json.loads((here / name).read_text()))
        for name in names:
            found = _STAGED.fullmatch(name)
            if (found and name not in decided and not _lives(found)) or _UNLINKED.fullmatch(name):
                (here / name).unlink(missing_ok=True)


def _lives(name: re.Match[str]) -> bool:
    return layout.process_start_time(int(name["pid"])) == int(name["start"])


@contextlib.contextmanager
def _locked(here: Path, how: int) -> Iterator[None]:
    """Shared: a commit runs; alone: none does. BlockingIOError."""
    fd = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def commit(staged: Sequence[Staged], settings: Settings, key: str, epoch: int) -> int:
    """Publish the epoch, unless it was; how many rows were published now."""
    from shmq.spark.reading import attached

    here, prefix = directory(settings), _prefix(key, settings.topic)
    producer = attached(settings.instance).producer(settings.topic)
    with _locked(here, fcntl.LOCK_SH):
        reached, rows = producer.mark(*_key(key))
        published = 0
        if reached - 1 < epoch or (reached - 1 == epoch and rows < _DONE):
            after = rows if reached - 1 == epoch else 0
            manifest = here / f"{prefix}.{epoch}.manifest"
            files = _decide(manifest, [item.file for item in staged], bool(after))
            paths = [here / name for name in files]
            published = _publish(producer, paths, settings, key, epoch, after)
        _clear(here, prefix, epoch)
    sweep(here)
    return published


def _decide(manifest: Path, files: list[str], begun: bool) -> list[str]:
    """The files that are the epoch's."""
    if begun and not manifest.exists():
        raise shmq.ShmqError(
            f"a part of this micro-batch was published before, the rest was in {manifest.parent}, "
            "which is gone: publish what is missing by hand, or go on with a new writer_id"
        )
    lost = [name for name in files if not (manifest.parent / name).exists()]
    if lost and not manifest.exists():
        raise shmq.ShmqError(
            f"{len(lost)} of {len(files)} files that tasks staged in {manifest.parent} are gone: "
            "the application that they were staged for was taken for dead"
        )
    if files or manifest.exists():
        mine = manifest.with_name(f"{manifest.name}.{uuid.uuid4().hex}")
        mine.write_text(json.dumps(files))
        with contextlib.suppress(FileExistsError):
            os.link(mine, manifest)
        mine.unlink()
        files = json.loads(manifest.read_text())
    return files


def _clear(here: Path, prefix: str, epoch: int) -> None:
    """What is left of this writer's epochs up to this one; manifests last."""
    names = [name for name in os.listdir(here) if name.startswith(prefix)]
    for name in sorted(names, key=lambda name: ".manifest" in name):
        found = re.match(r"[0-9a-f]+\.([0-9]+)\.", name)
        if found and int(found[1]) <= epoch:
            (here / name).unlink(missing_ok=True)


def _pieces(paths: list[Path], rows: int, size: int) -> Iterator[pa.Array]:
    """Arrays that a queue has room for, in order, the same at every try."""
    for path in paths:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                column = reader.get_batch(number).column(0)
                start = 0
                while start < len(column):
                    piece = column[start : start + rows]
                    while len(piece) > 1 and _bytes_of(piece) > size:
                        piece = piece[: len(piece) // 2]
                    yield piece
                    start += len(piece)


def _bytes_of(array: pa.Array) -> int:
    offsets = memoryview(array.buffers()[1]).cast("q")
    return int(offsets[array.offset + len(array)] - offsets[array.offset])


def _publish(
    producer: Any, paths: list[Path], settings: Settings, key: str, epoch: int, after: int
) -> int:
    limits = attached_limits(settings)
    rows = max(1, min(_ROWS, max(limits["mem_queue_size"], _TRANSIT) // 4))
    size = min(_BYTES, limits["arena_size"] // 8)
    at = published = 0
    pieces = _pieces(paths, rows, size)
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

    return attached(settings.instance).limits
