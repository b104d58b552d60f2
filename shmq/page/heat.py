"""Heat maps of a channel: how long its messages waited and were processed, over time.

The core only counts. While somebody looks at a channel, the differences of its counts between two
looks are kept, in columns of some seconds; nothing is recorded while nobody looks. The memory is
bounded: a number of channels, those looked at last, and a number of columns for each.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shmq import layout
from shmq.views import QueueView

#: Seconds of a column.
WIDTH: Final = 5
#: Columns that are kept of a channel: 15 minutes.
COLUMNS: Final = 180
#: Channels that are kept.
_CHANNELS: Final = 16
#: After so many seconds without a look, counts cannot be given to a column any more.
_GAP: Final = 2 * WIDTH

_MODULUS: Final = 1 << 32


def bounds() -> list[float]:
    """The upper bounds of all buckets in ms but for the last, which has none."""
    count, first = layout.constant("PARTS_BUCKETS"), layout.constant("PARTS_FIRST")
    place = np.arange(count - 1)
    upper = 2.0 ** (first + place // 2) * (1 + (place % 2 + 1) / 2)
    found: list[float] = (np.concatenate(([2.0**first], upper)) / 1e6).round(3).tolist()
    return found


def counts(view: QueueView) -> NDArray[np.int64]:
    """(2, buckets): the messages that were finished, by their wait and by their processing, modulo
    2^32. The first bucket has those that took less than the clock of a take can tell.

    Where the processing was as short as that, the wait is all the time from publish to finish.
    """
    taken = view.latency.copy()
    count, first = layout.constant("PARTS_BUCKETS"), layout.constant("PARTS_FIRST")
    # four buckets of the whole time are one of its parts
    begin = 1 + (first - layout.constant("LATENCY_FIRST")) * 8
    whole = taken["total"]["buckets"].astype(np.int64)[begin:]
    all_time = np.add.reduceat(whole, np.arange(0, 4 * count, 4))
    held, wait, processing = (
        taken[name].astype(np.int64) for name in ("held_total", "held_wait", "processing")
    )
    parts = np.stack((all_time - held + wait, processing))
    short = int(taken["total"]["count"]) - parts.sum(axis=1, keepdims=True)
    return np.concatenate((short, parts), axis=1) % _MODULUS


@dataclass
class _Column:
    """Messages that were finished from `begin` to `begin` + WIDTH. begin: seconds since 1970."""

    begin: int
    messages: NDArray[np.int64]
    number: int
    """Rises with each change, so that a browser asks only for what it has not seen."""


@dataclass
class _Watched:
    """A channel that somebody looks at."""

    before: NDArray[np.int64]
    when: float
    columns: deque[_Column] = field(default_factory=lambda: deque(maxlen=COLUMNS))


class HeatMaps:
    """The heat maps of the channels that browsers look at. Not for several threads at once."""

    def __init__(self) -> None:
        self._watched: OrderedDict[int, _Watched] = OrderedDict()
        self._number = 0

    def look(self, view: QueueView, since: int, now: float) -> dict[str, Any]:
        """Look at a channel. Returns the columns that changed after the look with number `since`
        (0: all), each as [begin, waits, processing times], and this look's number.

        now: seconds since 1970.
        """
        serial, found = int(view.header["segment"]["serial"]), counts(view)
        watched = self._watched.get(serial)
        if watched is None or not 0 <= now - watched.when <= _GAP:
            columns = watched.columns if watched else deque(maxlen=COLUMNS)
            self._watched[serial] = _Watched(found, now, columns)
        else:
            self._add(watched, found, now)
        self._watched.move_to_end(serial)
        while len(self._watched) > _CHANNELS:
            self._watched.popitem(last=False)
        return {
            "number": self._number,
            "width": WIDTH,
            "columns": [
                [column.begin, *column.messages.tolist()]
                for column in self._watched[serial].columns
                if column.number > since
            ],
        }

    def _add(self, watched: _Watched, found: NDArray[np.int64], now: float) -> None:
        passed = (found - watched.before) % _MODULUS
        passed[passed > _MODULUS // 2] = 0  # the counts of a message were read one without another
        begin = int(now) // WIDTH * WIDTH
        if not watched.columns or watched.columns[-1].begin != begin:
            watched.columns.append(_Column(begin, np.zeros_like(passed), 0))
        self._number += 1
        watched.columns[-1].messages += passed
        watched.columns[-1].number = self._number
        watched.before, watched.when = found, now
