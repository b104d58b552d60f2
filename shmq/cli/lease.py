"""`shmq lease`: list the open leases, and end a lease that its holder will not end."""

from __future__ import annotations

import dataclasses
import time

import click

import shmq
from shmq import peek, shm, sources
from shmq.cli.output import patience, print_json, print_rows, say
from shmq.cli.parameters import complete_channel, complete_topic, instance_option, json_option
from shmq.cli.status import OK
from shmq.diagnostics.readable import age


@click.group()
def lease() -> None:
    """Show the open leases, or end one."""


@lease.command("ls")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic, required=False)
@click.argument("channel", shell_complete=complete_channel, required=False)
def ls(instance: str, as_json: bool, topic: str | None, channel: str | None) -> int:
    """Show the open leases of all channels, of TOPIC's channels, or of TOPIC's CHANNEL.

    EXPIRES: time until the messages return to the channel, unless the holder extends the lease.
    """
    now, rows = time.clock_gettime_ns(time.CLOCK_MONOTONIC), []
    with patience("reading the shared memory"), sources.open_readonly(instance) as source:
        names = {entry.index: entry.name for entry in source.directory.live_topics()}
        for entry, view in sources.live_queues(source):
            name = names.get(entry.topic, "")
            if topic not in (None, name) or channel not in (None, entry.channel):
                continue
            for found in peek.open_leases(view):
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
                        found.holder,
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


@lease.command("return")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@click.argument("lease_id", metavar="LEASE", type=click.IntRange(1))
def return_(instance: str, as_json: bool, topic: str, channel: str, lease_id: int) -> int:
    """Return LEASE to TOPIC's CHANNEL: its messages go to the head, with one more attempt."""
    return _end(instance, as_json, topic, channel, lease_id, finish=False)


@lease.command("finish")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@click.argument("lease_id", metavar="LEASE", type=click.IntRange(1))
def finish(instance: str, as_json: bool, topic: str, channel: str, lease_id: int) -> int:
    """Finish LEASE of TOPIC's CHANNEL: its messages are done and are not delivered again."""
    return _end(instance, as_json, topic, channel, lease_id, finish=True)


def _end(
    instance: str, as_json: bool, topic: str, channel: str, lease_id: int, finish: bool
) -> int:
    verb = "finish" if finish else "return"
    doing = patience(f"{verb} lease {lease_id}")
    with shm.administration(), shmq.attach(instance) as broker, doing:
        end = broker.finish_lease if finish else broker.return_lease
        messages = end(topic, channel, lease_id)
    if as_json:
        print_json({"done": verb, "topic": topic, "channel": channel, "messages": messages})
    else:
        say(f"{messages} messages {'finished' if finish else 'returned'}")
    return OK
