"""`shmq stat --lookupd` and `--nsqd`: one table of the channels of several hosts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import click

from shmq.cli.output import format_rows, painted, patience, print_json
from shmq.cli.stat_page import Frame, print_each, show_all
from shmq.cli.stat_table import fitted, flow, title_style
from shmq.cli.status import DEGRADED, NOT_RUNNING, OK
from shmq.diagnostics import fleet
from shmq.diagnostics.fleet import Counts, Fleet, Host, Name
from shmq.printing import printable

#: Columns with rates from the second look on, and their counters.
_RATES: Final = {"IN": "message_count", "REQ": "requeue_count", "TMO": "timeout_count"}
#: Lines above the table of a whole screen that tell of hosts.
_MOST_TROUBLES: Final = 8

Number = Callable[[int], str]


@dataclass(frozen=True)
class Row:
    """A channel on a host, or on all hosts that have it together."""

    name: Name
    host: str
    counts: Counts
    rates: dict[str, float] | None = None
    """Rates of the counters of `_RATES`, in messages per second; None at the first look."""

    @property
    def title(self) -> str:
        """The name, as the table shows it."""
        topic, channel = self.name
        name = f"{topic} (backlog)" if channel is None else f"{topic}/{channel}"
        return printable(name) + (" (paused)" if self.counts.paused else "")

    def count(self, counter: str) -> float:
        """The rate of a counter, or its total at the first look."""
        total: int = getattr(self.counts, counter)
        return total if self.rates is None else self.rates[counter]


@dataclass(frozen=True)
class Group:
    """A channel. parts: a row for each host that has it."""

    parts: list[Row]

    @functools.cached_property
    def total(self) -> Row:
        """Return the row of all hosts together, or that of the only one."""
        if len(self.parts) == 1:
            return self.parts[0]
        rates = None
        if any(part.rates is not None for part in self.parts):
            rates = {
                counter: sum((part.rates or {}).get(counter, 0.0) for part in self.parts)
                for counter in _RATES.values()
            }
        counts = Counts.total(part.counts for part in self.parts)
        return Row(self.parts[0].name, f"{len(self.parts)} hosts", counts, rates)


#: Sort keys of the table: columns that nsqd's statistics have. Numbers sort with the largest first.
SORT: Final[dict[str, Callable[[Row], Any]]] = {
    "name": lambda row: (row.name[0], row.name[1] or ""),
    "depth": lambda row: -row.counts.depth,
    "ready": lambda row: row.counts.backend_depth - row.counts.depth,
    "disk": lambda row: -row.counts.backend_depth,
    "inflt": lambda row: -row.counts.in_flight_count,
    "defer": lambda row: -row.counts.deferred_count,
    "in": lambda row: -row.count("message_count"),
    "req": lambda row: -row.count("requeue_count"),
    "tmo": lambda row: -row.count("timeout_count"),
    "clients": lambda row: -row.counts.client_count,
}


@dataclass(frozen=True)
class FleetLook:
    """The hosts at a moment. cost: seconds of the processor that the look took."""

    taken: Fleet
    groups: list[Group]
    with_rates: bool
    cost: float

    keys = tuple(SORT)
    is_by_row = True

    @property
    def status(self) -> int:
        """Of the command."""
        if not self.taken.answered:
            return NOT_RUNNING
        return DEGRADED if self.taken.trouble else OK

    def rows(self, sort: str) -> list[Row]:
        """Return the sums in order, each with the hosts' rows below it."""
        found = []
        for group in sorted(self.groups, key=lambda group: SORT[sort](group.total)):
            found += [group.total, *group.parts] if len(group.parts) > 1 else group.parts
        return found

    def above(self, frame: Frame) -> list[str]:
        """Return the lines above the table: the hosts, and a line for each that needs a look."""
        wide = frame.columns or sys.maxsize
        count, answered = len(self.taken.hosts), len(self.taken.answered)
        hosts = f"hosts {count}" if count == answered else f"hosts {answered} of {count}"
        parts = [time.strftime("%H:%M:%S"), hosts]
        parts += [f"nsqlookupd {one.address}" for one in self.taken.lookupds]
        found = self.taken.trouble
        if frame.is_full and len(found) > _MOST_TROUBLES:  # leave room for the table
            found[_MOST_TROUBLES:] = [f"and {len(found) - _MOST_TROUBLES} more: --json has all"]
        troubles = [part for text in found for part in textwrap.wrap(text, wide)]
        return [*flow(parts, wide), *(painted(text, fg="red") for text in troubles)]

    def table(self, rows: list[Row], frame: Frame) -> list[str]:
        """Return the lines of the table."""
        unit = "/s" if self.with_rates else ""
        titles = ["TOPIC/CHANNEL", "HOST", "DEPTH", "READY", "DISK", "INFLT", "DEFER"]
        titles += [*(f"{title}{unit}" for title in _RATES), "CLIENTS"]

        def rows_with(number: Number) -> list[list[str]]:
            return [_cells(row, number) for row in rows]

        def style(title: str, row: int | None, text: str) -> str:
            if row is None:
                return title_style(title, text, frame.sort)
            return painted(text, bold=True) if rows[row].host.endswith(" hosts") else text

        titles, cells = fitted(titles, rows_with, frame.columns)
        return format_rows(titles, cells, style=style)

    def print_json(self, sort: str) -> None:
        """Print the look as an object, with nsqd's names."""
        topics: dict[str, list[dict[str, Any]]] = {}
        groups = sorted(self.groups, key=lambda group: SORT[sort](group.total))
        for group in groups:
            (topic, channel), total = group.total.name, group.total
            document: dict[str, Any] = {"channel_name": channel, **_document(total)}
            document["hosts"] = [{"host": part.host, **_document(part)} for part in group.parts]
            topics.setdefault(topic, []).append(document)
        hosts = [
            {"host": host.address, "error": host.error, "health": host.health}
            | {"version": host.version, "start_time": host.start_time}
            for host in self.taken.hosts
        ]
        print_json(
            {
                "time": time.time(),
                "hosts": hosts,
                "lookupds": [
                    {"lookupd": one.address, "error": one.error, "hosts": list(one.hosts)}
                    for one in self.taken.lookupds
                ],
                "topics": [
                    {"topic_name": topic, "channels": channels}
                    for topic, channels in topics.items()
                ],
            }
        )


