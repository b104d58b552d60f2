"""Registration of this instance's topics and channels with nsqlookupds, and requests for the
channels of new topics (nsqio/nsq nsqd/lookup.go, lookup_peer.go). One gateway process does it for
the whole instance."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import socket
import struct
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from shmq.door.seldom import Seldom
from shmq.gateway import auth
from shmq.gateway.context import Context
from shmq.gateway.listeners import split_address
from shmq.names import is_ephemeral, valid_name
from shmq.nsqd import NSQD_VERSION
from shmq.options import Options
from shmq.peers.documents import BadAnswer, listed, number, parsed, table, text
from shmq.printing import printable, said

_MAGIC: Final = b"  V1"
_SECONDS: Final = 1.0  # to connect, to write, to read
_PING_EVERY: Final = 15.0
_LOOK_EVERY: Final = 0.05  # seconds between two looks at whether the directory has changed
#: Bytes of an answer, and channels of one topic that are made because one nsqlookupd names them.
_MOST_ANSWER: Final = 1 << 20
_MOST_CHANNELS: Final = 128
_HOST: Final = re.compile(r"[A-Za-z0-9:][A-Za-z0-9._:%-]*")

_log = logging.getLogger(__name__)

Names = frozenset[tuple[str, str | None]]


class PeerError(Exception):
    """A nsqlookupd's answer is not valid."""


