"""`shmq message`: finish or requeue a message that a consumer holds."""

from __future__ import annotations

import click

import shmq
from shmq import shm
from shmq.cli.output import patience, print_json, say
from shmq.cli.parameters import (
    complete_channel,
    complete_topic,
    duration,
    instance_option,
    json_option,
)
from shmq.cli.status import OK

_PID = click.option(
    "--pid", type=click.IntRange(1), metavar="PID", help="Only if this process holds it."
)
_ID = click.argument("message", metavar="ID")


@click.group()
def message() -> None:
    """Take a message away from the consumer that holds it."""


@message.command("finish")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@_ID
@_PID
def finish(
    instance: str, as_json: bool, topic: str, channel: str, message: str, pid: int | None
) -> int:
    """Finish message ID of TOPIC's CHANNEL, which is in flight, for its consumer.

    `shmq peek TOPIC CHANNEL --state in_flight` shows the ids. When the consumer finishes, requeues
    or touches the message it is told that it is not in flight, as after a time-out.
    """
    doing = patience(f"finish message {message}")
    with shm.administration(), shmq.attach(instance) as broker, doing:
        broker.finish_message(topic, channel, message, pid)
    return _say(as_json, "finish", topic, channel, message)


@message.command("requeue")
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@_ID
@click.option(
    "--delay", callback=duration, metavar="DURATION", help="Hand it out again this much later."
)
@_PID
def requeue(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str,
    message: str,
    delay: float | None,
    pid: int | None,
) -> int:
    """Requeue message ID of TOPIC's CHANNEL, which is in flight: it is handed out again.

    This counts no failure of the message. For the rest see `shmq message finish --help`.
    """
    doing = patience(f"requeue message {message}")
    with shm.administration(), shmq.attach(instance) as broker, doing:
        broker.requeue_message(topic, channel, message, delay or 0, pid)
    return _say(as_json, "requeue", topic, channel, message)


def _say(as_json: bool, verb: str, topic: str, channel: str, message: str) -> int:
    if as_json:
        print_json({"done": verb, "topic": topic, "channel": channel, "id": message})
    else:
        say(f"message {message} {'finished' if verb == 'finish' else 'requeued'}")
    return OK