def _document(row: Row) -> dict[str, Any]:
    return asdict(row.counts) | ({} if row.rates is None else {"rates": row.rates})


def _cells(row: Row, number: Number) -> list[str]:
    counts = row.counts
    return [
        row.title,
        row.host,
        number(counts.depth),
        number(counts.depth - counts.backend_depth),
        number(counts.backend_depth),
        number(counts.in_flight_count),
        number(counts.deferred_count),
        *(number(round(row.count(counter))) for counter in _RATES.values()),
        number(counts.client_count),
    ]


@dataclass(frozen=True)
class Chosen:
    """Values of the options. lookupds, nsqds: addresses. tokens: of `fleet.survey`."""

    lookupds: list[str]
    nsqds: list[str]
    topic: str | None
    channel: str | None
    interval: float | None
    count: int | None
    sort: str
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)


def run(chosen: Chosen, as_json: bool) -> int:
    """Show the hosts. Returns the exit status."""
    if chosen.sort not in SORT:
        raise click.UsageError(
            f"nsqd's statistics have no {chosen.sort}: --sort with --lookupd or --nsqd is one of "
            f"{', '.join(SORT)}"
        )
    looks = _looks(chosen)
    if not as_json:
        return show_all(looks, chosen.sort, chosen.interval, chosen.count)
    return print_each(
        looks, lambda look: look.print_json(chosen.sort), chosen.interval, chosen.count
    )


def _looks(chosen: Chosen) -> Iterator[FleetLook]:
    """Looks at the hosts, one at each `next`. A host that was there is asked again, because
    nsqlookupd forgets one as soon as its connection ends."""
    before: dict[str, Host] = {}
    known = {*chosen.nsqds}
    for number in itertools.count():
        began = time.process_time()
        with patience("asking the hosts") if number == 0 else contextlib.nullcontext():
            taken = fleet.survey(chosen.lookupds, sorted(known), chosen.topic, tokens=chosen.tokens)
        groups = []
        for name, parts in taken.by_name():
            if chosen.topic in (None, name[0]) and chosen.channel in (None, name[1]):
                rows = [_row(name, host, counts, before) for host, counts in parts]
                groups.append(Group(rows))
        before = {host.address: host for host in taken.answered}
        known.update(before)
        with_rates = chosen.interval is not None and number > 0
        yield FleetLook(taken, groups, with_rates, time.process_time() - began)


def _row(name: Name, host: Host, counts: Counts, before: dict[str, Host]) -> Row:
    """A row with rates, if this host's counters go on from the look before."""
    rates = None
    earlier = before.get(host.address)
    if earlier is not None and earlier.start_time == host.start_time and name in earlier.counts:
        steps = {
            counter: getattr(counts, counter) - getattr(earlier.counts[name], counter)
            for counter in _RATES.values()
        }
        if min(steps.values()) >= 0:  # a deleted channel that was created again begins at zero
            elapsed = host.taken_at - earlier.taken_at
            rates = {counter: step / elapsed for counter, step in steps.items()}
    return Row(name, host.address, counts, rates)
