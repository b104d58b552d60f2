"""`shmq tail` takes messages and prints them; `shmq peek` prints them and changes nothing."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import secrets
import select
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import click

import shmq
from shmq import sources
from shmq.cli.output import (
    command_name,
    forget_output,
    harmless,
    one_line,
    patience,
    print_json,
    print_rows,
    say,
)
from shmq.cli.parameters import complete_channel, complete_topic, instance_option, json_option
from shmq.cli.status import DEGRADED, ERROR, OK
from shmq.diagnostics.readable import age, body_field, moment, property_fields, property_list
from shmq.errors import Gone, NotInFlight
from shmq.names import is_pattern
from shmq.peek import Peeked
from shmq.peek import peek as peek_queue
from shmq.sources import ReadOnlySource

_LOOK_EVERY = 0.25  # seconds between checks that the pipe still has a reader
_FIRST_LOOK, _MOST_LOOK = 0.00002, 0.02  # seconds between looks whether a pipe was read
_TOUCH_EVERY = 1.0  # seconds between touches of a message that waits in a pipe


class _Seen(Protocol):
    """A message that was taken or peeked at."""

    @property
    def id(self) -> str: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def attempts(self) -> int: ...
    @property
    def body(self) -> bytes: ...
    @property
    def properties(self) -> Mapping[str, bytes]: ...


def own_channel() -> str:
    """A unique name of an ephemeral channel, which is deleted with its last consumer."""
    return f"tail{secrets.randbelow(10**6):06d}#ephemeral"


# ---- tail ----


@click.command()
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel, required=False)
@click.option("-n", "count", type=click.IntRange(1), metavar="N", help="End after N messages.")
@click.option(
    "--raw", is_flag=True, help="Print bodies as they are, without line ends between them."
)
@click.option(
    "--properties",
    is_flag=True,
    help="Print the properties of a message on a line before its body; --json has them anyway.",
)
@click.option(
    "--peek",
    "peeking",
    is_flag=True,
    help="Show the messages that wait in memory, take none, and end; without "
    "CHANNEL: those of the topic's backlog.",
)
def tail(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str | None,
    count: int | None,
    raw: bool,
    properties: bool,
    peeking: bool,
) -> int:
    """Print the messages of TOPIC as they come, until Ctrl-C.

    Without CHANNEL, tail reads from an ephemeral channel of its own, as nsq_tail does, so that
    other consumers miss nothing. With CHANNEL, it takes that channel's messages, and makes the
    channel if there is none: it finishes a message after writing it out, into a pipe after the
    other end has read it, and returns it to the channel otherwise. With CHANNEL, TOPIC may be a
    pattern ("tenant.*"): topics take turns, and each line begins with its topic and a tab, or has
    it as "topic" (--json).
    """
    if raw and as_json:
        raise click.UsageError("choose --raw or --json")
    if raw and properties:
        raise click.UsageError("choose --raw or --properties")
    if is_pattern(topic) and (channel is None or peeking):
        raise click.UsageError("a pattern needs a CHANNEL to take from, and goes without --peek")
    form = _form(as_json, raw)
    if properties and not as_json:
        form = _after_properties(form)
    if peeking:
        return _peek_all(instance, topic, channel, count, form)
    many = is_pattern(topic) and not raw
    return _follow(instance, topic, channel, count, _with_topic(form) if many else form)


def _after_properties(form: Callable[[_Seen], bytes]) -> Callable[[_Seen], bytes]:
    """As `form`, with a line of properties before it if the message has any."""

    def both(message: _Seen) -> bytes:
        line = property_list(message.properties)
        return (f"[{line}]\n".encode() if line else b"") + form(message)

    return both


def _form(as_json: bool, raw: bool) -> Callable[[_Seen], bytes]:
    """The function that encodes a message for stdout."""
    if raw:
        return lambda message: message.body
    if as_json:
        return _json_line
    if sys.stdout.isatty():
        return lambda message: harmless(message.body).encode() + b"\n"
    return lambda message: message.body + b"\n"


def _json_line(message: _Seen) -> bytes:
    document = {
        "v": 1,
        "id": message.id,
        "timestamp": message.timestamp,
        "attempts": message.attempts,
        **property_fields(message.properties),
        **body_field(message.body),
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _with_topic(form: Callable[[_Seen], bytes]) -> Callable[[Any], bytes]:
    """The same for messages of many topics."""
    if form is not _json_line:
        return lambda message: message.topic.encode() + b"\t" + form(message)
    return lambda message: b'{"topic":"%b",' % message.topic.encode() + _json_line(message)[1:]


def _follow(
    instance: str,
    topic: str,
    channel: str | None,
    count: int | None,
    form: Callable[[Any], bytes],
) -> int:
    with shmq.attach(instance) as broker:
        if channel is None:
            _spare_backlog(broker, topic)
        elif not is_pattern(topic):
            _say_if_new(broker, topic, channel)
        name = channel or own_channel()
        with broker.consumer(topic, name, max_in_flight=1) as consumer:
            if sys.stderr.isatty():
                say(f"{topic}/{name}: Ctrl-C ends", err=True)
            try:
                _copy(consumer, count, form, exact=channel is not None)
            except BrokenPipeError:
                forget_output()  # the reader has gone; the message returns to its channel
    return OK


def _say_if_new(broker: shmq.Broker, topic: str, channel: str) -> None:
    """Say that a channel will be made: a name that was mistyped would collect messages for ever."""
    try:
        broker.settings(topic, channel)
    except Gone:
        words = f"shmq channel delete {topic} {channel} --instance={broker.instance}"
        say(
            f"shmq: there was no channel {topic}/{channel}; it is made, and keeps what comes from "
            f"now on until somebody takes it ({words})",
            err=True,
        )


def _copy(
    consumer: shmq.Consumer, count: int | None, form: Callable[[Any], bytes], exact: bool
) -> None:
    """Take, print and finish `count` messages. exact: what goes into a pipe is finished when it was
    read there, for a reader that ends leaves the rest unread. Raises BrokenPipeError when the
    reader has gone."""
    out = sys.stdout.buffer
    gone = _watch_reader(out.fileno())
    waits = exact and stat.S_ISFIFO(os.fstat(out.fileno()).st_mode)
    while count is None or count > 0:
        message = consumer.take(_LOOK_EVERY)
        if message is None:
            if gone():
                raise BrokenPipeError
            continue
        with contextlib.suppress(NotInFlight):  # it timed out while the output was blocked
            out.write(form(message))
            out.flush()
            if waits:
                _wait_until_read(out.fileno(), gone, message)
            message.finish()
            count = None if count is None else count - 1


def _wait_until_read(fd: int, gone: Callable[[], bool], message: shmq.Message) -> None:
    """Wait until a pipe is empty, and keep the message meanwhile. Raises BrokenPipeError if the
    reader goes before, and NotInFlight."""
    left, pause, touched = array.array("i", [0]), _FIRST_LOOK, time.monotonic()
    while True:
        is_gone = gone()  # looked at first: what a reader leaves behind is not read any more
        fcntl.ioctl(fd, termios.FIONREAD, left)
        if not left[0]:
            return
        if is_gone:
            raise BrokenPipeError
        if time.monotonic() - touched > _TOUCH_EVERY:
            touched = time.monotonic()
            message.touch()
        time.sleep(pause)
        pause = min(2 * pause, _MOST_LOOK)


def _watch_reader(fd: int) -> Callable[[], bool]:
    """A function that returns true if the other end of a pipe is closed. It writes nothing."""
    poll = select.poll()
    poll.register(fd, 0)
    return lambda: any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _spare_backlog(broker: shmq.Broker, topic: str) -> None:
    """Refuse a topic whose backlog holds messages and that has no channel. Its first channel gets
    the backlog, and the ephemeral channel of `tail` would drop it at the end. Raises ShmqError."""
    with contextlib.suppress(KeyError):
        found = broker.stats().topic(topic)
        if found.depth and not found.channels:
            raise shmq.ShmqError(
                f"tail of {topic!r}: {found.depth} messages wait for the topic's first channel, "
                "and would be gone with one of tail's own: look with --peek, create the channel "
                "they are for (`shmq channel create`), or name a CHANNEL to take them"
            )


def _peek_all(
    instance: str,
    topic: str,
    channel: str | None,
    count: int | None,
    form: Callable[[_Seen], bytes],
) -> int:
    found, alive = _look(instance, topic, channel, "ready", count or sys.maxsize)
    if found is None:
        return ERROR
    _write_all(found, form)
    return OK if alive else DEGRADED


def _write_all(messages: Iterable[_Seen], form: Callable[[_Seen], bytes]) -> None:
    out = sys.stdout.buffer
    for message in messages:
        out.write(form(message))
    out.flush()


# ---- peek ----

_STATES = ("ready", "requeued", "in_flight", "deferred")


@click.command()
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel, required=False)
@click.option(
    "--state",
    type=click.Choice(_STATES),
    default="ready",
    show_default=True,
    metavar="STATE",
    help="ready: in the order of delivery; requeued: the ready ones that were delivered before or "
    "come from disk; in_flight: by deadline, with their consumers; deferred: by due time.",
)
@click.option(
    "-n",
    "count",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    metavar="N",
    help="Show at most N messages.",
)
def peek(
    instance: str, as_json: bool, topic: str, channel: str | None, state: str, count: int
) -> int:
    """Show messages of TOPIC's CHANNEL (without CHANNEL: of its backlog) and change nothing.

    Messages on disk are not shown. TAKEN: time since the message was taken. DEADLINE: time until an
    unfinished message returns to its channel; never: it returns only if its consumer dies.
    """
    found, alive = _look(instance, topic, channel, state, count)
    if found is None:
        return ERROR
    if as_json:
        for message in found:
            print_json(_document(message))
    elif found:
        titles, row = _TABLES.get(state, _TABLES["ready"])
        rows = [row(message) for message in found]
        if any(message.properties for message in found):
            titles = [*titles[:-1], "PROPERTIES", titles[-1]]
            for cells, message in zip(rows, found, strict=True):
                cells.insert(-1, property_list(message.properties))
        print_rows(titles, rows)
    else:
        where = f"{topic}/{channel}" if channel else f"the backlog of {topic}"
        say(f"no message of {where} is {_STATE_WORDS[state]} in memory", err=True)
    return OK if alive else DEGRADED


def _look(
    instance: str, topic: str, channel: str | None, state: str, count: int
) -> tuple[list[Peeked] | None, bool]:
    """The messages, and whether the supervisor is alive. The messages are None if there is no such
    queue, which is reported here."""
    with patience("reading the shared memory"), sources.open_readonly(instance) as source:
        found = _peek(source, topic, channel, state, count)
        alive = sources.supervisor_alive(source.directory)
    if found is None:
        where = f"{topic}/{channel}" if channel else f"backlog of {topic}"
        say(f"shmq: there is no {where} on instance {instance!r}", err=True)
    return found, alive


def _peek(
    source: ReadOnlySource, topic: str, channel: str | None, state: str, count: int
) -> list[Peeked] | None:
    """Messages of a queue in one state; None if there is no such queue."""
    entry = source.directory.find_topic(topic)
    if entry is None:
        return None
    queue = source.directory.find_queue(entry.index, channel)
    if queue is None:
        return [] if channel is None else None
    return peek_queue(source.queue(queue), state, count, source.directory.clients)


def _document(message: Peeked) -> dict[str, Any]:
    return {
        "id": message.id,
        "timestamp": message.timestamp,
        "attempts": message.attempts,
        "failures": message.failures,
        "state": message.state,
        "due": message.due,
        "client": message.client,
        "pid": message.pid,
        "since": message.since,
        "until": message.until,
        **property_fields(message.properties),
        **body_field(message.body),
    }


def _row(message: Peeked) -> list[str]:
    published = moment(message.timestamp)[5:]
    body = one_line(message.body, 60)
    return [message.id, published, str(message.attempts), str(len(message.body)), body]


def _row_in_flight(message: Peeked) -> list[str]:
    now = time.time_ns()
    since, until = message.since or now, message.until
    return [
        message.id,
        "gone" if message.pid is None else str(message.pid),
        "" if message.pid is None else command_name(message.pid, 16),
        age(max(now - since, 0) / 1e9),
        "never" if until is None else f"{(until - now) / 1e9:.1f}s",
        str(message.attempts),
        str(len(message.body)),
        one_line(message.body, 78),
    ]


def _row_deferred(message: Peeked) -> list[str]:
    due = ((message.due or 0) - time.time_ns()) / 1e9
    body = one_line(message.body, 60)
    return [
        message.id,
        moment(message.timestamp)[5:],
        f"{due:.1f}s",
        str(message.attempts),
        str(len(message.body)),
        body,
    ]


_TABLES = {
    "ready": (["ID", "PUBLISHED", "ATTEMPTS", "BYTES", "BODY"], _row),
    "in_flight": (
        ["ID", "PID", "COMMAND", "TAKEN", "DEADLINE", "ATTEMPTS", "BYTES", "BODY"],
        _row_in_flight,
    ),
    "deferred": (["ID", "PUBLISHED", "DUE IN", "ATTEMPTS", "BYTES", "BODY"], _row_deferred),
}

_STATE_WORDS = {
    "ready": "ready",
    "requeued": "ready after it was delivered or on disk",
    "in_flight": "in flight",
    "deferred": "deferred",
}
