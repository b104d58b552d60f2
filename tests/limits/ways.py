"""The ways in: how each interface publishes, names a topic or a channel, and takes.

A refusal of the command line, of the TCP protocol or of HTTP is a `Refused` with the words that the
other side said.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import socket
from collections.abc import Callable
from typing import Any

from support.nsq_client import Client, mpub, sized
from support.processes import WATCHDOG

from limits.site import Site
from shmq.cli import main


class Refused(ValueError):
    """The words of the other side."""


def command(site: Site, *words: str) -> str:
    """Return the output of `shmq WORDS`. Raises Refused with its sentence if it fails."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main([*words, f"--instance={site.instance}"])
    assert "Traceback" not in errors.getvalue(), errors.getvalue()
    if status:
        raise Refused(errors.getvalue())
    return out.getvalue()


class _Http(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=WATCHDOG)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def web(site: Site, method: str, path: str, body: bytes = b"") -> bytes:
    """The body of an answer 200. Raises Refused."""
    with contextlib.closing(_Http(site.http)) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has read enough
            connection.request(method, path, body)
        try:
            answer = connection.getresponse()
            said = answer.read()
        except (ConnectionError, http.client.HTTPException):
            raise Refused("the connection ended without a word") from None
        if answer.status != 200:
            raise Refused(f"{answer.status} {said.decode()}")
        return said


@contextlib.contextmanager
def session(site: Site) -> Any:
    """A connection of the TCP protocol."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WATCHDOG)
    client = Client(sock)
    try:
        sock.connect(site.tcp)
        with contextlib.suppress(BrokenPipeError):  # a gateway with too many has closed it at once
            sock.sendall(b"  V2")
        yield client
    finally:
        client.close()


def said(client: Client, data: bytes) -> bytes:
    """The answer OK, or another response. Raises Refused."""
    try:
        try:
            answer = client.ask(data)
        except (BrokenPipeError, ConnectionResetError):  # it has read enough
            answer = client.frame()
    except ConnectionResetError:
        answer = None
    if answer is None:
        raise Refused("the connection ended without a word")
    if answer[0] == 1:
        raise Refused(answer[1].decode())
    return answer[1]


def tcp(site: Site, data: bytes) -> bytes:
    with session(site) as client:
        return said(client, data)


def identify(site: Site, **wishes: Any) -> Any:
    answer = tcp(site, b"IDENTIFY\n" + sized(json.dumps(wishes).encode()))
    return answer


def _many(site: Site, topic: str, body: bytes) -> None:
    site.broker.producer(topic).publish_many([b"x", body])


def _loan(site: Site, topic: str, body: bytes) -> None:
    with site.broker.producer(topic).loan(len(body)) as buffer:
        buffer[:] = body


def _deferred(site: Site, topic: str, body: bytes) -> None:
    site.broker.producer(topic).publish(body, defer=0.001)


def _remote(site: Site, topic: str, body: bytes) -> None:
    site.remote.producer(topic).publish(body)


def _remote_many(site: Site, topic: str, body: bytes) -> None:
    site.remote.producer(topic).publish_many([b"x", body])


def _command(site: Site, topic: str, body: bytes) -> None:
    command(site, "pub", topic, body.decode())


#: How a body is published to a topic.
PUBLISH: dict[str, Callable[[Site, str, bytes], object]] = {
    "publish": lambda site, topic, body: site.broker.producer(topic).publish(body),
    "publish_many": _many,
    "loan": _loan,
    "deferred": _deferred,
    "remote": _remote,
    "remote many": _remote_many,
    "shmq pub": _command,
    "PUB": lambda site, topic, body: tcp(site, b"PUB %s\n" % topic.encode() + sized(body)),
    "DPUB": lambda site, topic, body: tcp(site, b"DPUB %s 1\n" % topic.encode() + sized(body)),
    "MPUB": lambda site, topic, body: tcp(site, mpub(topic.encode(), [b"x", body])),
    "/pub": lambda site, topic, body: web(site, "POST", f"/pub?topic={topic}", body),
    "/mpub": lambda site, topic, body: web(site, "POST", f"/mpub?topic={topic}", b"x\n" + body),
}

#: How a topic gets into being.
TOPIC: dict[str, Callable[[Site, str], object]] = {
    "create_topic": lambda site, topic: site.broker.create_topic(topic),
    "producer": lambda site, topic: site.broker.producer(topic),
    "consumer": lambda site, topic: site.broker.consumer(topic, "c").close(),
    "configure": lambda site, topic: site.broker.configure(topic, "c", max_attempts=3),
    "lease_holder": lambda site, topic: site.broker.lease_holder(topic, "c", "h").close(),
    "remote create_topic": lambda site, topic: site.remote.create_topic(topic),
    "remote producer": lambda site, topic: site.remote.producer(topic),
    "remote consumer": lambda site, topic: _remote_consumer(site, topic),
    "shmq topic create": lambda site, topic: command(site, "topic", "create", topic),
    "shmq pub": lambda site, topic: command(site, "pub", topic, "x"),
    "PUB": lambda site, topic: tcp(site, b"PUB %s\n" % topic.encode() + sized(b"x")),
    "SUB": lambda site, topic: tcp(site, b"SUB %s c\n" % topic.encode()),
    "/pub": lambda site, topic: web(site, "POST", f"/pub?topic={topic}", b"x"),
    "/topic/create": lambda site, topic: web(site, "POST", f"/topic/create?topic={topic}"),
    "queue": lambda site, topic: _queue(site, topic),
}

#: How a channel of a topic gets into being.
CHANNEL: dict[str, Callable[[Site, str, str], object]] = {
    "create_channel": lambda site, topic, name: site.broker.create_channel(topic, name),
    "consumer": lambda site, topic, name: site.broker.consumer(topic, name).close(),
    "remote": lambda site, topic, name: site.remote.create_channel(topic, name),
    "shmq channel create": lambda site, topic, name: command(
        site, "channel", "create", topic, name
    ),
    "SUB": lambda site, topic, name: tcp(site, f"SUB {topic} {name}\n".encode()),
    "/channel/create": lambda site, topic, name: web(
        site, "POST", f"/channel/create?topic={topic}&channel={name}"
    ),
}


def _remote_consumer(site: Site, topic: str) -> None:
    with contextlib.closing(site.remote.consumer(topic, "c")) as made:
        made.take(0)


def _queue(site: Site, topic: str) -> None:
    import shmq

    shmq.Queue(broker=site.broker, name=topic).close()
