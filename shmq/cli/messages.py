"""`shmq pub`: publish lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

import click

import shmq
from shmq.cli import OK, complete_topic, instance_option
from shmq.cli.output import patience
from shmq.options import parse_duration

_BATCH_MESSAGES = 100
_CHUNK = 256 << 10  # bytes read at once
_LONG = 16 << 20  # bytes of input that are worth a progress bar


def _duration(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> float | None:
    try:
        return None if value is None else parse_duration(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc


@click.command()
@instance_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("message", nargs=-1)
@click.option("--file", type=click.File("rb"), metavar="FILE", help="Read lines there; -: stdin.")
@click.option("--defer", callback=_duration, metavar="DURATION", help="Deliver this much later.")
@click.option(
    "--timeout",
    callback=_duration,
    metavar="DURATION",
    help="Wait so long for room [for ever]; 0: not at all.",
)
def pub(
    instance: str,
    topic: str,
    message: tuple[str, ...],
    file: BinaryIO | None,
    defer: float | None,
    timeout: float | None,
) -> int:
    """Publish each MESSAGE, or each line of --FILE or stdin, to TOPIC. Empty lines are left out."""
    if message and file is not None:
        raise click.UsageError("give messages or --file, not both")
    with shmq.attach(instance) as broker:
        producer = broker.producer(topic)
        if message:
            with patience(f"waiting for room in {topic}"):
                producer.publish_many([os.fsencode(text) for text in message], defer, timeout)
            return OK
        source = sys.stdin.buffer if file is None else file
        with _progress(source) as advance:
            for batch, size in _batches(source):
                if batch:
                    producer.publish_many(batch, defer, timeout)
                advance(size)
    return OK


def _batches(source: BinaryIO) -> Iterator[tuple[list[bytes], int]]:
    """What can be read without waiting, as lines without their ends; and how many bytes it was."""
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
def _progress(source: BinaryIO) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, if the input is long and its length is known."""
    size = 0
    with contextlib.suppress(OSError):
        size = os.fstat(source.fileno()).st_size
    if size < _LONG or not sys.stderr.isatty():
        yield lambda done: None
        return
    with click.progressbar(length=size, label="publishing", file=sys.stderr) as bar:
        yield bar.update