class Peer:
    """The connection to one nsqlookupd; after a loss the next command opens it again. Only its own
    task uses it, so one that is slow keeps no other from what it must know."""

    def __init__(self, address: str, lookupd: Lookupd) -> None:
        self.address = address
        self.web: str | None = None
        """Where it answers HTTP, as it said; kept when the connection is lost."""
        self._lookupd = lookupd
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._told: Names = frozenset()
        """The names that it was told, or that were lost on the way."""
        self._ping_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def follow(self, names: Names, now: float) -> None:
        """Tell it what it lacks of these names, and that this instance is there, if it does not
        work on the last such call still."""
        is_due = now >= self._ping_at
        if (not is_due and names == self._told) or (
            self._task is not None and not self._task.done()
        ):
            return
        gone, come = self._told - names, names - self._told
        self._told = names
        lines: list[bytes] = []
        if self._writer is not None:  # else it is told all when the connection is opened
            lines += [_line("UNREGISTER", *name) for name in sorted(gone, key=_order, reverse=True)]
            lines += [_line("REGISTER", *name) for name in sorted(come, key=_order)]
        if is_due or not lines:
            self._ping_at = now + _PING_EVERY
            lines.append(b"PING\n")
        self._task = asyncio.get_running_loop().create_task(self._commands(lines))

    async def _commands(self, lines: list[bytes]) -> None:
        for line in lines:
            await self._command(line)

    async def _command(self, line: bytes) -> None:
        """Send a command. If the connection is lost, so is the command; the registrations are all
        sent again when the connection is next opened."""
        try:
            if self._writer is None:
                await self._open()
            await self._ask(line)
        except (OSError, TimeoutError, PeerError, ValueError, asyncio.IncompleteReadError) as exc:
            _log.error(
                "LOOKUPD(%s): %s: %s", self.address, line.decode().strip(), str(exc) or "timeout"
            )
            self._disconnect()

    def close(self) -> None:
        """End its task and close the connection."""
        if self._task is not None:
            self._task.cancel()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _open(self) -> None:
        where = split_address(self.address)
        if where is None:
            raise PeerError("not an address")
        _log.info("LOOKUPD connecting to %s", self.address)
        async with asyncio.timeout(_SECONDS):
            self._reader, self._writer = await asyncio.open_connection(*where)
        self._writer.write(_MAGIC)
        body = json.dumps(self._lookupd.identity(), separators=(",", ":")).encode()
        answer = await self._ask(b"IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        if answer.startswith(b"E_"):
            raise PeerError(self._refusal(said(answer)))
        self.web = _web(answer)
        for command in _registrations(self._told):
            await self._ask(command)

    def _refusal(self, words: str) -> str:
        text = f"it refuses the identity: {words}"
        if self._lookupd.identity()["http_port"]:
            return text
        return (
            f"{text}: it registers only who has an HTTP address: give --http-address, or "
            "--broadcast-http-port for one that is announced and not listened on"
        )

    async def _ask(self, data: bytes) -> bytes:
        assert self._writer is not None
        assert self._reader is not None
        async with asyncio.timeout(_SECONDS):
            self._writer.write(data)
            await self._writer.drain()
            size = int.from_bytes(await self._reader.readexactly(4), "big", signed=True)
            if not 0 <= size <= _MOST_ANSWER:
                raise PeerError(f"an answer of {size} bytes")
            return await self._reader.readexactly(size)


def _web(answer: bytes) -> str | None:
    """Where a nsqlookupd answers HTTP, by its answer to IDENTIFY. None: it does not say. Raises
    BadAnswer."""
    info = table(parsed(answer))
    if "broadcast_address" not in info and "http_port" not in info:
        return None
    host, port = text(info, "broadcast_address", most=253), number(info, "http_port", most=65535)
    if not _HOST.fullmatch(host) or not port:
        raise BadAnswer("its broadcast_address and http_port are no address")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Lookupd:
    """The task that keeps the nsqlookupds informed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._peers: dict[str, Peer] = {}
        self._names: Names = frozenset()
        """The names of now: (topic, channel), and (topic, None)."""
        self._seldom = Seldom(_log, "answers of nsqlookupds that name too much")

    def identity(self) -> dict[str, Any]:
        """Return the document of IDENTIFY."""
        options, ports = self._context.options, self._context.ports
        return {
            "broadcast_address": options.broadcast_address,
            "hostname": socket.gethostname(),
            "http_port": options.broadcast_http_port or max(ports.get("http", 0), 0),
            "tcp_port": options.broadcast_tcp_port or max(ports.get("tcp", 0), 0),
            "topology_region": options.topology_region,
            "topology_zone": options.topology_zone,
            "version": NSQD_VERSION,
        }

    async def run(self) -> None:
        """Register changes and send pings, until cancelled."""
        loop = asyncio.get_running_loop()
        generation = -1
        try:
            while True:
                self._follow_options()
                if self._peers:
                    now = self._context.broker.views().directory.read("generation")
                    if now != generation:
                        generation = now
                        self._names = self._look()
                for peer in self._peers.values():
                    peer.follow(self._names, loop.time())
                await asyncio.sleep(_LOOK_EVERY)
        finally:
            for peer in self._peers.values():
                peer.close()

    def _follow_options(self) -> None:
        wanted = self._context.options.lookupd_tcp_address
        for address in [address for address in self._peers if address not in wanted]:
            self._peers.pop(address).close()
        for address in wanted:
            if address not in self._peers:
                self._peers[address] = Peer(address, self)

    def _look(self) -> Names:
        directory = self._context.broker.views().directory
        topics = {topic.index: topic.name for topic in directory.live_topics()}
        names: set[tuple[str, str | None]] = {(name, None) for name in topics.values()}
        for queue in directory.live_queues():
            if queue.channel is not None and queue.topic in topics:
                names.add((topics[queue.topic], queue.channel))
        return frozenset(names)

    async def channels(self, topic: str) -> list[str]:
        """Return the channels that any nsqlookupd knows of a topic, without ephemeral ones."""
        options, pool = self._context.options, self._context.pools.of("lookup")
        deadline = auth.until(options)
        asked = [
            pool.ask(
                peer.address,
                functools.partial(_ask_channels, options, peer.web, topic, deadline),
            )
            for peer in self._peers.values()
            if peer.web is not None
        ]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=deadline - time.monotonic())
        for each in late:
            each.cancel()
        found = [each.result() for each in asked if each in done]
        if all(answer is None for answer in found):
            _log.warning(
                "failed to query nsqlookupd for channels to pre-create for topic %s", topic
            )
        names: set[str] = set()
        for answer in found:
            if answer is not None:
                names.update(self._usable(topic, answer))
        return sorted(names)

    def _usable(self, topic: str, answer: list[Any]) -> list[str]:
        """The channels of one nsqlookupd's answer that may be made. One that is wrong costs no
        other, and a nsqlookupd that names too many costs no other nsqlookupd."""
        good = [name for name in answer if isinstance(name, str) and valid_name(name)]
        if len(good) < len(answer):
            bad = next(name for name in answer if not isinstance(name, str) or not valid_name(name))
            self._seldom(
                logging.ERROR,
                "LOOKUPD: %d of the channels of topic %s have no name of a channel: %s",
                len(answer) - len(good),
                topic,
                printable(repr(bad), 100),
            )
        kept = sorted({name for name in good if not is_ephemeral(name)})
        if len(kept) > _MOST_CHANNELS:
            self._seldom(
                logging.ERROR,
                "LOOKUPD: a nsqlookupd names %d channels of topic %s; the first %d are made",
                len(kept),
                topic,
                _MOST_CHANNELS,
            )
        return kept[:_MOST_CHANNELS]


def _ask_channels(options: Options, where: str, topic: str, deadline: float) -> list[Any] | None:
    query = urllib.parse.urlencode({"topic": topic})
    try:
        url = f"http://{where}/channels?{query}"
        answer = auth.request(options, url, deadline, _MOST_ANSWER)
        if answer.status != 200:
            return None
        return listed(table(parsed(answer.body)), "channels")
    except (OSError, ValueError) as exc:
        _log.error("LOOKUPD(%s): channels of %s: %s", where, topic, exc)
        return None


def _order(name: tuple[str, str | None]) -> tuple[str, str]:
    return name[0], name[1] or ""


def _line(command: str, topic: str, channel: str | None) -> bytes:
    return f"{command} {topic}{'' if channel is None else f' {channel}'}\n".encode()


def _registrations(names: Names) -> Iterator[bytes]:
    """Yield a REGISTER for each channel, and for each topic without channels."""
    with_channels = {topic for topic, channel in names if channel is not None}
    for topic, channel in sorted(names, key=_order):
        if channel is not None or topic not in with_channels:
            yield _line("REGISTER", topic, channel)
