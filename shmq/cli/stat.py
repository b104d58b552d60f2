"""`shmq stat`: a read-only look at the segments, with or without a supervisor."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from shmq import layout, prometheus, segments, stats
from shmq.cli import (
    DEGRADED,
    NOT_RUNNING,
    OK,
    complete_channel,
    complete_topic,
    instance_option,
    json_option,
    stale,
)
from shmq.cli.instances import Instance, print_table, survey
from shmq.cli.output import age, patience, print_json, print_rows
from shmq.stats import BrokerStats, ChannelStats, TopicStats

_COUNTERS = ("message_count", "delivered", "requeue_count", "timeout_count")


@dataclass(frozen=True)
class _Line:
    """A queue at one moment."""

    topic: TopicStats
    queue: ChannelStats
    rates: list[float] | None = None
    """Of the counters, a second; None without an earlier look."""

    @property
    def name(self) -> str:
        if self.queue.name is None:
            return f"{self.topic.name} (backlog)"
        return f"{self.topic.name}/{self.queue.name}"

    @property
    def counters(self) -> tuple[int, ...]:
        return tuple(getattr(self.queue, name) for name in _COUNTERS)

    def count(self, which: int) -> float:
        """A counter: its rate if there is one."""
        return self.rates[which] if self.rates is not None else self.counters[which]


#: What the table can be sorted by; numbers with the largest first.
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
@click.option("--prometheus", "as_prometheus", is_flag=True,
              help="Print Prometheus' text format, for a textfile collector.")  # fmt: skip
@click.option("-i", "interval", type=click.FloatRange(0.05), metavar="SECONDS",
              help="Look again so often, and show rates.")  # fmt: skip
@click.option("-n", "count", type=click.IntRange(1), metavar="COUNT", help="Looks until the end.")
@click.option("--topic", metavar="TOPIC", shell_complete=complete_topic, help="Only this topic.")
@click.option(
    "--channel",
    metavar="CHANNEL",
    shell_complete=complete_channel,
    help="Only channels of this name.",
)
@click.option("--sort", type=click.Choice(list(_SORT)), default="name", show_default=True,
              metavar="COLUMN", help=f"Order of the table: {', '.join(_SORT)}.")  # fmt: skip
def stat(
    instance: str,
    as_json: bool,
    as_prometheus: bool,
    interval: float | None,
    count: int | None,
    topic: str | None,
    channel: str | None,
    sort: str,
) -> int:
    """Show what an instance is doing.

    Reads its shared memory, so it costs the broker nothing and works while its supervisor is dead.
    The exit status is 4 then, and while its data path cannot be written or /dev/shm is full.
    Counters are totals, with -i rates since the look before.
    """
    if not (as_json or as_prometheus) and _nothing_is_named(instance):
        found = _others()
        if found:
            click.echo(f"there is no instance {instance!r}: name one of these (--instance, or "
                       "SHMQ_INSTANCE)", err=True)  # fmt: skip
            print_table(found)
            return NOT_RUNNING
    if as_prometheus and (as_json or interval or count):
        raise click.UsageError("--prometheus is one look: leave out --json, -i and -n")
    looks = itertools.count() if interval and count is None else range(count or 1)
    pause = interval or 1.0
    before: dict[int, tuple[int, ...]] = {}
    taken_at, status = 0.0, OK
    for look in looks:
        if look:
            time.sleep(pause)
        with patience("reading the shared memory"), layout.open_readonly(instance) as source:
            now, elapsed = time.monotonic(), time.monotonic() - taken_at
            taken, taken_at = stats.collect(source), now
        status = DEGRADED if taken.trouble else OK
        lines = sorted(_lines(taken, topic, channel, before, elapsed), key=_SORT[sort])
        if as_prometheus:
            click.echo(prometheus.exposition(taken, topic, channel), nl=False)
        elif as_json:
            _print_json(taken, lines, topic, channel)
        else:
            _print_table(taken, lines, with_rates=interval is not None and look > 0)
        before = {line.queue.serial: line.counters for line in lines}
    return status


def _nothing_is_named(instance: str) -> bool:
    """Whether the default instance is meant and there is none."""
    source = click.get_current_context().get_parameter_source("instance")
    is_default = source in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return is_default and not os.path.exists(segments.directory_path(instance))


def _others() -> list[Instance]:
    return [item for item in map(survey, stale.instances()) if item is not None]


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


def _print_table(taken: BrokerStats, lines: list[_Line], with_rates: bool) -> None:
    click.echo(_headline(taken))
    for text in _troubles(taken):
        click.echo(click.style(text, fg="red"))
    titles = ["TOPIC/CHANNEL", "DEPTH", "MEM", "DISK", "INFLT", "LEASED", "DEFER"]
    unit = "/s" if with_rates else ""
    titles += [
        f"IN{unit}",
        f"OUT{unit}",
        f"REQ{unit}",
        f"TMO{unit}",
        "OLDEST",
        "P50",
        "P99",
        "CLIENTS",
    ]
    rows = []
    for line in lines:
        queue = line.queue
        counts: Sequence[float] = line.counters
        if with_rates:
            counts = line.rates or [0.0] * len(_COUNTERS)
        rows.append(
            [
                line.name + (" (paused)" if queue.paused or line.topic.paused else ""),
                str(queue.depth),
                str(queue.depth - queue.backend_depth),
                str(queue.backend_depth),
                str(queue.in_flight),
                str(queue.leased),
                str(queue.deferred),
                *(f"{number:.0f}" for number in counts),
                "-" if queue.oldest_age is None else age(queue.oldest_age),
                *_percentiles(queue),
                str(len(queue.sessions)),
            ]
        )
    idle = [item.name for item in taken.topics if not item.channels and item.backlog is None]
    print_rows(titles, rows)
    if idle and not lines:
        click.echo(f"topics without a channel or messages: {', '.join(idle)}")
    sys.stdout.flush()


def _percentiles(queue: ChannelStats) -> list[str]:
    """From publish to finish."""
    found = [queue.latency.percentile(share) for share in (0.5, 0.99)]
    return ["-" if seconds is None else age(seconds) for seconds in found]


def _troubles(taken: BrokerStats) -> list[str]:
    """What is wrong beside the supervisor, of which the headline tells."""
    found = taken.trouble[0 if taken.supervisor_alive else 1 :]
    since = taken.disk_trouble_since
    if since is not None and found:
        found[0] += f" (for {age(max(time.time() - since, 0))})"
    return found


def _headline(taken: BrokerStats) -> str:
    alive = "alive" if taken.supervisor_alive else click.style("DEAD", fg="red", bold=True)
    parts = [
        time.strftime("%H:%M:%S"),
        f"instance {taken.instance}",
        f"supervisor pid {taken.supervisor_pid} {alive}",
        f"heartbeat {age(taken.heartbeat_age)} ago",
        f"epoch {taken.epoch}",
        f"clients {len(taken.clients)}",
    ]
    if taken.stopping:
        parts.append("stopping")
    return "  ".join(parts)
