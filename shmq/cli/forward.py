"""`shmq forward`: move a channel's messages to NATS JetStream or to anything that speaks NSQ."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

import shmq
from shmq.cli.output import print_json
from shmq.cli.parameters import complete_channel, complete_topic, instance_option, json_option
from shmq.cli.status import INTERRUPTED, OK

if TYPE_CHECKING:
    from shmq.forward import Forwarder
    from shmq.remote import RemoteBroker

_EVERY = 2.0  # seconds between two progress lines


@click.command()
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel)
@click.argument("target")
@click.option(
    "--from",
    "address",
    metavar="HOST:PORT",
    help="Forward from the broker whose gateway listens there, over the network.",
)
@click.option(
    "--create", is_flag=True, help="Make the stream if it is missing: on files, one replica."
)
@click.option(
    "--until-empty", is_flag=True, help="End when the channel has no message that can be taken."
)
@click.option(
    "--batch",
    type=click.IntRange(1, 999),
    metavar="N",
    default=999,
    show_default=True,
    help="Messages of one batch, at most.",
)
@click.option(
    "--host",
    metavar="NAME",
    help="Name of this host in the marker, if its host name may change [host name, or --from].",
)
def forward(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str,
    target: str,
    address: str | None,
    create: bool,
    until_empty: bool,
    batch: int,
    host: str | None,
) -> int:
    """Move the messages of TOPIC's CHANNEL to TARGET, until SIGTERM or Ctrl-C.

    TARGET nats://[USER:PASSWORD@]HOST:4222/STREAM?subject=SUBJECT is a stream of NATS JetStream,
    which gets every message once. TARGET nsq://HOST:4150/TOPIC is an nsqd, or anything that speaks
    its protocol, which gets every message at least once. While the target is away the messages
    wait. Forward a channel that nobody else consumes.
    """
    from shmq.forward import Forwarder, open_target
    from shmq.forward.target import Source

    with _broker(instance, address) as broker:
        source = Source(host or address or socket.gethostname(), broker.instance, topic, channel)
        to = open_target(target, source, create)
        # A lease that is stored and not finished must wait for this name, however long that takes.
        with broker.lease_holder(topic, channel, "forward", ttl=None) as holder:
            identity = broker.channel_identity(topic, channel)

            def depth() -> int:
                return broker.channel_depth(topic, channel)

            forwarder = Forwarder(holder, identity, depth, source, to, batch)
            with _signals(forwarder) as interrupted, _shown(forwarder, depth):
                forwarder.run(until_empty, lambda text: click.echo(f"shmq: {text}", err=True))
    _sum_up(forwarder, as_json, f"{topic}/{channel}", str(to))
    return INTERRUPTED if interrupted.is_set() else OK


def _broker(instance: str, address: str | None) -> shmq.Broker | RemoteBroker:
    return shmq.attach(instance) if address is None else shmq.connect(address)


@contextlib.contextmanager
def _signals(forwarder: Forwarder) -> Iterator[threading.Event]:
    """Have SIGTERM and Ctrl-C end the forwarder in order, and the same signal again at once. The
    event that is yielded is set by Ctrl-C."""
    interrupted = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        forwarder.stop()
        if number == signal.SIGINT:
            interrupted.set()
        signal.signal(number, before[signal.Signals(number)])

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, end)
    try:
        yield interrupted
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _shown(forwarder: Forwarder, depth: Callable[[], int]) -> Iterator[None]:
    """Show progress on stderr while the block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        before = 0
        while not done.wait(_EVERY):
            now = forwarder.progress.messages
            waiting = "?"
            with contextlib.suppress(shmq.ShmqError):
                waiting = f"{depth():,}"
            line = f"{(now - before) / _EVERY:,.0f} messages/s, {now:,} in all, {waiting} wait"
            click.echo(f"\r{line}\x1b[K", nl=False, err=True)
            before = now
        click.echo("\r\x1b[K", nl=False, err=True)

    thread = threading.Thread(target=show, name="shmq-forward-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _sum_up(forwarder: Forwarder, as_json: bool, source: str, target: str) -> None:
    done = forwarder.progress
    if as_json:
        print_json({"from": source, "to": target, **dataclasses.asdict(done)})
        return
    rate = done.messages / done.seconds if done.seconds else 0.0
    text = (
        f"{done.messages:,} messages forwarded to {target} in {done.seconds:.1f} s ({rate:,.0f}/s)"
    )
    if done.resumed:
        text += f"; {done.resumed:,} were there already"
    click.echo(text)
