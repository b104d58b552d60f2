"""`shmq stat`: show the state of an instance. Reads the segments only, and needs no supervisor."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from shmq import prometheus, shm, sources, stats
from shmq.cli.output import command_name, format_rows, patience, print_json, shorten
from shmq.cli.parameters import complete_channel, complete_topic, instance_option, json_option
from shmq.cli.status import DEGRADED, NOT_RUNNING, OK
from shmq.diagnostics.readable import age, printable
from shmq.stats import BrokerStats, ChannelStats, TopicStats

_COUNTERS = ("message_count", "delivered", "requeue_count", "timeout_count")


@dataclass(frozen=True)
class _Line:
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
        return tuple(getattr(self.queue, name) for name in _COUNTERS)

    def count(self, which: int) -> float:
        """The rate of a counter, or its total at the first look."""
        return self.rates[which] if self.rates is not None else self.counters[which]


#: Sort keys of the table. Numbers sort with the largest first.
_SORT: dict[str, Callable[[_Line], Any]] = {
    "name": lambda line: (line.topic.name, line.queue.name or ""),
    "depth": lambda line: -line.queue.depth,
    "mem": lambda line: line.queue.backend_depth - line.queue.depth,
    "disk": lambda line: -line.queue.backend_depth,
    "inflt": lambda line: -line.queue.in_flight,
    "leased": lambda line: -line.queue.leased,
    "defer": lambda line: -line.queue.deferred,
    "in": lambda line: -line.count(0),
    "out": lambda line: -line.count(1),
    "req": lambda line: -line.count(2),
    "tmo": lambda line: -line.count(3),
    "oldest": lambda line: -(line.queue.oldest_age or 0),
    "p50": lambda line: -(line.queue.latency.percentile(0.5) or 0),
    "p99": lambda line: -(line.queue.latency.percentile(0.99) or 0),
    "clients": lambda line: -len(line.queue.sessions),
}


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
    "interval",
    type=click.FloatRange(0.05),
    metavar="SECONDS",
    help="Refresh every SECONDS, and show rates.",
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
    type=click.Choice(list(_SORT)),
    default="name",
    show_default=True,
    metavar="COLUMN",
    help=f"Order of the table: {', '.join(_SORT)}.",
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
    full. Counters are totals; with -i they are rates since the previous refresh. A narrow terminal
    shows fewer columns; a pipe and --json get all.
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
        raise click.UsageError("--prometheus is one look: leave out --json, -i and -n")
    looks = itertools.count() if interval and count is None else range(count or 1)
    pause = interval or 1.0
    before: dict[int, tuple[int, ...]] = {}
    taken_at, status, screen = 0.0, OK, _Screen(is_live=interval is not None)
    for look in looks:
        if look:
            time.sleep(pause)
        with patience("reading the shared memory"), sources.open_readonly(instance) as source:
            now, elapsed = time.monotonic(), time.monotonic() - taken_at
            taken, taken_at = stats.collect(source), now
        status = DEGRADED if taken.trouble else OK
        lines = sorted(_lines(taken, topic, channel, before, elapsed), key=_SORT[sort])
        if as_prometheus:
            click.echo(prometheus.exposition(taken, topic, channel), nl=False)
        elif as_json:
            _print_json(taken, lines, topic, channel)
        else:
            with_rates = interval is not None and look > 0
            screen.show(_table(taken, lines, with_rates, clients, screen.columns))
        before = {line.queue.serial: line.counters for line in lines}
    return status


def _nothing_is_named(instance: str) -> bool:
    """Returns true if no instance was named and the default one does not exist."""
    source = click.get_current_context().get_parameter_source("instance")
    is_default = source in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return is_default and not os.path.exists(shm.directory_path(instance))


def _lines(
    taken: BrokerStats,
    topic: str | None,
    channel: str | None,
    before: dict[int, tuple[int, ...]],
    elapsed: float,
) -> list[_Line]:
    lines = []
    for item in taken.topics:
        if topic is not None and item.name != topic:
            continue
        for queue in [*item.channels, *([item.backlog] if item.backlog else [])]:
            if channel not in (None, queue.name):
                continue
            line, earlier = _Line(item, queue), before.get(queue.serial)
            if earlier is not None:
                steps = zip(line.counters, earlier, strict=True)
                line = _Line(item, queue, [(new - old) / elapsed for new, old in steps])
            lines.append(line)
    return lines


def _print_json(
    taken: BrokerStats, lines: list[_Line], topic: str | None, channel: str | None
) -> None:
    document = {"time": time.time(), **taken.to_json(topic, channel)}
    rates = [
        {"topic": line.topic.name, "channel": line.queue.name}
        | dict(zip(_COUNTERS, line.rates, strict=True))
        for line in lines
        if line.rates is not None
    ]
    print_json({**document, "rates": rates} if rates else document)


# ---- tables ----

#: Columns that a narrow terminal does not show, in the order in which they are dropped.
_DROPPED = ("LEASED", "P50", "MEM", "TMO", "REQ", "DEFER", "OLDEST", "P99", "OUT", "IN")
_SPACE = "  "


def _queue_table(
    taken: BrokerStats, lines: list[_Line], with_rates: bool, columns: int | None
) -> list[str]:
    """A table with a line for each queue. columns: width of the terminal; None: no limit."""
    unit = "/s" if with_rates else ""
    titles = ["TOPIC/CHANNEL", "DEPTH", "MEM", "DISK", "INFLT", "LEASED", "DEFER"]
    titles += [f"{name}{unit}" for name in ("IN", "OUT", "REQ", "TMO")]
    titles += ["OLDEST", "P50", "P99", "CLIENTS"]
    idle = [item.name for item in taken.topics if not item.channels and item.backlog is None]
    found: list[str] = []
    for number in (str, _short):
        rows = [_row(line, with_rates, number) for line in lines]
        found = format_rows(titles, rows)
        if columns is None or max(map(len, found)) <= columns:
            break
    else:
        assert columns is not None
        found = _narrow(titles, rows, columns)
    if idle and not lines:
        text = f"topics without a channel or messages: {printable(', '.join(idle))}"
        found += textwrap.wrap(text, columns or sys.maxsize)
    return found


def _row(line: _Line, with_rates: bool, number: Callable[[int], str]) -> list[str]:
    queue = line.queue
    counts: Sequence[float] = line.counters
    if with_rates:
        counts = line.rates or [0.0] * len(_COUNTERS)
    return [
        line.name + (" (paused)" if queue.paused or line.topic.paused else ""),
        number(queue.depth),
        number(queue.depth - queue.backend_depth),
        number(queue.backend_depth),
        number(queue.in_flight),
        number(queue.leased),
        number(queue.deferred),
        *(number(round(count)) for count in counts),
        "-" if queue.oldest_age is None else age(queue.oldest_age),
        *_percentiles(queue),
        str(len(queue.sessions)),
    ]


def _short(number: int) -> str:
    """A count in at most six characters."""
    for unit in ("", "k", "M", "G"):
        if number < 99_999.5 or unit == "G":
            break
        number = round(number / 1000)
    return f"{number}{unit}"


def _narrow(titles: list[str], rows: list[list[str]], columns: int) -> list[str]:
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
    return format_rows(list(first), [list(row) for row in rest])


def _client_table(lines: list[_Line], columns: int | None, foreign: bool) -> list[str]:
    """A table with a line for each consumer. foreign: the processes are in another PID
    namespace."""
    now, rows = time.time_ns(), []
    for line in lines:
        for item in line.queue.sessions:
            rows.append(
                [
                    line.name,
                    str(item.client.pid),
                    "" if foreign else command_name(item.client.pid, 16),
                    str(item.in_flight),
                    str(item.max_in_flight),
                    age(max(now - item.since, 0) / 1e9),
                    _short(item.delivered),
                    _short(item.finished),
                    _short(item.requeued),
                    _short(item.timed_out),
                ]
            )
    titles = [
        "TOPIC/CHANNEL",
        "PID",
        "COMMAND",
        "INFLT",
        "MAX",
        "SINCE",
        "OUT",
        "FIN",
        "REQ",
        "TMO",
    ]
    found = format_rows(titles, rows)
    if columns is None or max(map(len, found)) <= columns:
        return found
    return _narrow(titles, rows, columns)


class _Screen:
    """The output for tables: a terminal, which has a width and can be overwritten, or a pipe."""

    def __init__(self, is_live: bool) -> None:
        """is_live: print each table over the one before, if the terminal can do that."""
        self._is_terminal = sys.stdout.isatty()
        can_move = os.environ.get("TERM", "dumb") not in ("", "dumb")
        self._in_place = is_live and self._is_terminal and can_move
        self._is_clear = False

    @property
    def columns(self) -> int | None:
        """Width of the terminal; None if there is no limit."""
        if not self._is_terminal:
            return None
        # if the last column is used, erasing the rest of the line erases that column
        return shutil.get_terminal_size().columns - (1 if self._in_place else 0)

    def show(self, lines: list[str]) -> None:
        """Print the lines."""
        if not self._in_place:
            for line in lines:
                click.echo(line)
        else:
            most = shutil.get_terminal_size().lines - 1
            if len(lines) > most:
                left = len(lines) - most + 1
                lines = [*lines[: most - 1], f"... and {left} more (--sort, --topic)"]
            # erase the rest of each line as it is written: to erase all first would flicker
            text = "".join(f"{line}\x1b[K\n" for line in lines)
            clear = "" if self._is_clear else "\x1b[2J"
            if click.get_current_context().color is False:
                text = "".join(f"{click.unstyle(line)}\x1b[K\n" for line in lines)
            sys.stdout.write(f"{clear}\x1b[H{text}\x1b[J")
            self._is_clear = True
        sys.stdout.flush()


def _table(
    taken: BrokerStats, lines: list[_Line], with_rates: bool, clients: bool, columns: int | None
) -> list[str]:
    """Lines of the headline, the troubles and the table."""
    table = (
        _client_table(lines, columns, taken.foreign)
        if clients
        else _queue_table(taken, lines, with_rates, columns)
    )
    wide = columns or sys.maxsize
    troubles = [part for text in _troubles(taken) for part in textwrap.wrap(text, wide)]
    return [*_headline(taken, wide), *(click.style(text, fg="red") for text in troubles), *table]


def _percentiles(queue: ChannelStats) -> list[str]:
    """p50 and p99 of the time from publish to finish."""
    found = [queue.latency.percentile(share) for share in (0.5, 0.99)]
    return ["-" if seconds is None else age(seconds) for seconds in found]


def _troubles(taken: BrokerStats) -> list[str]:
    """Troubles of the instance, except a dead supervisor, which the headline shows."""
    found = [printable(text) for text in taken.trouble[0 if taken.supervisor_alive else 1 :]]
    since = taken.disk_trouble_since
    if since is not None and found:
        found[0] += f" (for {age(max(time.time() - since, 0))})"
    return found


def _headline(taken: BrokerStats, columns: int) -> list[str]:
    """Supervisor, heartbeat and clients, on as many lines as the width needs."""
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
    lines = [parts[0]]
    for part in parts[1:]:
        if len(click.unstyle(lines[-1])) + len(_SPACE) + len(click.unstyle(part)) <= columns:
            lines[-1] += _SPACE + part
        else:
            lines.append(part)
    return lines


def _life(taken: BrokerStats) -> str:
    if taken.foreign:
        return f"{'alive' if taken.supervisor_alive else 'SILENT'} in another PID namespace"
    return "alive" if taken.supervisor_alive else click.style("DEAD", fg="red", bold=True)
