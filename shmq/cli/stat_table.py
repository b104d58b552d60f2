"""The text of `shmq stat`: a headline, the last minute of all channels together, and a table."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
import numpy as np

from shmq import history
from shmq.cli.output import command_name, format_rows, painted, shorten
from shmq.cli.stat_screen import sparkline
from shmq.diagnostics.readable import age
from shmq.errors import ShmqError
from shmq.history import History
from shmq.printing import printable
from shmq.stats import BrokerStats, ChannelStats, TopicStats

COUNTERS: Final = ("message_count", "delivered", "finished", "requeue_count", "timeout_count")
#: Titles of `COUNTERS`, which are rates from the second look on.
_RATES: Final = ("IN", "OUT", "FIN", "REQ", "TMO")
#: Columns that a narrow terminal does not show, in the order in which they are dropped.
_DROPPED: Final = (
    *("LAST MINUTE", "LEASED", "P50", "READY", "TMO", "P99", "MEMORY", "REQ", "DEFER", "OUT"),
    *("DEAD", "FIN", "OLDEST", "IN"),
)
_SPACE: Final = "  "
_MINUTE: Final = 60 * 10**9
_SPARK_WIDTH: Final = 15

#: Ages of the oldest message, in seconds, from which it is yellow and red.
_OLD, _TOO_OLD = 60, 300

Style = Callable[[str, int | None, str], str]


@dataclass(frozen=True)
class Line:
    """A row of the table: a queue at one moment."""

    topic: TopicStats
    queue: ChannelStats
    rates: list[float] | None = None
    """Rates of the counters, in messages per second; None at the first look."""

    @property
    def name(self) -> str:
        if self.queue.name is None:
            return printable(f"{self.topic.name} (backlog)")
        return printable(f"{self.topic.name}/{self.queue.name}")

    @property
    def counters(self) -> tuple[int, ...]:
        return tuple(getattr(self.queue, name) for name in COUNTERS)

    @property
    def is_paused(self) -> bool:
        return self.queue.paused or self.topic.paused

    def count(self, which: int) -> float:
        """The rate of a counter, or its total at the first look."""
        return self.rates[which] if self.rates is not None else self.counters[which]


#: Sort keys of the table. Numbers sort with the largest first.
SORT: dict[str, Callable[[Line], Any]] = {
    "name": lambda line: (line.topic.name, line.queue.name or ""),
    "depth": lambda line: -line.queue.depth,
    "ready": lambda line: line.queue.backend_depth - line.queue.depth,
    "disk": lambda line: -line.queue.backend_depth,
    "inflt": lambda line: -line.queue.in_flight,
    "leased": lambda line: -line.queue.leased,
    "defer": lambda line: -line.queue.deferred,
    "oldest": lambda line: -(line.queue.oldest_age or 0),
    "in": lambda line: -line.count(0),
    "out": lambda line: -line.count(1),
    "fin": lambda line: -line.count(2),
    "req": lambda line: -line.count(3),
    "tmo": lambda line: -line.count(4),
    "dead": lambda line: -line.queue.dead_lettered,
    "p50": lambda line: -(line.queue.latency.percentile(0.5) or 0),
    "p99": lambda line: -(line.queue.latency.percentile(0.99) or 0),
    "clients": lambda line: -len(line.queue.sessions),
    "memory": lambda line: -line.queue.memory_bytes,
}


@dataclass(frozen=True)
class View:
    """How the table is shown. columns: width of the terminal; None: no limit."""

    columns: int | None
    with_rates: bool = False
    sort: str = "name"
    past: History | None = None
    """The last minute, for sparklines."""


def queue_table(taken: BrokerStats, lines: list[Line], view: View) -> list[str]:
    """A table with a line for each queue; its title is the first line."""
    unit = "/s" if view.with_rates else ""
    titles = ["TOPIC/CHANNEL", "DEPTH", "READY", "DISK", "INFLT", "LEASED", "DEFER", "OLDEST"]
    titles += [f"{name}{unit}" for name in _RATES]
    titles += ["DEAD", "P50", "P99", "CLIENTS", "MEMORY"]
    if view.past is not None:
        titles.append("LAST MINUTE")
    titles, rows = fitted(
        titles, lambda number: [_row(line, view, number) for line in lines], view.columns
    )
    found = format_rows(titles, rows, style=_style(lines, view.sort))
    idle = [item.name for item in taken.topics if not item.channels and item.backlog is None]
    if idle and not lines:
        text = f"topics without a channel or messages: {printable(', '.join(idle))}"
        found += textwrap.wrap(text, view.columns or sys.maxsize)
    return found


def fitted(
    titles: list[str],
    rows_with: Callable[[Callable[[int], str]], list[list[str]]],
    columns: int | None,
) -> tuple[list[str], list[list[str]]]:
    """Titles and rows that fit: with whole numbers, with short ones, or without some columns.
    rows_with: returns the rows, with numbers as a function writes them."""
    wide = columns or sys.maxsize
    for number in (str, _short):
        rows = rows_with(number)
        if _width(titles, rows) <= wide:
            return titles, rows
    return _narrow(titles, rows, wide)


def _row(line: Line, view: View, number: Callable[[int], str]) -> list[str]:
    queue = line.queue
    counts: Sequence[float] = line.counters
    if view.with_rates:
        counts = line.rates or [0.0] * len(COUNTERS)
    latencies = [queue.latency.percentile(share) for share in (0.5, 0.99)]
    return [
        line.name + (" (paused)" if line.is_paused else ""),
        number(queue.depth),
        number(queue.depth - queue.backend_depth),
        number(queue.backend_depth),
        number(queue.in_flight),
        number(queue.leased),
        number(queue.deferred),
        "-" if queue.oldest_age is None else age(queue.oldest_age),
        *(number(round(count)) for count in counts),
        number(queue.dead_lettered),
        *("-" if seconds is None else age(seconds) for seconds in latencies),
        str(len(queue.sessions)),
        _bytes(queue.memory_bytes),
        *([] if view.past is None else [_minute_of(line, view.past)]),
    ]


def _minute_of(line: Line, past: History) -> str:
    """The messages that waited in a channel, of which the history may have gaps."""
    series = past.channels.get((line.topic.name, line.queue.name))
    return "" if series is None else sparkline(series.depth.tolist(), _SPARK_WIDTH)


def _style(lines: list[Line], sort: str) -> Style:
    """Colours of the table's cells: what needs a look is yellow, and red if it is bad."""

    def style(title: str, row: int | None, text: str) -> str:
        if row is None:
            return title_style(title, text, sort)
        color = _color(title.removesuffix("/s"), lines[row])
        return text if color is None else painted(text, fg=color)

    return style


