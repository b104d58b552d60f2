"""`shmq stat`: show the state of an instance. Reads the segments only, and needs no supervisor."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import click
from click.core import ParameterSource

from shmq import prometheus, shm, sources, stats
from shmq.cli.output import patience, print_json
from shmq.cli.parameters import complete_channel, complete_topic, instance_option, json_option
from shmq.cli.stat_screen import Screen
from shmq.cli.stat_table import (
    COUNTERS,
    SORT,
    Line,
    View,
    client_table,
    headline,
    last_minute,
    minute_lines,
    queue_table,
)
from shmq.cli.status import DEGRADED, NOT_RUNNING, OK
from shmq.history import History
from shmq.stats import BrokerStats

#: Most of a core that the looks of --watch may take: with 10 000 channels one takes a second.
_SHARE: Final = 0.2
#: Rates in the documents of --json.
_JSON_RATES: Final = ("message_count", "delivered", "requeue_count", "timeout_count")


@dataclass(frozen=True)
class _Chosen:
    """Values of the options."""

    instance: str
    topic: str | None
    channel: str | None
    clients: bool
    interval: float | None
    count: int | None


@dataclass(frozen=True)
class _Look:
    """An instance at a moment. cost: seconds of the processor that the look took."""

    taken: BrokerStats
    lines: list[Line]
    with_rates: bool
    cost: float

    @property
    def status(self) -> int:
        return DEGRADED if self.taken.trouble else OK


@click.command()
@instance_option
@json_option
@click.option(
    "--prometheus",
    "as_prometheus",
    is_flag=True,
    help="Print Prometheus' text format, for a textfile collector.",
)
@click.option(
    "-i",
    "--watch",
    "interval",
    type=click.FloatRange(0.05),
    is_flag=False,
    flag_value=1.0,
    metavar="SECONDS",
    help="Refresh every SECONDS (default: every second), and show rates and the last minute.",
)
@click.option(
    "-n", "count", type=click.IntRange(1), metavar="COUNT", help="End after COUNT refreshes."
)
@click.option("--topic", metavar="TOPIC", shell_complete=complete_topic, help="Only this topic.")
@click.option(
    "--channel",
    metavar="CHANNEL",
    shell_complete=complete_channel,
    help="Only channels of this name.",
)
@click.option(
    "--sort",
    type=click.Choice(list(SORT)),
    default="name",
    show_default=True,
    metavar="COLUMN",
    help=f"Order of the table: {', '.join(SORT)}.",
)
@click.option("--clients", is_flag=True, help="A line for each consumer and not for each channel.")
def stat(
    instance: str,
    as_json: bool,
    as_prometheus: bool,
    interval: float | None,
    count: int | None,
    topic: str | None,
    channel: str | None,
    sort: str,
    clients: bool,
) -> int:
    """Show what an instance is doing.

    Only reads shared memory: this costs the broker nothing and works while the supervisor is dead.
    The exit status is 4 if the supervisor is dead, the data path cannot be written or /dev/shm is
    full. Counters are totals; with --watch they are rates since the previous refresh. A narrow
    terminal shows fewer columns; a pipe and --json get all. In a terminal --watch takes the whole
    screen: < and > choose the order, the arrows and Page Up and Down scroll, q ends it.
    """
    if not (as_json or as_prometheus) and _nothing_is_named(instance):
        from shmq.cli.instances import print_table
        from shmq.diagnostics.instances import survey_all

        if found := survey_all():
            click.echo(
                f"there is no instance {instance!r}: name one of these (--instance, or "
                "SHMQ_INSTANCE)",
                err=True,
            )
            print_table(found)
            return NOT_RUNNING
    if as_prometheus and (as_json or interval or count):
        raise click.UsageError("--prometheus is one look: leave out --json, --watch and -n")
    chosen = _Chosen(instance, topic, channel, clients, interval, count)
    looks = _looks(chosen)
    if not (as_json or as_prometheus):
        return _show(chosen, looks, sort)
    look = next(looks)
    if as_prometheus:
        click.echo(prometheus.exposition(look.taken, topic, channel), nl=False)
        return look.status
    for number in itertools.count(1):
        _print_json(look, sorted(look.lines, key=SORT[sort]), chosen)
        if number == (count or (None if interval else 1)):
            break
        time.sleep(interval or 1.0)
        look = next(looks)
    return look.status


def _nothing_is_named(instance: str) -> bool:
    """Returns true if no instance was named and the default one does not exist."""
    source = click.get_current_context().get_parameter_source("instance")
    is_default = source in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return is_default and not os.path.exists(shm.directory_path(instance))


# ---- looks ----


def _looks(chosen: _Chosen) -> Iterator[_Look]:
    """Looks at the instance, one at each `next`."""
    before: dict[int, tuple[int, ...]] = {}
    taken_at = 0.0
    for number in itertools.count():
        began = time.process_time()
        # later looks may have the whole screen, where a line of progress would be in the way
        first = patience("reading the shared memory") if number == 0 else contextlib.nullcontext()
        with first, sources.open_readonly(chosen.instance) as source:
            now, elapsed = time.monotonic(), time.monotonic() - taken_at
            taken, taken_at = stats.collect(source), now
        lines = _lines(taken, chosen, before, elapsed)
        before = {line.queue.serial: line.counters for line in lines}
        with_rates = chosen.interval is not None and number > 0
        yield _Look(taken, lines, with_rates, time.process_time() - began)


def _lines(
    taken: BrokerStats, chosen: _Chosen, before: dict[int, tuple[int, ...]], elapsed: float
) -> list[Line]:
    lines = []
    for item in taken.topics:
        if chosen.topic is not None and item.name != chosen.topic:
            continue
        for queue in [*item.channels, *([item.backlog] if item.backlog else [])]:
            if chosen.channel not in (None, queue.name):
                continue
            line, earlier = Line(item, queue), before.get(queue.serial)
            if earlier is not None:
                steps = zip(line.counters, earlier, strict=True)
                line = Line(item, queue, [(new - old) / elapsed for new, old in steps])
            lines.append(line)
    return lines


def _print_json(look: _Look, lines: list[Line], chosen: _Chosen) -> None:
    document = {"time": time.time(), **look.taken.to_json(chosen.topic, chosen.channel)}
    rates = []
    for line in lines:
        if line.rates is not None:
            found = dict(zip(COUNTERS, line.rates, strict=True))
            names = {"topic": line.topic.name, "channel": line.queue.name}
            rates.append(names | {name: found[name] for name in _JSON_RATES})
    print_json({**document, "rates": rates} if rates else document)


# ---- in a terminal ----


def _show(chosen: _Chosen, looks: Iterator[_Look], sort: str) -> int:
    """Print tables, until Ctrl-C or `count` of them."""
    most = chosen.count or (None if chosen.interval else 1)
    look = next(looks)
    with Screen(is_live=chosen.interval is not None) as screen:
        page = _Page(chosen, screen, sort)
        for number in itertools.count(1):
            page.show(look)
            if number == most:
                break
            pause = max(chosen.interval or 1.0, look.cost * (1 / _SHARE - 1))
            if not page.wait(time.monotonic() + pause):
                break
            look = next(looks)
    if screen.is_full and most is not None:
        screen.print(page.whole())  # so that something of it stays
    return look.status


class _Page:
    """The newest look as a table, of which a whole screen shows a part."""

    def __init__(self, chosen: _Chosen, screen: Screen, sort: str) -> None:
        self._chosen, self._screen, self._sort = chosen, screen, sort
        self._first = 0  # row at the top
        self._room = self._count = 0  # rows that there is room for; all rows
        self._look: _Look | None = None
        self._past: History | None = None

    def show(self, look: _Look) -> None:
        """Show another look."""
        self._look = look
        self._past = last_minute(self._chosen.instance) if self._screen.is_full else None
        if self._screen.is_full:
            self._draw()
        else:
            self._screen.show(self.whole())

    def whole(self) -> list[str]:
        """All lines of the look."""
        return [*self._above(), *self._table(self._lines())]

    def _lines(self) -> list[Line]:
        assert self._look is not None
        return sorted(self._look.lines, key=SORT[self._sort])

    def _above(self) -> list[str]:
        assert self._look is not None
        columns = self._screen.columns
        return [*headline(self._look.taken, columns), *minute_lines(self._past, columns)]

    def _table(self, lines: list[Line]) -> list[str]:
        assert self._look is not None
        columns = self._screen.columns
        if self._chosen.clients:
            return client_table(self._look.taken, lines, columns)
        view = View(columns, self._look.with_rates, self._sort, self._past)
        return queue_table(self._look.taken, lines, view)

    def _draw(self) -> None:
        """Fill the screen. Only the channels that are seen are made into text."""
        above, lines = self._above(), self._lines()
        self._room = max(self._screen.lines - len(above) - 2, 1)  # with titles and the last line
        if self._chosen.clients:
            title, *rows = self._table(lines)
            self._scroll(len(rows))
            rows = rows[self._first : self._first + self._room]
        else:
            self._scroll(len(lines))
            title, *rows = self._table(lines[self._first : self._first + self._room])
        self._screen.show([*above, title, *rows, *self._foot(len(rows))])

    def _scroll(self, count: int) -> None:
        self._count = count
        self._first = max(min(self._first, count - self._room), 0)

    def _foot(self, shown: int) -> list[str]:
        """The last line: which rows these are, and the keys."""
        place = f"{self._first + 1}-{self._first + shown} of {self._count}" if self._count else ""
        if self._screen.has_keys:
            text = f"{place}  by {self._sort}: < >  scroll: ↑ ↓  end: q".strip()
        elif shown < self._count:
            text = f"{place} (--sort, --topic)"
        else:
            return []
        return [click.style(text[: self._screen.columns], dim=True)]

    def wait(self, until: float) -> bool:
        """Wait, and do what is typed. until: monotonic seconds. Returns False after q."""
        while (key := self._screen.wait(until)) is not None:
            if key == "q":
                return False
            steps = {"up": -1, "down": 1, "page up": -self._room, "page down": self._room}
            steps |= {"home": -self._count, "end": self._count}
            self._first += steps.get(key, 0)
            if key in ("<", ">"):
                keys = list(SORT)
                step = 1 if key == ">" else -1
                self._sort = keys[(keys.index(self._sort) + step) % len(keys)]
            if self._screen.is_full:
                self._draw()
        return True
