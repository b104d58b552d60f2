"""`shmq lease`: what is leased from channels, and the end of a lease that nobody will finish."""

from __future__ import annotations

import dataclasses
import time

import click

import shmq
from shmq import layout, segments
from shmq.cli import OK, complete_channel, complete_topic, instance_option, json_option
from shmq.cli.output import age, patience, print_json, print_rows


@click.group()
def lease() -> None:
    """Show the open leases, or end one."""


@lease.command("ls")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic, required=False)
@click.argument("channel", shell_complete=complete_channel, required=False)
def ls(instance: str, as_json: bool, topic: str | None, channel: str | None) -> int:
    """Show the open leases, of all channels or of TOPIC's or of TOPIC's CHANNEL.

    EXPIRES: when it goes back to the channel unless its lessee gives a sign of life.
    """
    now, rows = time.clock_gettime_ns(time.CLOCK_MONOTONIC), []
    with patience("reading the shared memory"), layout.open_readonly(instance) as source:
        names = {entry.index: entry.name for entry in source.directory.live_topics()}
        for entry, view in layout.live_queues(source):
            name = names.get(entry.topic, "")
            if topic not in (None, name) or channel not in (None, entry.channel):
                continue
            for found in layout.open_leases(view):
                if as_json:
                    where = {"topic": name, "channel": entry.channel}
                    print_json(where | dataclasses.asdict(found))
                    continue
                left = None if found.deadline is None else max(found.deadline - now, 0) / 1e9
                rows.append(
                    [
                        f"{name}/{entry.channel}",
                        str(found.id),
                        str(found.parent),
                        found.lessee,
                        str(found.pid or "-"),
                        str(found.count),
                        str(found.bytes),
                        str(found.replays),
                        age(max(time.time_ns() - found.since, 0) / 1e9),
                        "never" if left is None else age(left),
                    ]
                )
    if not as_json:
        titles = "TOPIC/CHANNEL LEASE PARENT NAME PID MESSAGES BYTES REPLAYS AGE EXPIRES"
        print_rows(titles.split(), rows)
    return OK


@lease.command("requeue")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@click.argument("lease_id", metavar="LEASE", type=click.IntRange(1))
def requeue(instance: str, as_json: bool, topic: str, channel: str, lease_id: int) -> int:
    """Give LEASE of TOPIC's CHANNEL back: its messages go first there, with one more attempt."""
    return _end(instance, as_json, topic, channel, lease_id, requeue=True)


@lease.command("drop")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@click.argument("lease_id", metavar="LEASE", type=click.IntRange(1))
def drop(instance: str, as_json: bool, topic: str, channel: str, lease_id: int) -> int:
    """Finish LEASE of TOPIC's CHANNEL: its messages are gone."""
    return _end(instance, as_json, topic, channel, lease_id, requeue=False)


def _end(
    instance: str, as_json: bool, topic: str, channel: str, lease_id: int, requeue: bool
) -> int:
    verb = "requeue" if requeue else "drop"
    doing = patience(f"{verb} lease {lease_id}")
    with segments.administration(), shmq.attach(instance) as broker, doing:
        messages = broker.end_lease(topic, channel, lease_id, requeue)
    if as_json:
        print_json({"done": verb, "topic": topic, "channel": channel, "messages": messages})
    else:
        click.echo(f"{messages} messages {'requeued' if requeue else 'dropped'}")
    return OK
