"""`shmq forward`: move a channel's messages to NATS JetStream, Kafka or anything that speaks NSQ;
and messages of JetStream or Kafka into a topic."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import shlex
import signal
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

import shmq
from shmq.cli.output import print_json, progress, say
from shmq.cli.parameters import (
    complete_channel,
    complete_topic,
    instance_option,
    json_option,
    read_token,
    token_option,
)
from shmq.cli.status import INTERRUPTED, OK, REFUSED
from shmq.printing import printable

if TYPE_CHECKING:
    from shmq.forward import Stopped
    from shmq.forward.loop import Loop
    from shmq.remote import RemoteBroker

_EVERY = 2.0  # seconds between two progress lines
#: Parameters that are left out when the command is shown again.
_ONCE = frozenset({"refused", "until_empty", "as_json", "metrics_address"})


@click.command()
@instance_option
@json_option
@click.argument("topic", shell_complete=complete_topic)
@click.argument("channel", shell_complete=complete_channel, required=False)
@click.argument("target", required=False)
@click.option(
    "--from",
    "address",
    metavar="HOST:PORT|URL",
    help="HOST:PORT: forward from the broker whose gateway listens there, over the network. "
    "nats://... or kafka://...: the way back, from there into TOPIC.",
)
@click.option(
    "--login",
    metavar="FILE",
    envvar="SHMQ_FORWARD_LOGIN",
    help="File with the password, the key and the certificates for NATS, or with librdkafka's "
    "settings for Kafka: NAME = VALUE lines, or NATS's .creds [$SHMQ_FORWARD_LOGIN].",
)
@token_option("the gateway of --from")
@click.option("--tls", is_flag=True, help="Speak TLS with the gateway of --from, and verify it.")
@click.option(
    "--create",
    is_flag=True,
    help="Make the stream, or Kafka's topics, if missing: on files, one replica in JetStream.",
)
@click.option("--until-empty", is_flag=True, help="End when there is no message that can be taken.")
@click.option(
    "--batch",
    type=click.IntRange(1, 4999),
    metavar="N",
    help="Messages of one batch, at most [999, into Kafka 4999].",
)
@click.option(
    "--refused",
    type=click.Choice(["stop", "dead", "skip"]),
    default="stop",
    show_default=True,
    help="What to do with a message that the other side never takes, for its size or its headers: "
    "stop and say how to go on; make it a dead letter of the channel; or leave it out.",
)
@click.option(
    "--bodies-only",
    is_flag=True,
    help="Leave out properties; without it they travel as headers to NATS and Kafka, and back.",
)
@click.option(
    "--host",
    metavar="NAME",
    help="Name of this host for the target, if its host name may change [host name, or --from].",
)
@click.option(
    "--metrics-address",
    metavar="HOST:PORT",
    help="Answer GET /metrics there, in Prometheus' text format.",
)
def forward(
    instance: str,
    as_json: bool,
    topic: str,
    channel: str | None,
    target: str | None,
    address: str | None,
    login: str | None,
    token_file: str | None,
    tls: bool,
    create: bool,
    until_empty: bool,
    batch: int | None,
    refused: str,
    bodies_only: bool,
    host: str | None,
    metrics_address: str | None,
) -> int:
    """Move the messages of TOPIC's CHANNEL to TARGET, until SIGTERM or Ctrl-C.

    TARGET nats://HOST:4222/STREAM?subject=SUBJECT is a stream of NATS JetStream and
    kafka://HOST:9092/TOPIC a topic of Kafka, which get every message once. TARGET
    nsq://HOST:4150/TOPIC is an nsqd, or anything that speaks its protocol, which gets every message
    at least once. While the target is away the messages wait. Forward a channel that nobody else
    consumes.

    Without CHANNEL and TARGET, and with --from=nats://HOST:4222/STREAM or
    --from=kafka://HOST:9092/TOPIC, it moves messages from there into TOPIC, each once.
    """
    from shmq.forward.login import read_login
    from shmq.forward.origin import is_origin

    held = {} if login is None else read_login(login)
    words = _Words(until_empty, as_json, _split(metrics_address), refused, bodies_only)
    if tls and (address is None or is_origin(address)):
        raise ValueError("--tls is for --from=HOST:PORT; a --login says how NATS and Kafka use it")
    if address is not None and is_origin(address):
        if channel is not None or create:
            raise ValueError(f"from {address.partition('://')[0]} only the TOPIC is named")
        if refused == "dead":
            raise ValueError(
                "--refused=dead needs a channel whose dead letters they become: on the way back "
                "give --refused=stop or skip"
            )
        return _back(instance, topic, address, held, host, batch, words)
    if channel is None or target is None:
        raise ValueError("name the CHANNEL and the TARGET; or --from=nats://... for the way back")
    gateway = None if address is None else _Gateway(address, tls, read_token(token_file))
    return _there(instance, (topic, channel, target), gateway, held, host, batch, create, words)


@dataclasses.dataclass(frozen=True)
class _Gateway:
    """The gateway of --from."""

    address: str
    tls: bool
    token: str | None = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class _Words:
    """The options that both directions have."""

    until_empty: bool
    as_json: bool
    metrics: tuple[str, int] | None
    refused: str
    bodies_only: bool


def _split(address: str | None) -> tuple[str, int] | None:
    if address is None:
        return None
    from shmq.gateway.listeners import split_address

    found = split_address(address)
    if found is None:
        raise ValueError(f"--metrics-address must be HOST:PORT, not {address!r}")
    return found[0] or "0.0.0.0", found[1]


def _there(
    instance: str,
    names: tuple[str, str, str],
    gateway: _Gateway | None,
    login: dict[str, str],
    host: str | None,
    batch: int | None,
    create: bool,
    words: _Words,
) -> int:
    """From a channel to a target."""
    from shmq.forward import Forwarder, open_target
    from shmq.forward.letters import Letters
    from shmq.forward.target import Source

    topic, channel, target = names
    if gateway is not None and words.refused == "dead":
        raise ValueError(
            "--refused=dead needs the broker's own host: forward there, or give --refused=stop or "
            "skip"
        )
    with _broker(instance, gateway, names, login) as broker:
        own = socket.gethostname() if gateway is None else gateway.address
        source = Source(host or own, broker.instance, topic, channel)
        to = open_target(target, source, create, login)
        # A lease that is stored and not finished must wait for this name, however long that takes.
        with broker.lease_holder(topic, channel, "forward", ttl=None) as holder:
            identity = broker.channel_identity(topic, channel)

            def depth() -> int:
                return broker.channel_depth(topic, channel)

            letters = None
            if isinstance(broker, shmq.Broker) and words.refused == "dead":
                letters = Letters(broker, topic, channel, identity)
            forwarder = Forwarder(
                holder,
                identity,
                depth,
                source,
                to,
                batch,
                words.refused,
                letters,
                words.bodies_only,
            )
            labels = {"broker": broker.instance, "topic": topic, "channel": channel}
            return _run(forwarder, (f"{topic}/{channel}", str(to)), labels, words, depth)


def _back(
    instance: str,
    topic: str,
    url: str,
    login: dict[str, str],
    host: str | None,
    batch: int | None,
    words: _Words,
) -> int:
    """From another system to a topic."""
    from shmq.forward import Receiver, open_origin
    from shmq.forward.origin import Sink

    with shmq.attach(instance) as broker:
        sink = Sink(host or socket.gethostname(), broker.instance, topic)
        origin = open_origin(url, sink, login, words.bodies_only)
        receiver = Receiver(broker, topic, origin, batch, words.refused)
        labels = {"broker": broker.instance, "topic": topic, "channel": ""}
        return _run(receiver, (str(origin), topic), labels, words, None)


def _run(
    loop: Loop,
    ends: tuple[str, str],
    labels: dict[str, str],
    words: _Words,
    depth: Callable[[], int] | None,
) -> int:
    """Run until the end, and say what was done. ends: from where, to where."""
    from shmq.forward import Stopped

    stopped: Stopped | None = None
    with contextlib.ExitStack() as stack:
        if words.metrics is not None:
            from shmq.forward.metrics import served

            far = ends[0] if labels["channel"] == "" else ends[1]
            stack.enter_context(served(loop, {**labels, "peer": far}, *words.metrics))
        interrupted = stack.enter_context(_signals(loop))
        stack.enter_context(_shown(loop, depth))
        try:
            loop.run(words.until_empty, _log)
        except Stopped as exc:
            stopped = exc
    if stopped is not None:
        _explain(stopped, labels["channel"])
        if words.as_json:
            _sum_up(loop, True, *ends)
        return REFUSED
    _sum_up(loop, words.as_json, *ends)
    return INTERRUPTED if interrupted.is_set() else OK


def _log(text: str) -> None:
    say(f"shmq: {printable(text)}", err=True)


def _explain(stopped: Stopped, channel: str) -> None:
    """Say on stderr why a forwarder stopped, and the commands that get past the message."""
    _log(str(stopped))
    _log(
        f"nothing is lost: {stopped.waits}; raise that limit and start the same again, or get past "
        "it by one of these, which end when there is nothing left:"
    )
    command, is_short = _again()
    ways = {"--refused=skip": "leaves out what is refused"}
    if stopped.refusal.of_headers:
        ways["--bodies-only"] = "leaves out the properties of all"
    if channel and not any(word.startswith("--from=") for word in command):
        ways["--refused=dead"] = "makes a dead letter of what is refused, see `shmq dead ls`"
    for option, what in reversed(ways.items()):
        words = [*command, option, "--until-empty"]
        say(f"  {printable(shlex.join(words))}  # {what}", err=True)
    if is_short:
        _log("put the user and the password into the address again; they are not shown here")


def _again() -> tuple[list[str], bool]:
    """The words of this command without its options of one run, and whether a password was left out
    of them."""
    context = click.get_current_context()
    found, is_short = ["shmq", "forward"], False
    options: list[str] = []
    for each in context.command.params:
        name = each.name or ""
        value = context.params.get(name)
        is_given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if value in (None, False) or name in _ONCE or not (is_given or name == "instance"):
            continue
        text = str(value)
        if "://" in text and "@" in text:
            place = urllib.parse.urlsplit(text)
            text = place._replace(netloc=place.netloc.rpartition("@")[2]).geturl()
            is_short = True
        if isinstance(each, click.Option):
            options.append(each.opts[0] if each.is_flag else f"{each.opts[0]}={text}")
        else:
            found.append(text)
    return found + options, is_short


def _broker(
    instance: str, gateway: _Gateway | None, ends: tuple[str, ...], login: dict[str, str]
) -> shmq.Broker | RemoteBroker:
    """The broker to forward from. A broker on another host knows the forwarder again by its ends
    and what it logs in with there and at the target, so the next run has the leases of this one."""
    if gateway is None:
        return shmq.attach(instance)
    known = [f"{name}={login[name]}" for name in sorted(login)]
    if gateway.token is not None:
        known.append(f"gateway={gateway.token}")
    data = "\0".join((*ends, *known)).encode("utf-8", "surrogateescape")
    secret = hashlib.blake2b(data, digest_size=16).hexdigest()
    token = None if gateway.token is None else gateway.token.encode("utf-8", "surrogateescape")
    return shmq.connect(gateway.address, tls=gateway.tls or None, token=token, secret=secret)


@contextlib.contextmanager
def _signals(loop: Loop) -> Iterator[threading.Event]:
    """Have SIGTERM and Ctrl-C end the forwarder in order, and the same signal again at once. The
    event that is yielded is set by Ctrl-C."""
    interrupted = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        loop.stop()
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
def _shown(loop: Loop, depth: Callable[[], int] | None) -> Iterator[None]:
    """Show progress on stderr while the block runs, if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        before = 0
        while not done.wait(_EVERY):
            now = loop.progress.messages
            line = f"{(now - before) / _EVERY:,.0f} messages/s, {now:,} in all"
            if depth is not None:
                with contextlib.suppress(shmq.ShmqError):
                    line += f", {depth():,} wait"
            progress(line)
            before = now
        progress()

    thread = threading.Thread(target=show, name="shmq-forward-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _sum_up(loop: Loop, as_json: bool, source: str, target: str) -> None:
    done = loop.progress
    if as_json:
        print_json({"from": source, "to": target, **dataclasses.asdict(done)})
        return
    rate = done.messages / done.seconds if done.seconds else 0.0
    text = (
        f"{done.messages:,} messages forwarded to {target} in {done.seconds:.1f} s ({rate:,.0f}/s)"
    )
    if done.resumed:
        text += f"; {done.resumed:,} were there already"
    if done.skipped:
        text += f"; {done.skipped:,} without a body, or refused, were left out"
    if done.dead:
        text += f"; {done.dead:,} that were refused are dead letters"
    say(text)
