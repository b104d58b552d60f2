"""Programs of nsqd's clients, on a real nsqd and on `shmq serve --nsqd`.

Several connections and HTTP say commands in one order, whole and broken ones. A model knows how
many messages each consumer has then, so a program waits for these and for nothing else.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from differ.machine import Unfit

GOES_ON = False
LARGEST = 4000  # --max-msg-size
SIZES = (8, 8, 100, 1000, LARGEST - 1, LARGEST)
FLAGS = (f"--max-msg-size={LARGEST}", "--max-body-size=20000", "--mem-queue-size=1000")
#: Commands that both servers refuse, and close the connection of.
BROKEN = {
    "long": b"PUB %(t)s\n" + struct.pack(">i", LARGEST + 1),
    "empty": b"PUB %(t)s\n" + struct.pack(">i", 0),
    "negative": b"PUB %(t)s\n" + struct.pack(">i", -1),
    "name": b"PUB bad!name\n" + struct.pack(">i", 1) + b"x",
    "no name": b"PUB\n",
    "unknown": b"HELLO\n",
    "lower": b"pub %(t)s\n",
    "rdy": b"RDY 2501\n",
    "rdy word": b"RDY many\n",
    "rdy negative": b"RDY -1\n",
    "delay": b"DPUB %(t)s 3600001\n" + struct.pack(">i", 1) + b"x",
    "delay word": b"DPUB %(t)s soon\n" + struct.pack(">i", 1) + b"x",
    "mpub none": b"MPUB %(t)s\n" + struct.pack(">ii", 4, 0),
    "mpub short": b"MPUB %(t)s\n" + struct.pack(">iii", 8, 1, 0),
    "mpub large": b"MPUB %(t)s\n" + struct.pack(">i", 20_001),
    "fin short": b"FIN 1\n",
    "fin none": b"FIN\n",
    "touch none": b"TOUCH\n",
    "req none": b"REQ 0123456789abcdef\n",
    "req word": b"REQ 0123456789abcdef soon\n",
    "auth": b"AUTH\n" + struct.pack(">i", 1) + b"x",
    "sub none": b"SUB %(t)s\n",
    "sub name": b"SUB %(t)s bad!\n",
    "identify": b"IDENTIFY\n" + struct.pack(">i", 3) + b"{x}",
    "identify none": b"IDENTIFY\n" + struct.pack(">i", 0),
}
#: Requests that both refuse.
REQUESTS = (
    "/pub",
    "/pub?topic=bad!",
    "/pub?topic=%(t)s&defer=x",
    "/pub?topic=%(t)s&defer=-1",
    "/mpub?topic=%(t)s&binary=true",
    "/topic/create",
    "/topic/create?topic=bad!",
    "/topic/delete?topic=none",
    "/topic/empty?topic=none",
    "/topic/pause?topic=none",
    "/channel/create?topic=none&channel=c",
    "/channel/create?topic=%(t)s",
    "/channel/delete?topic=%(t)s&channel=none",
    "/channel/empty?topic=%(t)s&channel=none",
    "/channel/pause?topic=%(t)s",
    "/nothing",
    "/config/nothing",
)
ODD = ("FIN", "TOUCH", "REQ")


# ---- the model ----


@dataclass
class Channel:
    waiting: list[str] = field(default_factory=list)
    consumer: int | None = None
    paused: bool = False


@dataclass
class Topic:
    backlog: list[str] = field(default_factory=list)
    channels: dict[str, Channel] = field(default_factory=dict)


@dataclass
class Client:
    channel: tuple[int, str] | None = None
    ready: int = 0
    held: list[str] = field(default_factory=list)
    identified: bool = False
    open: bool = True


class Model:
    """The messages that each consumer holds, step by step."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.topics: dict[int, Topic] = {}
        self.clients = [Client() for _ in range(program["clients"])]
        self.arrived: list[tuple[int, str]] = []
        """Client and body of each message that the last step lets arrive."""

    def apply(self, number: int, step: list[Any]) -> None:
        self.arrived = []
        name, *args = step
        getattr(self, f"_{name}")(number, *args)
        for index, client in enumerate(self.clients):
            if client.open and client.channel:
                channel = self._channel(client.channel)
                while channel.waiting and not channel.paused and len(client.held) < client.ready:
                    client.held.append(channel.waiting.pop(0))
                    self.arrived.append((index, client.held[-1]))

    def _channel(self, name: tuple[int, str]) -> Channel:
        return self.topics[name[0]].channels[name[1]]

    def _open(self, index: int) -> Client:
        if not self.clients[index].open:
            raise Unfit
        return self.clients[index]

    def _add(self, topic: int, bodies: list[str]) -> None:
        of = self.topics.setdefault(topic, Topic())
        if not of.channels:
            of.backlog += bodies
        for channel in of.channels.values():
            channel.waiting += bodies

    def _make(self, topic: int, name: str) -> Channel:
        of = self.topics.setdefault(topic, Topic())
        if name not in of.channels:
            of.channels[name] = Channel(of.backlog)
            of.backlog = []
        return of.channels[name]

    def _identify(self, number: int, index: int) -> None:
        client = self._open(index)
        if client.channel:
            raise Unfit
        client.identified = True

    def _pub(self, number: int, index: int, topic: int, size: int) -> None:
        self._open(index)
        self._add(topic, [body_of(number, 0, size)])

    def _mpub(self, number: int, index: int, topic: int, count: int) -> None:
        self._open(index)
        self._add(topic, [body_of(number, each, 8) for each in range(count)])

    def _post(self, number: int, topic: int, size: int) -> None:
        self._add(topic, [body_of(number, 0, size)])

    def _create(self, number: int, topic: int, name: str) -> None:
        self._make(topic, name)

    def _pause(self, number: int, topic: int, name: str, on: bool) -> None:
        channel = self.topics.get(topic, Topic()).channels.get(name)
        if channel is None:
            raise Unfit
        channel.paused = on

    def _empty(self, number: int, topic: int, name: str) -> None:
        channel = self.topics.get(topic, Topic()).channels.get(name)
        if channel is None or channel.consumer is not None:
            raise Unfit
        channel.waiting = []

    def _sub(self, number: int, index: int, topic: int, name: str) -> None:
        client = self._open(index)
        channel = self._make(topic, name)
        if client.channel or channel.consumer is not None:
            raise Unfit
        channel.consumer, client.channel = index, (topic, name)

    def _rdy(self, number: int, index: int, count: int) -> None:
        client = self._open(index)
        if not client.channel:
            raise Unfit
        client.ready = count

    def _fin(self, number: int, index: int) -> None:
        client = self._open(index)
        if not client.held:
            raise Unfit
        client.held.pop(0)

    def _touch(self, number: int, index: int) -> None:
        if not self._open(index).held:
            raise Unfit

    def _req(self, number: int, index: int) -> None:
        client = self._open(index)
        if not client.held or not client.channel:
            raise Unfit
        self._channel(client.channel).waiting.append(client.held.pop(0))

    def _odd(self, number: int, index: int, name: str) -> None:
        if not self._open(index).channel:
            raise Unfit

    def _broken(self, number: int, index: int, name: str) -> None:
        self._close(number, index)
        if name.startswith("sub") and self.clients[index].channel:
            raise Unfit

    def _request(self, number: int, path: str) -> None:
        if "%(t)s" in path:
            self.topics.setdefault(0, Topic())

    def _depth(self, number: int, topic: int, name: str) -> None:
        if name not in self.topics.get(topic, Topic()).channels:
            raise Unfit

    def _close(self, number: int, index: int) -> None:
        client = self._open(index)
        if client.held:
            raise Unfit  # nsqd keeps them until their time is over
        client.open = False
        if client.channel:
            self._channel(client.channel).consumer = None


