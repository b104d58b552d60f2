"""`shmq dead`: list, show, redrive and drop the dead letters of a channel."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

import shmq
from shmq import shm
from shmq.cli.output import one_line, patience, print_json, print_rows, say
from shmq.cli.parameters import complete_channel, complete_topic, instance_option, json_option
from shmq.cli.status import OK
from shmq.client.dead_letters import REASONS, DeadLetter
from shmq.diagnostics.readable import age, body_field

_Command = TypeVar("_Command", bound=Callable[..., Any])


@click.group()
def dead() -> None:
    """Show the dead letters of a channel, send them back to it, or drop them."""


def _choice(command: _Command) -> _Command:
    """Add the arguments and options that choose dead letters."""
    for add in (
        click.option("--via", metavar="CHANNEL", help="The dead topic's channel with the letters."),
        click.option("--error", metavar="TEXT", help="Only those whose error contains TEXT."),
        click.option("--reason", type=click.Choice(REASONS), help="Only those that died of this."),
        click.argument("channel", shell_complete=complete_channel),
        click.argument("topic", shell_complete=complete_topic),
        json_option,
        instance_option,
    ):
        command = add(command)
    return command


_EXACT = click.option(
    "--exact",
    is_flag=True,
    help="Only those of exactly this reason and this error; what is not named they do not have.",
)
_COUNT = click.option(
    "-n", "count", type=click.IntRange(1), metavar="N", help="At most N, the oldest first."
)


@dead.command("ls")
@_choice
def ls(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str,
    reason: str | None,
    error: str | None,
    via: str | None,
) -> int:
    """Count the dead letters of TOPIC's CHANNEL by reason and error."""
    with shmq.attach(instance) as broker:
        groups = broker.dead(topic, channel, via).ls(reason, error)
    rows = []
    for group in groups:
        if as_json:
            print_json(dataclasses.asdict(group))
            continue
        rows.append(
            [
                str(group.count),
                group.reason or "-",
                _since(group.first),
                _since(group.last),
                one_line((group.error or "-").encode(), 40),
            ]
        )
    if not as_json:
        print_rows(["LETTERS", "REASON", "FIRST", "LAST", "ERROR"], rows)
    return OK


@dead.command("peek")
@_choice
@click.option(
    "-n", "count", type=click.IntRange(1), default=10, show_default=True, metavar="N",
    help="At most N, the oldest first.",
)  # fmt: skip
def peek(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str,
    reason: str | None,
    error: str | None,
    via: str | None,
    count: int,
) -> int:
    """Show dead letters of TOPIC's CHANNEL with their bodies. It changes nothing."""
    with shmq.attach(instance) as broker:
        letters = broker.dead(topic, channel, via).peek(count, reason, error)
    if as_json:
        for letter in letters:
            print_json(_document(letter))
        return OK
    rows = [
        [
            letter.id,
            letter.reason or "-",
            _since(letter.when),
            str(letter.failures or "-"),
            str(letter.attempts),
            str(letter.pid or "-"),
            one_line((letter.error or "-").encode(), 80),
            one_line(letter.body, 90),
        ]
        for letter in letters
    ]
    print_rows(["ID", "REASON", "DIED", "FAILURES", "ATTEMPTS", "PID", "ERROR", "BODY"], rows)
    return OK


def _document(letter: DeadLetter) -> dict[str, Any]:
    found = {
        field.name: getattr(letter, field.name)
        for field in dataclasses.fields(letter)
        if field.name not in ("body", "properties")
    }
    properties = {
        name: value.decode("utf-8", "backslashreplace") for name, value in letter.properties.items()
    }
    return found | {"properties": properties} | body_field(letter.body)


@dead.command("redrive")
@_choice
@_EXACT
@_COUNT
def redrive(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str,
    reason: str | None,
    error: str | None,
    via: str | None,
    exact: bool,
    count: int | None,
) -> int:
    """Move dead letters back to TOPIC's CHANNEL. With their old ids they begin a new life."""
    with shm.administration(), shmq.attach(instance) as broker, patience("redriving"):
        done = broker.dead(topic, channel, via).redrive(count, reason, error, exact)
    return _say(as_json, "redriven", done)


@dead.command("drop")
@_choice
@_EXACT
@_COUNT
def drop(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str,
    reason: str | None,
    error: str | None,
    via: str | None,
    exact: bool,
    count: int | None,
) -> int:
    """Delete dead letters of TOPIC's CHANNEL."""
    with shm.administration(), shmq.attach(instance) as broker, patience("dropping"):
        done = broker.dead(topic, channel, via).drop(count, reason, error, exact)
    return _say(as_json, "dropped", done)


def _say(as_json: bool, what: str, count: int) -> int:
    if as_json:
        print_json({what: count})
    else:
        say(f"{count} messages {what}")
    return OK


def _since(when: int | None) -> str:
    return "-" if when is None else age(max(time.time_ns() - when, 0) / 1e9)
