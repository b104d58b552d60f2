"""The chronicle: the segment `/shmq.<instance>:history`, with the history of an instance and its
log of deaths.

The supervisor alone writes it, and needs nothing of what is in it. So nothing here is trusted: the
segment is never mapped, only read and written by `pread` and `pwrite`, so one that was cut short
raises no SIGBUS; and every record ends with a check word, so a torn or an overwritten record is
left out.

    head        what the regions are; written last by the creator
    deaths      a ring of records: number n is in place n % deaths
    names       serial of a queue -> its topic and channel
    seconds     one record for each second of the last hour
    minutes     one record for each minute of the last 24 hours

The place of a second's or a minute's record follows from its time: there is no head or tail that a
death or a step of the clock could leave wrong. `history` and `deaths` have the readers.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from shmq import shm
from shmq.errors import Gone, LayoutMismatch
from shmq.layout import Array
from shmq.ownership import NotTrusted

#: (topic, channel) of a series; channel None: the messages of a topic that no channel has yet.
Key = tuple[str, str | None]

#: Counted between two records. A topic's messages count once for each channel.
COUNTERS: Final = (
    "published",
    "delivered",
    "finished",
    "requeued",
    "timed_out",
    "returned",
    "expired",
    "dead_lettered",
    "dropped",
)

#: As they are at the end of a record's time. oldest: ms + 1, 0 if no message waits. memory: KiB.
GAUGES: Final = (
    "ready",
    "in_flight",
    "deferred",
    "leased",
    "on_disk",
    "oldest",
    "memory",
    "consumers",
)

COLUMNS: Final = (*COUNTERS, *GAUGES)

_FORMAT: Final = 1
_MAGIC: Final = 0x0A0D68736971316B
_HEAD_BYTES: Final = 4096
_TITLE_BYTES: Final = 104
_NAME_BYTES: Final = 64
_DEATHS: Final = 256
_NAMES: Final = 512  # records of names, at least
_NAMES_EACH: Final = 4  # records of names for each channel of a record, as the channels take turns
_SECONDS_SHARE: Final = 0.4  # share of the room for channels
_MOST_ROWS: Final = 16384


def _record(fields: list[Any]) -> np.dtype[Any]:
    """A type of whole 64-bit words whose last one is the check word."""
    size = np.dtype(fields).itemsize
    return np.dtype([*fields, ("pad", "u1", (-size % 8,)), ("check", "<u8")])


def _tick(rows: int) -> np.dtype[Any]:
    return _record(
        [
            ("time", "<i8"),  # end of the interval, CLOCK_REALTIME ns
            ("span", "<f4"),  # its length in seconds
            ("queues", "<u4"),  # how many queues there were
            ("totals", "<u4", (len(COLUMNS),)),
            ("serials", "<u4", (rows,)),  # 0: the row is not used
            ("rows", "<u2", (rows, len(COLUMNS))),  # as `shorten` has them
        ]
    )


_HEAD: Final = _record(
    [
        ("magic", "<u8"),
        ("format", "<u4"),
        ("deaths", "<u4"),
        ("names", "<u4"),
        ("second_rows", "<u4"),
        ("minute_rows", "<u4"),
    ]
)

_NAME: Final = _record(
    [
        ("serial", "<u8"),
        ("is_channel", "<u8"),
        ("topic", f"S{_NAME_BYTES}"),
        ("channel", f"S{_NAME_BYTES}"),
    ]
)

_DEATH: Final = _record(
    [
        ("number", "<u8"),
        ("time", "<i8"),  # when the supervisor noticed the death, CLOCK_REALTIME ns
        ("repair", "<i8"),  # ns from then to the end of the repair
        ("pid", "<i4"),
        ("uid", "<u4"),
        ("kind", "<u4"),
        ("how", "<u4"),
        ("status", "<i4"),
        ("locks", "<u4"),
        ("messages", "<u8"),
        ("rebuilt", "<u8"),
        ("title", f"S{_TITLE_BYTES}"),
        ("held", "S840"),  # lines of `count topic channel`
    ]
)

#: Bytes that the lines of what a process held may take.
HELD_BYTES: Final = _DEATH["held"].itemsize


@dataclass(frozen=True)
class Plan:
    """The room of a chronicle. deaths, names: records. second_rows, minute_rows: channels in
    each second's and each minute's record, besides the totals."""

    deaths: int
    names: int
    second_rows: int
    minute_rows: int

    @classmethod
    def of(cls, budget: int) -> Self:
        """The plan for so many bytes, at least shm.LEAST_HISTORY."""
        row = 4 + 2 * len(COLUMNS)
        per_name = _NAMES_EACH * _NAME.itemsize
        # each record is rounded up by less than 8 bytes
        room = max(budget - cls(_DEATHS, _NAMES, 0, 0).size - 8 * (3600 + 1440), 0)
        second_rows = int(room * _SECONDS_SHARE) // (3600 * row + per_name)
        rest = room - second_rows * (3600 * row + per_name)
        second_rows = min(second_rows, _MOST_ROWS)
        minute_rows = min(rest // (1440 * row + per_name), _MOST_ROWS)
        names = max(_NAMES, _NAMES_EACH * (second_rows + minute_rows))
        return cls(_DEATHS, names, second_rows, minute_rows)

    @cached_property
    def regions(self) -> dict[str, tuple[int, int, np.dtype[Any]]]:
        """Region -> where it begins, how many records it has, and their type."""
        found, at = {}, _HEAD_BYTES
        for name, count, kind in (
            ("deaths", self.deaths, _DEATH),
            ("names", self.names, _NAME),
            ("seconds", 3600, _tick(self.second_rows)),
            ("minutes", 1440, _tick(self.minute_rows)),
        ):
            found[name] = at, count, kind
            at += count * kind.itemsize
        return found

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        at, count, kind = self.regions["minutes"]
        return at + count * kind.itemsize

    def head(self) -> Array:
        """The record that states this plan."""
        head = np.zeros(1, _HEAD)
        head["magic"], head["format"] = _MAGIC, _FORMAT
        for name in ("deaths", "names", "second_rows", "minute_rows"):
            head[name] = getattr(self, name)
        return seal(head)

    @classmethod
    def read(cls, raw: bytes) -> Self | None:
        """The plan that a segment's first bytes state; None if they state none of this release."""
        head = np.frombuffer(raw.ljust(_HEAD.itemsize, b"\0")[: _HEAD.itemsize], _HEAD)
        if not intact(head)[0] or (int(head["magic"][0]), int(head["format"][0])) != (
            _MAGIC,
            _FORMAT,
        ):
            return None
        names = ("deaths", "names", "second_rows", "minute_rows")
        numbers = [int(head[name][0]) for name in names]
        if not (0 < numbers[0] <= 1 << 16 and 0 < numbers[1] <= 1 << 18):
            return None
        return None if max(numbers[2:]) > _MOST_ROWS else cls(*numbers)