def title_style(title: str, text: str, sort: str) -> str:
    """How a title looks, in reverse if the table is sorted by it."""
    key = "name" if title == "TOPIC/CHANNEL" else title.removesuffix("/s").lower()
    return painted(text, bold=True, reverse=key == sort or None)


def _color(title: str, line: Line) -> str | None:
    queue = line.queue
    if title == "LAST MINUTE":
        return "cyan"
    if title == "DEAD" and queue.dead_lettered:
        return "red"
    if title == "OLDEST" and (queue.oldest_age or 0) >= _OLD:
        return "red" if (queue.oldest_age or 0) >= _TOO_OLD else "yellow"
    worrying = (
        (title == "TOPIC/CHANNEL" and line.is_paused)
        or (title == "CLIENTS" and queue.depth and not queue.sessions)
        or (title == "DISK" and queue.backend_depth)
        or (title == "TMO" and line.count(_RATES.index("TMO")))
    )
    return "yellow" if worrying else None


def _short(number: int) -> str:
    """A count in at most six characters."""
    for unit in ("", "k", "M", "G"):
        if number < 99_999.5 or unit == "G":
            break
        number = round(number / 1000)
    return f"{number}{unit}"


def _bytes(number: float) -> str:
    """A number of bytes in at most five characters."""
    for unit in ("B", "K", "M", "G"):
        if number < 9999.5 or unit == "G":
            break
        number /= 1024
    return f"{number:.0f}{unit}"


def _width(titles: list[str], rows: list[list[str]]) -> int:
    columns = zip(titles, *rows, strict=True)
    return sum(max(map(len, column)) for column in columns) + len(_SPACE) * (len(titles) - 1)


