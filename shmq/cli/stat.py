"""`shmq stat`: show the state of an instance. Reads the segments only, and needs no supervisor."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import click
from click.core import ParameterSource

from shmq import prometheus, shm, sources, stats
from shmq.cli.output import patience, print_json, say
from shmq.cli.parameters import (
    complete_channel,
    complete_topic,
    instance_option,
    json_option,
    read_token,
    token_option,
)
from shmq.cli.stat_page import Frame, print_each, show_all
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

    chosen: _Chosen
    taken: BrokerStats
    lines: list[Line]
    with_rates: bool
    cost: float

    keys = tuple(SORT)

    @property
    def status(self) -> int:
        """Of the command."""
        return DEGRADED if self.taken.trouble else OK

    @property
    def is_by_row(self) -> bool:
        """Whether each line becomes one row of the table."""
        return not self.chosen.clients

    def rows(self, sort: str) -> list[Line]:
        """Return the lines in order."""
        return sorted(self.lines, key=SORT[sort])

    def above(self, frame: Frame) -> list[str]:
        """Return the lines above the table."""
        past = self._past if frame.is_full else None
        return [*headline(self.taken, frame.columns), *minute_lines(past, frame.columns)]

    def table(self, rows: list[Line], frame: Frame) -> list[str]:
        """Return the lines of the table."""
        if self.chosen.clients:
            return client_table(self.taken, rows, frame.columns)
        past = self._past if frame.is_full else None
        view = View(frame.columns, self.with_rates, frame.sort, past)
        return queue_table(self.taken, rows, view)

    @functools.cached_property
    def _past(self) -> History | None:
        return last_minute(self.chosen.instance)


def _addresses(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> list[str]:
    """Read the addresses of an option, without repetition; several may stand in one word."""
    from shmq.diagnostics.fleet import LOOKUPD_PORT, NSQD_PORT, parse_address

    port = LOOKUPD_PORT if parameter.name == "lookupds" else NSQD_PORT
    words = [word.strip() for value in values for word in value.split(",")]
    try:
        return list(dict.fromkeys(parse_address(word, port) for word in words))
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


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
@click.option(
    "--lookupd",
    "lookupds",
    multiple=True,
    callback=_addresses,
    metavar="HOST:PORT",
    help="Show all hosts that this nsqlookupd knows. Several with commas; port 4161 if left out.",
)
@click.option(
    "--nsqd",
    "nsqds",
    multiple=True,
    callback=_addresses,
    metavar="HOST:PORT",
    help="Show this host, a gateway or an nsqd. Several with commas; port 4151 if left out.",
)
@token_option("the hosts of --nsqd")
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
    lookupds: list[str],
    nsqds: list[str],
    token_file: str | None,
) -> int:
    """Show what an instance is doing.

    Only reads shared memory: this costs the broker nothing and works while the supervisor is dead.
    The exit status is 4 if the supervisor is dead, the data path cannot be written or /dev/shm is
    full. Counters are totals; with --watch they are rates since the previous refresh. A narrow
    terminal shows fewer columns; a pipe and --json get all. In a terminal --watch takes the whole
    screen: < and > choose the order, the arrows and Page Up and Down scroll, q ends it.

    With --lookupd or --nsqd it asks hosts over the network, in the columns that nsqd's statistics
    have: a row for each channel with the sums over all hosts, and one for each host below it. The
    exit status is 4 if one of them does not answer or is not well, and 3 if none answers. A token
    goes to the hosts that --nsqd names, and not to those that only a nsqlookupd names.
    """
    chosen = _Chosen(instance, topic, channel, clients, interval, count)
    status = _fleet(chosen, sort, as_json)
    if status is not None:
        return status
    if not (as_json or as_prometheus) and _nothing_is_named(instance):
        from shmq.cli.instances import print_table
        from shmq.diagnostics.instances import survey_all

        if found := survey_all()[0]:
            say(
                f"there is no instance {instance!r}: name one of these (--instance, or "
                "SHMQ_INSTANCE)",
                err=True,
            )
            print_table(found)
            return NOT_RUNNING
    if as_prometheus and (as_json or interval or count):
        raise click.UsageError("--prometheus is one look: leave out --json, --watch and -n")
    looks = _looks(chosen)
    if not (as_json or as_prometheus):
        return show_all(looks, sort, interval, count)
    if as_prometheus:
        look = next(looks)
        say(prometheus.exposition(look.taken, topic, channel), nl=False)
        return look.status
    return print_each(
        looks, lambda look: _print_json(look, look.rows(sort), chosen), interval, count
    )


def _fleet(chosen: _Chosen, sort: str, as_json: bool) -> int | None:
    """Show several hosts, if the command names any. Returns the exit status, or None."""
    context = click.get_current_context()
    lookupds, nsqds = context.params["lookupds"], context.params["nsqds"]
    if not lookupds and not nsqds:
        return None
    named = context.get_parameter_source("instance") is ParameterSource.COMMANDLINE
    if named or chosen.clients or context.params["as_prometheus"]:
        raise click.UsageError(
            "--instance, --clients and --prometheus are for the instances of this host: leave them "
            "out with --lookupd and --nsqd"
        )
    from shmq.cli import stat_fleet  # its imports are slow

    token = read_token(context.params["token_file"])
    return stat_fleet.run(
        stat_fleet.Chosen(
            lookupds,
            nsqds,
            chosen.topic,
            chosen.channel,
            chosen.interval,
            chosen.count,
            sort,
            {} if token is None else dict.fromkeys(nsqds, token),
        ),
        as_json,
    )


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
        yield _Look(chosen, taken, lines, with_rates, time.process_time() - began)


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