def body_of(number: int, each: int, size: int) -> str:
    return f"{number}.{each}".ljust(size, "x")


# ---- drawing ----


def a_step(rng: random.Random, program: dict[str, Any]) -> list[Any]:
    index, topic = rng.randrange(program["clients"]), rng.randrange(2)
    name = rng.choice("ab")
    what = rng.choice(
        ["pub", "post", "fin", "sub", "rdy"] * 3
        + ["mpub", "req", "touch", "identify", "create", "pause", "depth", "request", "odd"] * 2
        + ["broken", "close", "empty"]
    )
    return [
        what,
        *{
            "pub": lambda: (index, topic, rng.choice(SIZES)),
            "post": lambda: (topic, rng.choice(SIZES)),
            "mpub": lambda: (index, topic, rng.randrange(1, 6)),
            "sub": lambda: (index, topic, name),
            "rdy": lambda: (index, rng.choice((0, 1, 1, 2, 5, 2500))),
            "create": lambda: (topic, name),
            "pause": lambda: (topic, name, rng.random() < 0.5),
            "depth": lambda: (topic, name),
            "empty": lambda: (topic, name),
            "request": lambda: (rng.choice(REQUESTS),),
            "odd": lambda: (index, rng.choice(ODD)),
            "broken": lambda: (index, rng.choice(list(BROKEN))),
        }.get(what, lambda: (index,))(),
    ]


