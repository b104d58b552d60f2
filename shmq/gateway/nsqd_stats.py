"""nsqd's `/stats` documents, JSON and text (nsqio/nsq nsqd/http.go, stats.go)."""

from __future__ import annotations

import dataclasses
import datetime
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from shmq import stats as broker_stats
from shmq.gateway.acts import Allows
from shmq.gateway.context import Context
from shmq.nsqd import NSQD_VERSION
from shmq.printing import printable
from shmq.stats import BrokerStats, ChannelStats, Latency, TopicStats

#: The act that lets somebody read counts.
_READ: Final = "statistics"
#: Stands in the place of the Go version with which nsqd was built.
BUILT_WITH: Final = f"python{sys.version_info.major}.{sys.version_info.minor}"


def memory() -> dict[str, int]:
    """Return nsqd's nine numbers; those without a meaning in Python are 0."""
    import psutil  # slow to import

    runs = sum(generation["collections"] for generation in gc.get_stats())
    return {
        "heap_objects": sys.getallocatedblocks(),
        "heap_idle_bytes": 0,
        "heap_in_use_bytes": psutil.Process().memory_info().rss,
        "heap_released_bytes": 0,
        "gc_pause_usec_100": 0,
        "gc_pause_usec_99": 0,
        "gc_pause_usec_95": 0,
        "next_gc_bytes": 0,
        "gc_total_runs": runs,
    }


