"""Registration of this instance's topics and channels with nsqlookupds, and requests for the
channels of new topics (nsqio/nsq nsqd/lookup.go, lookup_peer.go). One gateway process does it for
the whole instance."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import urllib.parse
from collections.abc import Iterator
from typing import Any, Final

from shmq.gateway import auth
from shmq.gateway.context import Context
from shmq.gateway.listeners import split_address
from shmq.names import is_ephemeral
from shmq.nsqd import NSQD_VERSION

_MAGIC: Final = b"  V1"
_SECONDS: Final = 1.0  # to connect, to write, to read
_PING_EVERY: Final = 15.0
_LOOK_EVERY: Final = 0.05  # seconds between two looks at whether the directory has changed

_log = logging.getLogger(__name__)

Names = frozenset[tuple[str, str | None]]


class PeerError(Exception):
    """A nsqlookupd's answer is not valid."""


class Peer:
    """The connection to one nsqlookupd; after a loss the next command opens it again."""

    def __init__(self, address: str, lookupd: Lookupd) -> None:
        self.address = address
        self.info: dict[str, Any] | None = None
        """The nsqlookupd's answer to IDENTIFY; kept when the connection is lost."""
        self._lookupd = lookupd
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def command(self, line: bytes) -> None:
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
            self.close()

    def close(self) -> None:
        """Close the connection."""
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
            raise PeerError(self._refusal(answer.decode(errors="replace")))
        info = json.loads(answer)
        if not isinstance(info, dict):
            raise PeerError("no identity in its answer")
        self.info = info
        for command in _registrations(self._lookupd.names):
            await self._ask(command)

    def _refusal(self, said: str) -> str:
        text = f"it refuses the identity: {said}"
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
            if not 0 <= size <= self._lookupd.max_body_size:
                raise PeerError(f"an answer of {size} bytes")
            return await self._reader.readexactly(size)


class Lookupd:
    """The task that keeps the nsqlookupds informed."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._peers: dict[str, Peer] = {}
        self.names: Names = frozenset()
        """The registered names: (topic, channel), and (topic, None)."""

    @property
    def max_body_size(self) -> int:
        """Highest size of an answer, in bytes."""
        return self._context.options.max_body_size

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
        generation, ping_at = -1, loop.time()
        try:
            while True:
                await self._follow_options()
                if self._peers:
                    now = self._context.broker.views().directory.read("generation")
                    if now != generation:
                        generation = now
                        await self._notify(self._look())
                if loop.time() >= ping_at:
                    ping_at = loop.time() + _PING_EVERY
                    await self._tell(b"PING\n")
                await asyncio.sleep(_LOOK_EVERY)
        finally:
            for peer in self._peers.values():
                peer.close()

    async def _follow_options(self) -> None:
        wanted = self._context.options.lookupd_tcp_address
        for address in [address for address in self._peers if address not in wanted]:
            self._peers.pop(address).close()
        for address in wanted:
            if address not in self._peers:
                self._peers[address] = peer = Peer(address, self)
                await peer.command(b"PING\n")

    def _look(self) -> Names:
        directory = self._context.broker.views().directory
        topics = {topic.index: topic.name for topic in directory.live_topics()}
        names: set[tuple[str, str | None]] = {(name, None) for name in topics.values()}
        for queue in directory.live_queues():
            if queue.channel is not None and queue.topic in topics:
                names.add((topics[queue.topic], queue.channel))
        return frozenset(names)

    async def _notify(self, names: Names) -> None:
        gone, come = self.names - names, names - self.names
        self.names = names
        for topic, channel in sorted(gone, key=_order, reverse=True):
            await self._tell(_line("UNREGISTER", topic, channel))
        for topic, channel in sorted(come, key=_order):
            await self._tell(_line("REGISTER", topic, channel))

    async def _tell(self, line: bytes) -> None:
        for peer in list(self._peers.values()):
            await peer.command(line)

    async def channels(self, topic: str) -> list[str]:
        """Return the channels that any nsqlookupd knows of a topic, without ephemeral ones."""
        asked = [
            asyncio.to_thread(self._ask_channels, peer.info, topic)
            for peer in self._peers.values()
            if peer.info is not None
        ]
        found = await asyncio.gather(*asked)
        if found and all(answer is None for answer in found):
            _log.warning(
                "failed to query nsqlookupd for channels to pre-create for topic %s", topic
            )
        names = {name for answer in found for name in answer or []}
        return sorted(name for name in names if not is_ephemeral(name))

    def _ask_channels(self, info: dict[str, Any], topic: str) -> list[str] | None:
        query = urllib.parse.urlencode({"topic": topic})
        where = f"{info.get('broadcast_address')}:{info.get('http_port')}"
        try:
            status, _, body = auth.request(
                self._context.options, f"http://{where}/channels?{query}"
            )
            if status != 200:
                return None
            return [str(name) for name in json.loads(body)["channels"] or []]
        except (OSError, ValueError, KeyError, TypeError) as exc:
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