def _narrow(
    titles: list[str], rows: list[list[str]], columns: int
) -> tuple[list[str], list[list[str]]]:
    """The table in at most `columns` columns: first columns are dropped, then names are cut in the
    middle."""
    cells = list(zip(titles, *rows, strict=True))
    name, others = cells[0], cells[1:]
    wanted = min(max(map(len, name)), columns * 2 // 5)

    def room() -> int:
        return columns - sum(len(_SPACE) + max(map(len, column)) for column in others)

    for title in _DROPPED:
        if room() >= wanted:
            break
        others = [column for column in others if column[0].removesuffix("/s") != title]
    name = tuple(shorten(text, max(room(), len("TOPIC/CHANNEL"))) for text in name)
    first, *rest = zip(name, *others, strict=True)
    return list(first), [list(row) for row in rest]


def client_table(taken: BrokerStats, lines: list[Line], columns: int | None) -> list[str]:
    """A table with a line for each consumer."""
    now, rows = time.time_ns(), []
    for line in lines:
        for item in line.queue.sessions:
            rows.append(
                [
                    line.name,
                    str(item.client.pid),
                    # no process of another PID namespace can be looked up
                    "" if taken.foreign else command_name(item.client.pid, 16),
                    str(item.in_flight),
                    str(item.max_in_flight),
                    age(max(now - item.since, 0) / 1e9),
                    _short(item.delivered),
                    _short(item.finished),
                    _short(item.requeued),
                    _short(item.timed_out),
                ]
            )
    titles = ["TOPIC/CHANNEL", "PID", "COMMAND", "INFLT", "MAX", "SINCE"]
    titles += ["OUT", "FIN", "REQ", "TMO"]
    if columns is not None and _width(titles, rows) > columns:
        titles, rows = _narrow(titles, rows, columns)
    return format_rows(titles, rows)


# ---- above the table ----


def headline(taken: BrokerStats, columns: int | None) -> list[str]:
    """Supervisor, heartbeat and clients, on as many lines as the width needs; then the troubles."""
    parts = [
        time.strftime("%H:%M:%S"),
        f"instance {taken.instance}",
        f"supervisor pid {taken.supervisor_pid} {_life(taken)}",
        f"heartbeat {age(taken.heartbeat_age)} ago",
        f"epoch {taken.epoch}",
        f"clients {len(taken.clients)}",
    ]
    if taken.stopping:
        parts.append("stopping")
    wide = columns or sys.maxsize
    troubles = [part for text in _troubles(taken) for part in textwrap.wrap(text, wide)]
    return [*flow(parts, wide), *(painted(text, fg="red") for text in troubles)]


def flow(parts: list[str], columns: int) -> list[str]:
    """Parts beside each other, on as many lines as they need."""
    lines = parts[:1]
    for part in parts[1:]:
        if len(click.unstyle(lines[-1])) + len(_SPACE) + len(click.unstyle(part)) <= columns:
            lines[-1] += _SPACE + part
        else:
            lines.append(part)
    return lines


def _life(taken: BrokerStats) -> str:
    if taken.foreign:
        return f"{'alive' if taken.supervisor_alive else 'SILENT'} in another PID namespace"
    return "alive" if taken.supervisor_alive else painted("DEAD", fg="red", bold=True)


def _troubles(taken: BrokerStats) -> list[str]:
    """Troubles of the instance, except a dead supervisor, which the headline shows."""
    found = [printable(text) for text in taken.trouble[0 if taken.supervisor_alive else 1 :]]
    since = taken.disk_trouble_since
    if since is not None and found:
        found[0] += f" (for {age(max(time.time() - since, 0))})"
    return found


def last_minute(instance: str) -> History | None:
    """The history of the last minute; None if the instance keeps none that can be read."""
    try:
        return history.read(instance, since=time.time_ns() - _MINUTE)
    except (ShmqError, OSError):
        return None


def minute_lines(past: History | None, columns: int | None) -> list[str]:
    """The last minute of all channels together, as numbers and sparklines."""
    if past is None or not len(past.totals):
        return []
    totals = past.totals
    oldest = np.nan_to_num(totals.oldest)
    series = {
        "waiting": (totals.depth, _short(int(totals.depth[-1]))),
        **{
            f"{name}/s": (rate, _short(round(rate[-1])))
            for name, rate in (
                ("in", totals.rate("published")),
                ("finished", totals.rate("finished")),
                ("redelivered", totals.rate("redelivered")),
            )
        },
        "oldest": (oldest, age(float(oldest[-1])) if oldest[-1] else "-"),
    }
    parts = [
        f"{name} {now:>6} {painted(sparkline(values.tolist(), _SPARK_WIDTH), fg='cyan')}"
        for name, (values, now) in series.items()
    ]
    return flow(parts, columns or sys.maxsize)