@dataclass
class NsqdStats:
    """The state of the broker and of all connections, as nsqd shows it."""

    stats: BrokerStats
    connections: list[dict[str, Any]]
    """`Session.describe` of each connection of all gateway processes, with the process's `pid`."""
    health: str
    start_time: int
    """Unix seconds."""
    percentiles: tuple[float, ...]

    def __post_init__(self) -> None:
        self._by_session = {
            (item["pid"], *item["session"]): item
            for item in self.connections
            if item["session"] is not None
        }

    # ---- JSON ----

    def document(
        self,
        topic: str = "",
        channel: str = "",
        include_clients: bool = True,
        include_mem: bool = True,
    ) -> dict[str, Any]:
        """Return the document of `/stats?format=json`."""
        topics: list[dict[str, Any]] | None = [
            self._topic(item, channels, include_clients)
            for item, channels in self.chosen(topic, channel)
        ]
        if topic and not topics and not any(item.name == topic for item in self.stats.topics):
            topics = None
        document: dict[str, Any] = {
            "version": NSQD_VERSION,
            "health": self.health,
            "start_time": self.start_time,
            "topics": topics,
        }
        if include_mem:
            document["memory"] = memory()
        document["producers"] = self.producers(topic) if include_clients else None
        return document

    def chosen(self, topic: str, channel: str) -> Iterator[tuple[TopicStats, list[ChannelStats]]]:
        """Yield the selected topics, each with its selected channels."""
        for item in self.stats.topics:
            if topic and item.name != topic:
                continue
            channels = [one for one in item.channels if not channel or one.name == channel]
            if channels or not channel:
                yield item, channels

    def _topic(
        self, topic: TopicStats, channels: list[ChannelStats], include_clients: bool
    ) -> dict[str, Any]:
        return {
            "topic_name": topic.name,
            "channels": [self._channel(item, include_clients) for item in channels],
            "depth": topic.depth,
            "backend_depth": topic.backend_depth,
            "message_count": topic.message_count,
            "message_bytes": topic.message_bytes,
            "paused": topic.paused,
            "e2e_processing_latency": self.latency(item.latency for item in topic.channels),
        }

    def _channel(self, channel: ChannelStats, include_clients: bool) -> dict[str, Any]:
        document = channel.to_json(False)
        if include_clients:
            document["clients"] = self.clients(channel)
        document["e2e_processing_latency"] = self.latency([channel.latency])
        del document["shmq"]  # nsqd's tools expect nsqd's fields; `shmq stat` has the others
        return document

    def clients(self, channel: ChannelStats) -> list[dict[str, Any]]:
        """Return a channel's clients: those of the TCP protocol with what they sent in IDENTIFY,
        and those on shared memory."""
        found = []
        for session in channel.sessions:
            key = (session.client.pid, channel.queue, channel.serial, session.index)
            client = self._by_session.get(key)
            if client is None:
                client = session.to_json()
                del client["shmq"]
            found.append(_shown(client))
        return found

    def producers(self, topic: str) -> list[dict[str, Any]] | None:
        """Return the connections that have published, each with at most one count, as nsqd does."""
        found = []
        for item in self.connections:
            counts = item.get("pub_counts")
            if not counts:
                continue
            client = _shown(item)
            counts = [one for one in counts if not topic or one["topic"] == topic][:1]
            if counts:
                client["pub_counts"] = counts
            found.append(client)
        return found or None

    def latency(self, latencies: Iterable[Latency]) -> dict[str, Any]:
        """Return the latency from publish to finish, of one channel or of several together."""
        if not self.percentiles:
            return {"count": 0, "percentiles": None}
        held = list(latencies)
        count = sum(item.count for item in held)
        buckets = sum((item.buckets for item in held), np.zeros(1, np.uint64))
        merged = Latency(count, 0, 0, buckets)
        return {
            "count": count,
            "percentiles": [
                {"quantile": share, "value": int((merged.percentile(share) or 0.0) * 1e9)}
                for share in self.percentiles
            ],
        }

    # ---- text ----

    def text(
        self,
        topic: str = "",
        channel: str = "",
        include_clients: bool = True,
        include_mem: bool = True,
    ) -> str:
        """Return the text of `/stats`."""
        now = time.time()
        start = datetime.datetime.fromtimestamp(self.start_time).astimezone()
        lines = [
            f"nsqd v{NSQD_VERSION} (built w/{BUILT_WITH})",
            f"start_time {_rfc3339(start)}",
            f"uptime {go_duration(now - self.start_time)}",
            "",
            f"Health: {self.health}",
            "",
        ]
        if include_mem:
            lines.append("Memory:")
            lines += [f"   {name:<25}\t{value}" for name, value in memory().items()]
            lines.append("")
        lines += self._topics_text(topic, channel, include_clients, now)
        if include_clients:
            lines += ["", *self._producers_text(topic, now)]
        return "\n".join(lines) + "\n"

    def _topics_text(
        self, topic: str, channel: str, include_clients: bool, now: float
    ) -> Iterator[str]:
        chosen = list(self.chosen(topic, channel))
        yield "Topics:" if chosen else "Topics: None"
        for index, (item, channels) in enumerate(chosen):
            if index:
                yield ""
            mark = "*P " if item.paused else "   "
            e2e = self._latency_text(one.latency for one in item.channels)
            yield (
                f"{mark}[{item.name:<15}] depth: {item.depth:<5d} be-depth: "
                f"{item.backend_depth:<5d} msgs: {item.message_count:<8d} e2e%: {e2e}"
            )
            for one in channels:
                mark = "   *P " if one.paused else "      "
                e2e = self._latency_text([one.latency])
                yield (
                    f"{mark}[{one.name:<25}] depth: {one.depth:<5d} be-depth: "
                    f"{one.backend_depth:<5d} inflt: {one.in_flight:<4d} def: {one.deferred:<4d} "
                    f"re-q: {one.requeue_count:<5d} timeout: {one.timeout_count:<5d} "
                    f"msgs: {one.message_count:<8d} e2e%: {e2e}"
                )
                for client in self.clients(one) if include_clients else []:
                    yield f"        {_client_text(client, now)}"

    def _producers_text(self, topic: str, now: float) -> Iterator[str]:
        producers = self.producers(topic)
        yield "Producers:" if producers else "Producers: None"
        for client in producers or []:
            yield f"   {_client_text(client, now)}"

    def _latency_text(self, latencies: Iterable[Latency]) -> str:
        percentiles = self.latency(latencies)["percentiles"] or []
        return ", ".join(_scaled(item["value"]) for item in percentiles)


