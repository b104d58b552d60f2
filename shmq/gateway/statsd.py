"""Statistics for a statsd server (nsqio/nsq nsqd/statsd.go). One gateway process sends them for the
whole instance."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from typing import Any

from shmq.gateway import nsqd_stats
from shmq.gateway.context import Context
from shmq.gateway.listeners import split_address
from shmq.names import is_ephemeral

_log = logging.getLogger(__name__)

_TOPIC = (("message_count", "c"), ("message_bytes", "c"), ("depth", "g"), ("backend_depth", "g"))
_CHANNEL = (
    ("message_count", "c"),
    ("depth", "g"),
    ("backend_depth", "g"),
    ("in_flight_count", "g"),
    ("deferred_count", "g"),
    ("requeue_count", "c"),
    ("timeout_count", "c"),
)
_MEMORY = (
    "heap_objects",
    "heap_idle_bytes",
    "heap_in_use_bytes",
    "heap_released_bytes",
    "gc_pause_usec_100",
    "gc_pause_usec_99",
    "gc_pause_usec_95",
    "next_gc_bytes",
)


class Statsd:
    """The task that sends the statistics."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._before: dict[str, int] = {}

    async def run(self) -> None:
        """Send the statistics once per interval, until cancelled."""
        while True:
            options = self._context.options
            await asyncio.sleep(options.statsd_interval)
            try:
                report = await nsqd_stats.collect(self._context)
                document = report.document("", "", False, options.statsd_mem_stats)
                lines = list(self.lines(document))
                await self._send(lines)
            except OSError as exc:
                _log.error("STATSD: cannot send to %s: %s", options.statsd_address, exc)

    def lines(self, document: dict[str, Any]) -> Iterator[str]:
        """Yield the lines for a `/stats` document; counters are relative to the previous one."""
        exclude = self._context.options.statsd_exclude_ephemeral
        for topic in document["topics"] or []:
            name = topic["topic_name"]
            if exclude and is_ephemeral(name):
                continue
            yield from self._of(f"topic.{name}", topic, _TOPIC)
            yield from self._latency(f"topic.{name}", topic)
            for channel in topic["channels"]:
                one = channel["channel_name"]
                if exclude and is_ephemeral(one):
                    continue
                yield from self._of(f"topic.{name}.channel.{one}", channel, _CHANNEL)
                yield f"topic.{name}.channel.{one}.clients:{channel['client_count']}|g"
                yield from self._latency(f"topic.{name}.channel.{one}", channel)
        memory = document.get("memory")
        if memory is not None:
            yield from self._of("mem", memory, [(key, "g") for key in _MEMORY])
            yield self._delta("mem.gc_runs", memory["gc_total_runs"])

    def _of(self, prefix: str, values: dict[str, Any], keys: Any) -> Iterator[str]:
        for key, kind in keys:
            name = f"{prefix}.{key}"
            yield self._delta(name, values[key]) if kind == "c" else f"{name}:{values[key]}|g"

    def _delta(self, name: str, value: int) -> str:
        before, self._before[name] = self._before.get(name, 0), value
        return f"{name}:{value - before}|c"

    def _latency(self, prefix: str, values: dict[str, Any]) -> Iterator[str]:
        for item in values["e2e_processing_latency"]["percentiles"] or []:
            share = f"{item['quantile'] * 100:.0f}"
            yield f"{prefix}.e2e_processing_latency_{share}:{item['value']}|g"

    async def _send(self, lines: list[str]) -> None:
        options, prefix = self._context.options, prefix_of(self._context)
        encoded = (f"{prefix}{line}\n".encode() for line in lines)
        datagrams = packed(encoded, options.statsd_udp_packet_size)
        where = split_address(options.statsd_address)
        if where is None:
            raise OSError("not an address")
        pause = max(options.statsd_interval - 1.0, 0.0) / max(len(datagrams), 1)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(*where, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as sock:
            for index, datagram in enumerate(datagrams):
                if index:
                    await asyncio.sleep(pause)
                sock.sendto(datagram, found[0][4])


def prefix_of(context: Context) -> str:
    """Return the prefix of all names sent to statsd."""
    options = context.options
    port = options.broadcast_http_port or context.ports.get("http", 0)
    host = f"{options.broadcast_address}:{port}".replace(".", "_").replace(":", "_")
    prefix = options.statsd_prefix.replace("%s", host)
    return prefix if prefix.endswith(".") or not prefix else f"{prefix}."


def packed(lines: Any, most: int) -> list[bytes]:
    """Pack whole lines into datagrams of at most `most` bytes."""
    datagrams: list[bytes] = []
    held = b""
    for line in lines:
        if held and len(held) + len(line) > most:
            datagrams.append(held)
            held = b""
        held += line
    return [*datagrams, held] if held else datagrams
