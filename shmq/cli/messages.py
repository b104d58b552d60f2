"""`shmq pub`: publish messages from arguments or from lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

import click

import shmq
from shmq.cli.output import patience
from shmq.cli.parameters import complete_topic, duration, instance_option
from shmq.cli.status import OK
from shmq.errors import ShmqError
from shmq.names import check_name, lane_name

_BATCH_MESSAGES = 100
_CHUNK = 256 << 10  # bytes read at once
_LONG = 16 << 20  # bytes of input from which a progress bar is shown


def _properties(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str | bytes] | None:
    found: dict[str, str | bytes] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} has no '=': give NAME=VALUE")
        found[name] = os.fsencode(value)
    return found or None


@click.command()
@instance_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("message", nargs=-1)
@click.option(
    "--file", type=click.File("rb"), metavar="FILE", help="Read lines from FILE; -: from stdin."
)
@click.option("--defer", callback=duration, metavar="DURATION", help="Deliver this much later.")
@click.option(
    "--timeout",
    callback=duration,
    metavar="DURATION",
    help="Wait at most this long for room [for ever]; 0: do not wait.",
)
@click.option(
    "--property",
    "properties",
    multiple=True,
    callback=_properties,
    metavar="NAME=VALUE",
    help="Give every message this property; repeatable.",
)
@click.option("--priority", metavar="NAME", help="Publish to the topic TOPIC.NAME instead.")
def pub(
    instance: str,
    topic: str,
    message: tuple[str, ...],
    file: BinaryIO | None,
    defer: float | None,
    timeout: float | None,
    properties: dict[str, str | bytes] | None,
    priority: str | None,
) -> int:
    """Publish each MESSAGE, or each line of --FILE or stdin, to TOPIC. Empty lines are left out."""
    if message and file is not None:
        raise click.UsageError("give messages or --file, not both")
    if priority is not None:
        topic = lane_name(check_name(topic, "topic"), priority)
    with shmq.attach(instance) as broker:
        producer = broker.producer(topic)
        if message:
            with patience(f"waiting for room in {topic}"):
                bodies = [os.fsencode(text) for text in message]
                producer.publish_many(bodies, defer, timeout, properties)
            return OK
        source, done = sys.stdin.buffer if file is None else file, 0
        with _progress(source, topic) as advance:
            for batch, size in _batches(source):
                if batch:
                    try:
                        producer.publish_many(batch, defer, timeout, properties)
                    except ShmqError as exc:
                        raise type(exc)(f"{exc}; {_published(done, len(batch))}") from exc
                    done += len(batch)
                advance(size)
    return OK


def _published(done: int, tried: int) -> str:
    """How far a publish of lines came: `done` lines were published, and `tried` more at once were
    not."""
    if not done:
        return "nothing was published"
    return (
        f"the first {done} lines that are not empty were published, and the {tried} after them, "
        f"which go together, were not: go on with line {done + 1} of those"
    )


def _batches(source: BinaryIO) -> Iterator[tuple[list[bytes], int]]:
    """Lists of lines without their line ends, and for each list the bytes of input it completes. A
    list holds only what can be read without waiting, so that a pipe's lines are published at
    once."""
    rest = b""
    while chunk := source.read1(_CHUNK):  # type: ignore[attr-defined]
        *lines, rest = (rest + chunk).split(b"\n")
        bodies = [body for line in lines if (body := line.removesuffix(b"\r"))]
        for first in range(0, len(bodies), _BATCH_MESSAGES):
            yield bodies[first : first + _BATCH_MESSAGES], 0
        yield [], len(chunk)
    if rest:
        yield [rest], 0


@contextlib.contextmanager
def _progress(source: BinaryIO, topic: str) -> Iterator[Callable[[int], None]]:
    """Show progress on a terminal: a bar if the input is long and its length is known; a line if it
    is not; nothing while a person types the input. The function takes the bytes that are done."""
    size = 0
    with contextlib.suppress(OSError):
        size = os.fstat(source.fileno()).st_size
    if source.isatty() or not sys.stderr.isatty():
        yield lambda done: None
        return
    if size < _LONG:
        with patience(f"publishing to {topic}"):
            yield lambda done: None
        return
    with click.progressbar(length=size, label="publishing", file=sys.stderr) as bar:
        yield bar.update