def draw(rng: random.Random) -> dict[str, Any]:
    program: dict[str, Any] = {"clients": rng.choice((1, 2, 3, 4))}
    steps: list[Any] = []
    wanted, tries = rng.choice((5, 15, 40)), 0
    while len(steps) < wanted and tries < 400:
        tries += 1
        step = a_step(rng, program)
        try:
            walked(program, [*steps, step])
        except Unfit:
            continue
        steps.append(step)
    return program | {"steps": steps}


def walked(program: dict[str, Any], steps: list[Any]) -> Model:
    model = Model(program)
    for number, step in enumerate(steps):
        model.apply(number, step)
    return model


def smaller(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Programs with fewer steps."""
    steps = program["steps"]
    size = max(len(steps) // 2, 1)
    while size:
        for start in range(0, len(steps), size):
            yield program | {"steps": steps[:start] + steps[start + size :]}
        size //= 2


def plan(program: dict[str, Any]) -> list[tuple[int, str, str]]:
    walked(program, program["steps"])
    found = []
    for number, (name, *args) in enumerate(program["steps"]):
        what = f" {args[-1]}" if name in ("broken", "odd", "request") else ""
        found.append((number, name + what, ""))
    return found


# ---- running ----

_server: Any = None
_directory: Any = None


def begin(side: str) -> None:
    """Start the server of this side, for all of its programs."""
    global _server, _directory
    from support.nsq_client import Server

    _directory = tempfile.TemporaryDirectory(prefix="differ-")
    kind = "nsqd" if side == "original" else "shmq"
    instance = f"differ-{os.getpid()}-{secrets.token_hex(4)}"
    _server = Server(kind, Path(_directory.name), instance, *FLAGS)


def end(side: str) -> None:
    """Stop it."""
    from support.processes import remove_instance

    _server.close()
    remove_instance(_server.instance)
    _directory.cleanup()


def run(side: str, program: dict[str, Any], say: Callable[..., None]) -> None:
    Program(program).run(say)


class Program:
    """The clients, in one process."""

    def __init__(self, program: dict[str, Any]) -> None:
        self.program, self.model = program, Model(program)
        self.prefix = secrets.token_hex(6)
        self.clients = [_server.connect() for _ in range(program["clients"])]
        self.held: list[list[Any]] = [[] for _ in self.clients]
        self.early: list[list[Any]] = [[] for _ in self.clients]
        """Messages that came before the answer to a command."""

    def topic(self, number: int) -> str:
        return f"{self.prefix}-{number}"

    def text(self, data: bytes) -> str:
        return data.decode(errors="replace").replace(self.prefix, "T")

    def run(self, say: Callable[..., None]) -> None:
        for number, step in enumerate(self.program["steps"]):
            self.model.apply(number, step)
            name, *args = step
            answer = str(getattr(self, f"_{name}")(number, *args))
            got = self._messages()
            say(number, f"{answer} {got}" if got else answer)
        for each in self.clients:
            each.close()
        for topic in self.model.topics:
            _server.post("/topic/delete", topic=self.topic(topic))

    def _messages(self) -> str:
        found = []
        for index, _ in self.model.arrived:
            if self.early[index]:
                delivery = self.early[index].pop(0)
            else:
                delivery = self.clients[index].delivery()
            self.held[index].append(delivery)
            body = delivery.body.decode()
            found.append(f"{body.rstrip('x')}/{len(body)}*{delivery.attempts}")
        return " ".join(found)

    def _ask(self, index: int, data: bytes) -> str:
        from support.nsq_client import MESSAGE, Delivery

        answer = self.clients[index].ask(data)
        while answer is not None and answer[0] == MESSAGE:
            self.early[index].append(Delivery.parse(answer[1]))
            answer = self.clients[index].frame()
        return "the end" if answer is None else f"{answer[0]} {self.text(answer[1])}"

    def _said(self, index: int) -> str:
        """Wait until the server has done what was said without an answer. The goroutine of nsqd
        that sends messages looks at it a moment later, and shows that to nobody."""
        self._ask(index, b"TOUCH 0123456789abcdef\n")
        time.sleep(0.003)
        return "said"

    def _gone(self, index: int) -> None:
        """Wait until the channel of a client that has closed has none."""
        from support.processes import eventually

        channel = self.model.clients[index].channel
        if channel is not None:
            of = self.topic(channel[0]), channel[1]
            eventually(lambda: not _server.channel(*of)["clients"])

    def _identify(self, number: int, index: int) -> str:
        return self._ask(index, b"IDENTIFY\n" + struct.pack(">i", 2) + b"{}")

    def _pub(self, number: int, index: int, topic: int, size: int) -> str:
        body = body_of(number, 0, size).encode()
        line = f"PUB {self.topic(topic)}\n".encode()
        return self._ask(index, line + struct.pack(">i", len(body)) + body)

    def _mpub(self, number: int, index: int, topic: int, count: int) -> str:
        from support.nsq_client import mpub

        bodies = [body_of(number, each, 8).encode() for each in range(count)]
        return self._ask(index, mpub(self.topic(topic).encode(), bodies))

    def _http(self, path: str, body: bytes = b"") -> str:
        reply = _server.http("POST", path, body)
        return f"{reply.status} {self.text(reply.body)}"

    def _post(self, number: int, topic: int, size: int) -> str:
        return self._http(f"/pub?topic={self.topic(topic)}", body_of(number, 0, size).encode())

    def _create(self, number: int, topic: int, name: str) -> str:
        topics = self._http(f"/topic/create?topic={self.topic(topic)}")
        return topics + self._http(f"/channel/create?topic={self.topic(topic)}&channel={name}")

    def _pause(self, number: int, topic: int, name: str, on: bool) -> str:
        word = "pause" if on else "unpause"
        answer = self._http(f"/channel/{word}?topic={self.topic(topic)}&channel={name}")
        time.sleep(0.003)
        return answer

    def _empty(self, number: int, topic: int, name: str) -> str:
        from support.processes import eventually

        eventually(lambda: not _server.topic(self.topic(topic))["depth"])
        return self._http(f"/channel/empty?topic={self.topic(topic)}&channel={name}")

    def _depth(self, number: int, topic: int, name: str) -> str:
        """The counts of a channel, when they have settled."""
        from support.processes import eventually

        channel = self.model.topics[topic].channels[name]
        consumer = None if channel.consumer is None else self.model.clients[channel.consumer]
        wanted = [len(channel.waiting), len(consumer.held) if consumer else 0, channel.paused]

        def seen() -> list[Any]:
            of = _server.channel(self.topic(topic), name)
            return [of["depth"], of["in_flight_count"], of["paused"]]

        with contextlib.suppress(AssertionError):
            eventually(lambda: seen() == wanted, 10)
        return str(seen())

    def _sub(self, number: int, index: int, topic: int, name: str) -> str:
        return self._ask(index, f"SUB {self.topic(topic)} {name}\n".encode())

    def _rdy(self, number: int, index: int, count: int) -> str:
        self.clients[index].send(b"RDY %d\n" % count)
        return self._said(index)

    def _fin(self, number: int, index: int) -> str:
        self.clients[index].send(b"FIN %b\n" % self.held[index].pop(0).id)
        return self._said(index)

    def _touch(self, number: int, index: int) -> str:
        self.clients[index].send(b"TOUCH %b\n" % self.held[index][0].id)
        return self._said(index)

    def _req(self, number: int, index: int) -> str:
        self.clients[index].send(b"REQ %b 0\n" % self.held[index].pop(0).id)
        return self._said(index)

    def _odd(self, number: int, index: int, name: str) -> str:
        """About a message that there is not; the connection stays."""
        tail = b" 0" if name == "REQ" else b""
        return self._ask(index, b"%b 0123456789abcdef%b\n" % (name.encode(), tail))

    def _broken(self, number: int, index: int, name: str) -> str:
        client = self.clients[index]
        answer = self._ask(index, BROKEN[name].replace(b"%(t)s", self.topic(0).encode()))
        answer = f"{answer} {client.ended()}"
        self._gone(index)
        return answer

    def _request(self, number: int, path: str) -> str:
        if "%(t)s" in path:
            self._http(f"/topic/create?topic={self.topic(0)}")
        return self._http(path.replace("%(t)s", self.topic(0)))

    def _close(self, number: int, index: int) -> str:
        self.clients[index].close()
        self._gone(index)
        return "closed"


WITNESSES: list[Any] = []