# ---- check words ----


def _sums(records: Array) -> npt.NDArray[np.uint64]:
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), -1)[:, :-1]
    # an odd factor for each word, so that a change of any one word changes the sum
    factors = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found: npt.NDArray[np.uint64] = (words * (factors | np.uint64(1))).sum(axis=1, dtype=np.uint64)
    return found + np.uint64(0xA0761D6478BD642F)  # so that zeros are no record


def seal(records: Array) -> Array:
    """Set the check words of some records, and return them."""
    records["check"] = _sums(records)
    return records


def intact(records: Array) -> npt.NDArray[np.bool_]:
    """For each record whether its check word is right."""
    found: npt.NDArray[np.bool_] = records["check"] == _sums(records)
    return found


# ---- short numbers ----


def shorten(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """Numbers from 0 to 2^42 in 16 bits each: exact below 2048, above that rounded down by less
    than 0.1 %."""
    numbers = np.clip(numbers, 0, (1 << 42) - 1)
    shift = np.maximum(np.frexp(numbers.astype(np.float64))[1] - 11, 0).astype(np.int64)
    short: npt.NDArray[np.uint16] = (shift << 11 | numbers >> shift).astype(np.uint16)
    return short


def lengthen(short: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
    """The numbers that `shorten` was given, up to its rounding."""
    wide = short.astype(np.int64)
    return (wide & 0x7FF) << (wide >> 11)


# ---- the segment ----


class Chronicle:
    """An open chronicle. It is a context manager; it closes its descriptor."""

    def __init__(self, fd: int, plan: Plan) -> None:
        """fd: of the segment; it belongs to this object now."""
        self._fd = fd
        self.plan = plan

    def read(self, region: str, first: int = 0, count: int | None = None) -> Array:
        """A copy of records of a region: all, or `count` from `first` on. Missing bytes
        are zeros."""
        at, most, kind = self.plan.regions[region]
        count = most if count is None else count
        size = count * kind.itemsize
        raw = bytearray(size)
        with contextlib.suppress(OSError), memoryview(raw) as view:
            os.preadv(self._fd, [view], at + first * kind.itemsize)
        return np.frombuffer(raw, kind)

    def write(self, region: str, place: int, record: Array) -> None:
        """Write one record (an array of one) with its check word. Raises OSError if /dev/shm is
        full."""
        at, count, kind = self.plan.regions[region]
        data = seal(record).tobytes()
        os.pwrite(self._fd, data, at + place % count * kind.itemsize)

    def blank(self, region: str) -> Array:
        """An array of one empty record of a region."""
        return np.zeros(1, self.plan.regions[region][2])

    def close(self) -> None:
        """Close the descriptor."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_readonly(instance: str | None = None, owner: str | int | None = None) -> Chronicle:
    """Open an instance's chronicle for reading; it needs no supervisor.

    owner: a further user (name or uid) who may have created it; None: SHMQ_OWNER. Raises NotRunning
    if there is no such instance, Gone if it keeps no history, LayoutMismatch if the segment is
    damaged or another release's, and ShmqError if this user has no permission or another user
    created it.
    """
    instance = instance or shm.default_instance()
    try:
        fd = shm.open_history(instance, owner)
    except FileNotFoundError:
        if not os.path.lexists(shm.directory_path(instance)):
            raise shm.not_running(instance) from None
        raise Gone(
            f"instance {instance!r} keeps no history: give its supervisor --history-bytes "
            f"(at least {shm.LEAST_HISTORY})"
        ) from None
    plan = Plan.read(os.pread(fd, _HEAD.itemsize, 0))
    if plan is None:
        os.close(fd)
        raise LayoutMismatch(
            f"the history of instance {instance!r}: damaged, or of another release; its next "
            "supervisor begins a new one"
        )
    return Chronicle(fd, plan)


def read_names(source: Chronicle) -> dict[int, tuple[Key, int]]:
    """Serial of a queue (its low 32 bits) -> its names, and the place of the record."""
    table = source.read("names")
    found = {}
    for place in np.flatnonzero(intact(table) & (table["serial"] != 0)).tolist():
        row = table[place]
        topic = bytes(row["topic"]).decode("ascii", "replace")
        channel = bytes(row["channel"]).decode("ascii", "replace")
        key = topic, channel if row["is_channel"] else None
        found[int(row["serial"]) & 0xFFFFFFFF] = key, place
    return found


def open_or_make(instance: str, budget: int, mode: int, group: int) -> Chronicle:
    """Open an instance's chronicle for its supervisor; one that is no chronicle of this size is
    replaced.

    mode, group: as of the other segments; but only the owner may write a chronicle. Raises OSError
    if /dev/shm is full, and ShmqError if another user has the name.
    """
    plan = Plan.of(budget)
    name, mode = shm.history_name(instance), mode & 0o744
    with contextlib.suppress(OSError, NotTrusted):
        fd = shm.open_segment(name, owners=shm.own())
        if Plan.read(os.pread(fd, _HEAD.itemsize, 0)) == plan:
            try:
                shm.set_permissions(fd, shm.path_of(name), mode, group)
                if os.fstat(fd).st_size != plan.size:
                    os.ftruncate(fd, plan.size)
            except BaseException:
                os.close(fd)
                raise
            return Chronicle(fd, plan)
        os.close(fd)
    shm.unlink_segment(name)
    fd = shm.create_segment(name, mode, group)
    try:
        os.ftruncate(fd, plan.size)
        at, count, kind = plan.regions["deaths"]
        os.posix_fallocate(fd, 0, at + count * kind.itemsize)  # deaths come when memory is short
        os.pwrite(fd, plan.head().tobytes(), 0)
    except BaseException:
        os.close(fd)
        shm.unlink_segment(name)
        raise
    return Chronicle(fd, plan)