async def collect(context: Context, allows: Allows | None = None, topic: str = "") -> NsqdStats:
    """Collect the statistics of the broker and of all gateway processes. allows: what is left out
    is what this does not allow; None: nothing. topic: only those of this one, if it is given."""

    def read() -> BrokerStats:
        broker = context.broker
        return broker_stats.collect(broker.views(), broker.supervisor_alive(), topic)

    stats = await context.call(read, kind="look")
    answers = await context.control.ask_all({"ask": "connections"})
    connections = [item for answer in answers for item in answer]
    if allows is not None:
        stats, connections = permitted(stats, allows), _permitted(connections, allows)
    return NsqdStats(
        stats,
        connections,
        context.health,
        context.start_time,
        context.options.e2e_processing_latency_percentile,
    )


def permitted(stats: BrokerStats, allows: Allows) -> BrokerStats:
    """The statistics without the topics and channels whose counts somebody may not read."""
    topics = []
    for topic in stats.topics:
        channels = [one for one in topic.channels if allows(_READ, topic.name, one.name or "")]
        whole = allows(_READ, topic.name, "")
        if channels or whole:
            shown = dataclasses.replace(topic, channels=channels)
            if not whole:  # what was published to it tells of its other channels
                shown = dataclasses.replace(shown, message_count=0, message_bytes=0, backlog=None)
            topics.append(shown)
    return dataclasses.replace(stats, topics=topics)


def _permitted(connections: list[dict[str, Any]], allows: Allows) -> list[dict[str, Any]]:
    """The connections with their counts of those topics only."""
    found = []
    for item in connections:
        counts = [one for one in item.get("pub_counts", ()) if allows(_READ, one["topic"], "")]
        found.append({key: value for key, value in item.items() if key != "pub_counts"})
        if counts:
            found[-1]["pub_counts"] = counts
    return found


def _shown(client: dict[str, Any]) -> dict[str, Any]:
    """Return a client as nsqd shows it: with at most one count of published messages, and without
    the keys that nsqd does not have."""
    shown = {key: value for key, value in client.items() if key not in ("session", "pid")}
    if "pub_counts" in shown:
        shown["pub_counts"] = shown["pub_counts"][:1]
    return shown


def _client_text(client: dict[str, Any], now: float) -> str:
    port = client["remote_address"].rpartition(":")[2]
    who = printable(f"{client['hostname']}:{port} {client['user_agent']}")
    connected = go_duration(int(now - client["connect_ts"]))
    if client.get("pub_counts"):
        topics = ",".join(f"{one['topic']}={one['count']}" for one in client["pub_counts"])
        return (
            f"[V2 {who:<21}] msgs: {client['message_count']:<8d} topics: {topics} "
            f"connected: {connected}"
        )
    return (
        f"[V2 {who:<21}] state: {client['state']} inflt: {client['in_flight_count']:<4d} "
        f"rdy: {client['ready_count']:<4d} fin: {client['finish_count']:<8d} "
        f"re-q: {client['requeue_count']:<8d} msgs: {client['message_count']:<8d} "
        f"connected: {connected}"
    )


def _scaled(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns > size:
            return f"{ns / size:.1f}{unit}"
    return f"{ns:.1f}ns"


def _rfc3339(when: datetime.datetime) -> str:
    text = when.isoformat(timespec="seconds")
    return text.removesuffix("+00:00") + "Z" if text.endswith("+00:00") else text


def go_duration(seconds: float) -> str:
    """Format a duration as Go does: 1h2m3.5s."""
    whole = max(float(seconds), 0.0)
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    tail = f"{rest:.9f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{int(hours)}h{int(minutes)}m{tail}"
    return f"{int(minutes)}m{tail}" if minutes else tail
