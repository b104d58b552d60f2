"""The history of an instance: one hour by the second, 24 hours by the minute.

The supervisor records it; reading needs no supervisor and only the right to read. The totals of all
channels are always there. Single channels are there too: in each second and each minute the busiest
ones, so the series of a channel may have gaps.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from shmq import chronicle
from shmq.chronicle import COLUMNS, COUNTERS, Chronicle
from shmq.layout import Array

Key = chronicle.Key

Period = Literal["second", "minute"]

#: Period -> its region, its length in ns, and for how many of them records are kept.
_PERIODS: Final = {"second": ("seconds", 10**9, 3600), "minute": ("minutes", 60 * 10**9, 1440)}


@dataclass(frozen=True)
class Series:
    """Columns of equal length, the oldest record first. A record is missing for a time in which no
    supervisor ran, or this channel was none of the busiest."""

    time: NDArray[np.int64]
    """End of each record's time, CLOCK_REALTIME ns."""
    span: NDArray[np.float64]
    """Seconds that each record counts."""
    published: NDArray[np.int64]
    """Messages that entered in this time; of the totals, once for each channel."""
    delivered: NDArray[np.int64]
    """Deliveries, also of messages that were delivered before."""
    finished: NDArray[np.int64]
    """Messages finished."""
    requeued: NDArray[np.int64]
    """Messages that consumers gave back."""
    timed_out: NDArray[np.int64]
    """Deliveries whose time was over."""
    returned: NDArray[np.int64]
    """Deliveries taken back from consumers that died or closed."""
    expired: NDArray[np.int64]
    """Messages whose time to live was over."""
    dead_lettered: NDArray[np.int64]
    """Messages moved to a dead topic."""
    dropped: NDArray[np.int64]
    """Messages that a full channel did not take or no longer kept."""
    ready: NDArray[np.int64]
    """Messages that waited in memory at the end of this time; so are those below."""
    in_flight: NDArray[np.int64]
    """Messages that consumers held."""
    deferred: NDArray[np.int64]
    """Messages that were due later."""
    leased: NDArray[np.int64]
    """Messages in leases."""
    on_disk: NDArray[np.int64]
    """Messages that waited on disk."""
    oldest: NDArray[np.float64]
    """Age of the longest waiting message in memory in seconds; NaN if none waited."""
    memory: NDArray[np.int64]
    """Bytes of shared memory."""
    consumers: NDArray[np.int64]
    """Consumers."""

    def __len__(self) -> int:
        return len(self.time)

    @property
    def redelivered(self) -> NDArray[np.int64]:
        """Deliveries that ended without a finish: requeued, timed out or returned."""
        return self.requeued + self.timed_out + self.returned

    @property
    def depth(self) -> NDArray[np.int64]:
        """Messages that waited, in memory and on disk."""
        return self.ready + self.on_disk

    def rate(self, column: str) -> NDArray[np.float64]:
        """Return what a counter counted per second. column: one of `COUNTERS` or `redelivered`,
        else raises KeyError."""
        if column not in (*COUNTERS, "redelivered"):
            raise KeyError(column)
        counted = getattr(self, column).astype(np.float64)
        found: NDArray[np.float64] = np.divide(
            counted, self.span, out=np.zeros_like(counted), where=self.span > 0
        )
        return found


@dataclass(frozen=True)
class History:
    """A part of the history: the totals of all channels, and the series of single ones."""

    totals: Series
    channels: dict[Key, Series] = field(default_factory=dict)
    queues: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """How many channels and backlogs there were; a row for each of the totals."""


def read(
    instance: str | None = None,
    period: Period = "second",
    *,
    since: int = 0,
    only: Key | None = None,
    owner: str | int | None = None,
) -> History:
    """Read the history of an instance (None: the default one).

    period: "second" for the last hour, "minute" for the last 24. since: only records later than
    this (CLOCK_REALTIME ns), so that a reader that looks every second reads only what is new.
    only: the one channel whose series is wanted beside the totals; None: all.
    Raises what `chronicle.open_readonly` raises.
    """
    with chronicle.open_readonly(instance, owner) as source:
        return read_from(source, period, since=since, only=only)


def read_from(
    source: Chronicle, period: Period = "second", *, since: int = 0, only: Key | None = None
) -> History:
    """Read the history from an open chronicle, as `read`."""
    records = _records(source, period, since, time.time_ns())
    totals = _series(records, records["totals"].astype(np.int64))
    entered = chronicle.read_names(source).items()
    names = {serial: key for serial, (key, _) in entered if only in (None, key)}
    channels = {}
    serials = records["serials"]
    found: dict[Key, list[NDArray[np.int64]]] = {}
    present = names if only is not None else np.unique(serials[serials != 0]).tolist()
    for serial in present:
        if serial in names:
            found.setdefault(names[serial], []).append(np.argwhere(serials == serial))
    for key, places in found.items():  # a channel that was made again has another serial
        rows, columns = np.concatenate(places).T
        if not len(rows):
            continue
        order = np.argsort(rows, kind="stable")
        rows, columns = rows[order], columns[order]
        short = records["rows"][rows, columns]
        channels[key] = _series(records[rows], chronicle.lengthen(short))
    return History(totals, channels, records["queues"].astype(np.int64))


def _records(source: Chronicle, period: Period, since: int, now: int) -> Array:
    """The intact records of the period's window, the oldest first."""
    region, length, most = _PERIODS[period]
    last = now // length
    first = max(last - most + 1, min(max(since, 0) // length, last))
    parts = []
    if first % most <= last % most:
        parts.append(source.read(region, first % most, last % most - first % most + 1))
    else:
        parts.append(source.read(region, first % most, most - first % most))
        parts.append(source.read(region, 0, last % most + 1))
    records = np.concatenate(parts)
    when = records["time"]
    # the place shows a record of an hour before, or of a time that the clock has gone back from
    good = chronicle.intact(records) & (when // length == np.arange(first, last + 1))
    found: Array = records[good & (when > since)]
    return found


def _series(records: Array, numbers: NDArray[np.int64]) -> Series:
    columns = dict(zip(COLUMNS, numbers.T, strict=True))
    oldest = columns.pop("oldest")
    memory = columns.pop("memory")
    return Series(
        time=records["time"].astype(np.int64),
        span=records["span"].astype(np.float64),
        oldest=np.where(oldest > 0, (oldest - 1) / 1000, np.nan),
        memory=memory * 1024,
        **columns,
    )
