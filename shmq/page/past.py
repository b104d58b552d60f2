"""The history of an instance and its log of deaths, for the page."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shmq import chronicle, deaths, history
from shmq.history import Key, Period, Series

#: Names of the series that the page draws: those of a row of `snapshot`, and `oldest` in seconds.
_RATES: Final = {
    "in": "published",
    "out": "delivered",
    "finished": "finished",
    "requeued": "redelivered",
    "dead": "dead_lettered",
}
_LENGTHS: Final = {"second": 1, "minute": 60}
_GAUGES: Final = {
    "ready": "ready",
    "disk": "on_disk",
    "in_flight": "in_flight",
    "deferred": "deferred",
    "leased": "leased",
}


def series(
    instance: str, owner: str | int | None, period: str, key: Key | None, since: float
) -> dict[str, Any]:
    """The recorded series of all channels together, or of one (`key`), each a list.

    period: "second" for the last hour, "minute" for the last day. since: only what was recorded
    after this time. Times are seconds since 1970. Where records are missing all but the time is
    null, once for each gap. Raises ValueError for another period, and what `history.read` raises.
    """
    if period not in ("second", "minute"):
        raise ValueError(f"period is second or minute, not {period!r}")
    kind: Period = "second" if period == "second" else "minute"
    found = history.read(instance, kind, since=int(since * 1e9), only=key, owner=owner)
    chosen = found.totals if key is None else found.channels.get(key)
    return {"time": []} if chosen is None else _columns(chosen, _LENGTHS[kind], since)


def _columns(found: Series, length: int, since: float) -> dict[str, Any]:
    """length: seconds from one record to the next."""
    time = found.time / 1e9
    before = np.concatenate(([since] if since else time[:1], time[:-1]))[: len(time)]
    gaps = np.flatnonzero(time - before > 1.5 * length)
    columns = {
        **{name: found.rate(column).round(1) for name, column in _RATES.items()},
        **{name: getattr(found, column).astype(np.float64) for name, column in _GAUGES.items()},
        "oldest": np.nan_to_num(found.oldest).round(3),
    }
    return {
        "time": np.insert(time, gaps, before[gaps] + length).round(3).tolist(),
        **{name: _with_gaps(column, gaps) for name, column in columns.items()},
    }


def _with_gaps(column: NDArray[np.float64], gaps: NDArray[np.int64]) -> list[float | None]:
    found = np.insert(column, gaps, np.nan).tolist()
    return [None if math.isnan(value) else value for value in found]


def last_deaths(instance: str, owner: str | int | None) -> list[dict[str, Any]]:
    """The last deaths, the newest first, with `time` in ms since 1970. Raises what `deaths.read`
    raises."""
    with chronicle.open_readonly(instance, owner) as source:
        found = deaths.read_from(source)
    return [{**death.to_json(), "time": death.time // 10**6} for death in reversed(found)]
