"""What a broker is doing, read from its segments without a lock; and nsqd's `/stats` document.

Counts follow nsqd's (`nsqd/stats.go`): `depth` leaves out what is in flight or deferred,
`message_count` counts arrivals and not deliveries. Counters begin at zero when a queue is made;
unlike nsqd's they survive a restart of the supervisor alone.

Numbers of one queue are read within microseconds of each other but not under its locks, so they
may differ by what moved meanwhile.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmq import layout
from shmq.errors import Gone
from shmq.layout import Array, ClientState, DirectoryView, Kind, LeaseEntry, QueueView, Source
from shmq.segments import SHM_DIRECTORY

#: The nsqd whose `/stats` this is; nsqadmin compares it with other nodes' and finds it up to date.
NSQD_VERSION = "1.3.0"

#: Free bytes of /dev/shm below which it is full: a channel takes 84 KiB at once and doubles what it
#: has as it fills.
_LEAST_SHM = 1 << 20


@dataclass(frozen=True)
class ClientStats:
    """A process that is attached."""

    index: int
    """Of its client entry."""
    pid: int
    kind: str
    """One of client, supervisor, gateway."""
    uid: int
    attached_at: int
    """CLOCK_REALTIME ns."""
    pins: int
    """Message views it holds."""

    @functools.cached_property
    def cmd(self) -> str:
        """Its command line, looked up when first asked for; "" if it is gone or not ours to see."""
        import psutil

        try:
            return " ".join(psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return ""


@dataclass(frozen=True)
class SessionStats:
    """A consumer of a channel. One process may have several."""

    client: ClientStats
    max_in_flight: int
    in_flight: int
    since: int
    """CLOCK_REALTIME ns."""
    delivered: int
    finished: int
    requeued: int
    timed_out: int
    index: int
    """Of its session in the queue."""

    def to_json(self) -> dict[str, Any]:
        """As nsqd shows a client of a channel."""
        return {
            "client_id": str(self.client.pid),
            "hostname": "",
            "version": "V2",
            "remote_address": f"pid:{self.client.pid}",
            "state": 3,
            "ready_count": self.max_in_flight,
            "in_flight_count": self.in_flight,
            "message_count": self.delivered,
            "finish_count": self.finished,
            "requeue_count": self.requeued,
            "connect_ts": self.since // 10**9,
            "sample_rate": 0,
            "deflate": False,
            "snappy": False,
            "user_agent": f"shmq/{layout.VERSION}",
            "topology_zone": "",
            "topology_region": "",
            "tls": False,
            "tls_cipher_suite": "",
            "tls_version": "",
            "tls_negotiated_protocol": "",
            "tls_negotiated_protocol_is_mutual": False,
            "shmq": {"pid": self.client.pid, "timeout_count": self.timed_out},
        }


@dataclass(frozen=True)
class Latency:
    """Time from publish to finish, from the channel's histograms (buckets of 6 to 12 %)."""

    count: int
    """Messages finished in the last 5 to 10 minutes: what the percentiles are of."""
    total_count: int
    """Messages finished since the channel was made, and the sum of their times in ns."""
    total_sum: int
    buckets: NDArray[np.uint64] = field(repr=False)
    """Counts behind `count`; `bounds()` has each bucket's upper bound in ns."""

    @staticmethod
    def bounds() -> NDArray[np.float64]:
        """Upper bound of each bucket, in ns; the last one's is open."""
        count, first = layout.constant("LATENCY_BUCKETS"), layout.constant("LATENCY_FIRST")
        index = np.arange(count - 1)
        upper = 2.0 ** (first + index // 8) * (1 + (index % 8 + 1) / 8)
        return np.concatenate(([2.0**first], upper))

    def percentile(self, quantile: float) -> float | None:
        """Seconds in which this share (0 to 1) of the messages was finished; None without any."""
        if not 0 <= quantile <= 1:
            raise ValueError(f"a quantile is between 0 and 1, not {quantile}")
        if not self.count:
            return None
        reached = np.searchsorted(np.cumsum(self.buckets), max(quantile * self.count, 1))
        return float(self.bounds()[min(int(reached), len(self.buckets) - 1)]) / 1e9


@dataclass(frozen=True)
class ChannelStats:
    """A channel, or a topic's backlog (then `name` is None)."""

    name: str | None
    depth: int
    """Messages waiting: in memory and on disk, without those in flight or deferred."""
    backend_depth: int
    """Those of them on disk."""
    in_flight: int
    deferred: int
    message_count: int
    """Messages that entered, redeliveries not counted."""
    message_bytes: int
    delivered: int
    finished: int
    requeue_count: int
    timeout_count: int
    returned: int
    """Deliveries taken back from consumers that died or closed."""
    dropped: int
    """Messages a full ephemeral channel did not take."""
    spilled: int
    restored: int
    paused: bool
    ephemeral: bool
    memory_bytes: int
    """Shared memory that is committed for it."""
    body_bytes: int
    """Those of it that hold message bodies, some of them finished: room is made when needed."""
    oldest_age: float | None
    """Seconds since the longest waiting message in memory was published; None if none waits."""
    queue: int
    """Index of the queue, and the number in its segment's name."""
    serial: int
    latency: Latency
    leased: int = 0
    """Messages in leases, and those leases, the oldest first."""
    leases: list[LeaseEntry] = field(default_factory=list)
    sessions: list[SessionStats] = field(default_factory=list)

    def to_json(self, include_clients: bool = True) -> dict[str, Any]:
        """As nsqd shows a channel."""
        return {
            "channel_name": self.name or "",
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "in_flight_count": self.in_flight,
            "deferred_count": self.deferred,
            "message_count": self.message_count,
            "requeue_count": self.requeue_count,
            "timeout_count": self.timeout_count,
            "client_count": len(self.sessions),
            "clients": [item.to_json() for item in self.sessions] if include_clients else None,
            "paused": self.paused,
            "e2e_processing_latency": {"count": 0, "percentiles": None},
            "shmq": {
                "finish_count": self.finished,
                "delivered_count": self.delivered,
                "returned_count": self.returned,
                "dropped_count": self.dropped,
                "memory_bytes": self.memory_bytes,
                "body_bytes": self.body_bytes,
                "leased_count": self.leased,
                "leases": [dataclasses.asdict(lease) for lease in self.leases],
                "latency_ms": {
                    f"p{share * 100:g}": None if found is None else round(found * 1000, 6)
                    for share in (0.5, 0.9, 0.99, 0.999)
                    for found in (self.latency.percentile(share),)
                },
                "latency_count": self.latency.count,
                "oldest_age_ms": None if self.oldest_age is None else int(self.oldest_age * 1000),
            },
        }


@dataclass(frozen=True)
class TopicStats:
    """A topic. Its own depth is that of its backlog: what no channel has got yet."""

    name: str
    message_count: int
    message_bytes: int
    paused: bool
    ephemeral: bool
    channels: list[ChannelStats] = field(default_factory=list)
    """By name."""
    backlog: ChannelStats | None = None

    @property
    def depth(self) -> int:
        """Messages waiting for a channel or for the topic's unpausing."""
        return self.backlog.depth if self.backlog else 0

    @property
    def backend_depth(self) -> int:
        """Those of them on disk."""
        return self.backlog.backend_depth if self.backlog else 0

    def to_json(self, include_clients: bool = True) -> dict[str, Any]:
        """As nsqd shows a topic."""
        return {
            "topic_name": self.name,
            "channels": [channel.to_json(include_clients) for channel in self.channels],
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "message_count": self.message_count,
            "message_bytes": self.message_bytes,
            "paused": self.paused,
            "e2e_processing_latency": {"count": 0, "percentiles": None},
        }


_N = TypeVar("_N", TopicStats, ChannelStats)


@dataclass(frozen=True)
class BrokerStats:
    """An instance."""

    instance: str
    supervisor_pid: int
    """0 if there was none yet."""
    supervisor_alive: bool
    heartbeat_age: float
    """Seconds since the supervisor last showed that it runs."""
    start_time: int
    """Of the supervisor, CLOCK_REALTIME ns."""
    epoch: int
    """How many supervisors this shared memory has seen."""
    stopping: bool
    reaped: int
    """Dead clients whose messages were taken back."""
    rebuilt: int
    """Queues rebuilt after a death inside them."""
    topics: list[TopicStats] = field(default_factory=list)
    """By name."""
    clients: list[ClientStats] = field(default_factory=list)
    foreign: bool = False
    """Whether the supervisor is in another PID namespace; `supervisor_alive` then goes by its
    heartbeat."""
    data_path: str = ""
    """Where the supervisor keeps its files; "" if that is not known."""
    disk_errno: int = 0
    """What the data path refuses to be written with; 0: it does not, or no supervisor lives."""
    disk_trouble_since: int | None = None
    """Unix seconds."""
    shm_total: int = 0
    """Bytes of /dev/shm, and those that are free; a total of 0: it has no limit of its own."""
    shm_free: int = 0

    @property
    def health(self) -> str:
        """`OK`, or `NOK - <reason>` as nsqd has it: no supervisor, its data path cannot be written
        or /dev/shm is full."""
        trouble = self.trouble
        return f"NOK - {trouble[0]}" if trouble else "OK"

    @property
    def trouble(self) -> list[str]:
        """Everything that keeps the broker from its work, the worst first; empty: nothing."""
        found = []
        if not self.supervisor_alive:
            found.append(
                "the supervisor, in another PID namespace, gives no sign of life"
                if self.foreign
                else "the supervisor is not running"
            )
        if self.disk_errno:
            found.append(f"{self._disk_said}: {os.strerror(self.disk_errno)}")
        if self.shm_is_full:
            found.append(f"/dev/shm is full: {self.shm_free} of {self.shm_total} bytes are free")
        return found

    @property
    def _disk_said(self) -> str:
        if self.disk_errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the data path {self.data_path} is full"
        return f"the data path {self.data_path} cannot be written"

    @property
    def shm_is_full(self) -> bool:
        """Whether /dev/shm has no room for another channel that is used."""
        return self.shm_total > 0 and self.shm_free < _LEAST_SHM

    @functools.cached_property
    def data_path_free(self) -> int | None:
        """Bytes that are free where the files are, looked up when first asked for; None if that
        directory cannot be seen from here."""
        try:
            room = os.statvfs(self.data_path) if self.data_path else None
        except OSError:
            return None
        return None if room is None else room.f_bavail * room.f_frsize

    def topic(self, name: str) -> TopicStats:
        """The topic of this name. Gone, also a KeyError."""
        return _named(self.topics, name, f"topic {name!r} on instance {self.instance!r}")

    def channel(self, topic: str, channel: str) -> ChannelStats:
        """The channel of this name. Gone, also a KeyError."""
        what = f"channel {topic}/{channel} on instance {self.instance!r}"
        return _named(self.topic(topic).channels, channel, what)

    def to_json(
        self,
        topic: str | None = None,
        channel: str | None = None,
        include_clients: bool = True,
    ) -> dict[str, Any]:
        """nsqd's `/stats?format=json` without its `memory`; what is not nsqd's is under "shmq".

        topic, channel: only these, with nsqd's answers for unknown ones (null and []).
        """
        return {
            "version": NSQD_VERSION,
            "health": self.health,
            "start_time": self.start_time // 10**9,
            "topics": self._chosen(topic, channel, include_clients),
            "producers": None,
            "shmq": {
                "version": layout.VERSION,
                "instance": self.instance,
                "supervisor_pid": self.supervisor_pid,
                "supervisor_alive": self.supervisor_alive,
                "heartbeat_age_ms": int(self.heartbeat_age * 1000),
                "epoch": self.epoch,
                "client_count": len(self.clients),
                "reaped_count": self.reaped,
                "rebuilt_count": self.rebuilt,
                "foreign": self.foreign,
                "trouble": self.trouble,
                "data_path": self.data_path or None,
                "data_path_free_bytes": self.data_path_free,
                "disk_errno": self.disk_errno,
                "disk_trouble_since": self.disk_trouble_since,
                "shm_bytes": self.shm_total,
                "shm_free_bytes": self.shm_free,
            },
        }

    def _chosen(
        self, topic: str | None, channel: str | None, include_clients: bool
    ) -> list[dict[str, Any]] | None:
        topics = [item for item in self.topics if not topic or item.name == topic]
        if topic and not topics:
            return None
        shown = [item.to_json(include_clients) for item in topics]
        if channel:
            for document in shown:
                document["channels"] = [
                    item for item in document["channels"] if item["channel_name"] == channel
                ]
            shown = [document for document in shown if document["channels"]]
        return shown


class _Missing(Gone, KeyError):
    """As everywhere else, Gone; a KeyError for who looks up a name."""

    __str__ = Exception.__str__  # a KeyError's is the text in quotation marks


def _named(items: list[_N], name: str, what: str) -> _N:
    for item in items:
        if item.name == name:
            return item
    raise _Missing(f"there is no {what}")


# ---- reading ----


def collect(source: Source, alive: bool | None = None) -> BrokerStats:
    """Read all of it. alive: whether the supervisor lives, where an attachment knows exactly."""
    directory = source.directory
    header = directory.header
    clients = read_clients(directory)
    found: dict[int, list[ChannelStats]] = {}
    for entry, view in layout.live_queues(source):
        stats = read_queue(entry.channel, view, clients, entry.ephemeral)
        found.setdefault(entry.topic, []).append(stats)
    topics = []
    for topic in directory.live_topics():
        queues = found.get(topic.index, [])
        channels = [item for item in queues if item.name is not None]
        topics.append(
            TopicStats(
                name=topic.name,
                message_count=topic.messages,
                message_bytes=topic.bytes,
                paused=topic.paused,
                ephemeral=topic.ephemeral,
                channels=sorted(channels, key=lambda item: item.name or ""),
                backlog=next((item for item in queues if item.name is None), None),
            )
        )
    age = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(header["heartbeat"])
    alive = layout.supervisor_alive(directory) if alive is None else alive
    disk_errno, since = directory.disk_trouble if alive else (0, 0)
    room = os.statvfs(SHM_DIRECTORY)
    return BrokerStats(
        instance=source.instance,
        supervisor_pid=int(header["supervisor_pid"]),
        supervisor_alive=alive,
        heartbeat_age=max(age, 0) / 1e9,
        start_time=int(header["supervisor_since"]),
        epoch=int(header["epoch"]),
        stopping=bool(header["stopping"]),
        reaped=int(header["reaped"]),
        rebuilt=int(header["rebuilt"]),
        topics=sorted(topics, key=lambda item: item.name),
        clients=list(clients.values()),
        foreign=directory.is_foreign,
        data_path=directory.data_path,
        disk_errno=disk_errno,
        disk_trouble_since=since if disk_errno else None,
        shm_total=room.f_blocks * room.f_frsize,
        shm_free=room.f_bavail * room.f_frsize,
    )


def read_clients(directory: DirectoryView) -> dict[int, ClientStats]:
    """The attached processes, by index of their client entry."""
    table = directory.clients
    found = {}
    for index in np.flatnonzero(table["state"] == ClientState.LIVE).tolist():
        row = table[index]
        used = row["pins"][: min(int(row["pins_high"]), row["pins"].shape[0])]
        kind = int(row["kind"])
        found[index] = ClientStats(
            index=index,
            pid=int(row["pid"]),
            kind=Kind(kind).name.lower() if kind in _KINDS else str(kind),
            uid=int(row["uid"]),
            attached_at=int(row["attached_at"]),
            pins=int(np.count_nonzero(used)),
        )
    return found


_KINDS = frozenset(Kind)


def read_queue(
    name: str | None,
    view: QueueView,
    clients: dict[int, ClientStats] | None = None,
    ephemeral: bool = False,
) -> ChannelStats:
    """One channel, or (name None) a topic's backlog, from its segment."""
    header: Array = view.header.copy()  # one glance, then arithmetic
    run = layout.run_length(header)
    disk = max(0, int(header["disk_depth"]) - run)
    body_bytes = int(header["arena_committed"]) - int(header["arena"]["free_bytes"])
    return ChannelStats(
        name=name,
        depth=_depth(view, header, disk),
        backend_depth=disk,
        in_flight=int(header["inflight_len"]),
        deferred=int(header["deferred_len"])
        + view.ring_length("defer")
        + int(header["deferred_depth"]),
        message_count=int(header["enqueued"]),
        message_bytes=int(header["enqueued_bytes"]),
        delivered=int(header["delivered"]),
        finished=int(header["finished"]),
        requeue_count=int(header["requeued"]),
        timeout_count=int(header["timed_out"]),
        returned=int(header["returned"]),
        dropped=int(header["dropped"]),
        spilled=int(header["spilled"]),
        restored=int(header["restored"]),
        paused=bool(header["paused"]),
        ephemeral=ephemeral,
        memory_bytes=committed_bytes(header),
        body_bytes=max(body_bytes, 0),
        oldest_age=_oldest_age(view),
        queue=int(header["index"]),
        serial=int(header["segment"]["serial"]),
        latency=_latency(view),
        leased=int(header["leased"]) + run,
        leases=layout.open_leases(view) if header["leased"] or run else [],
        sessions=_sessions(view, clients or {}),
    )


def depth(view: QueueView) -> int:
    """How many messages of a queue wait, in memory and on disk."""
    header: Array = view.header.copy()
    return _depth(view, header, max(0, int(header["disk_depth"]) - layout.run_length(header)))


def _depth(view: QueueView, header: Array, on_disk: int) -> int:
    waiting = view.ring_length("ready") + view.ring_length("requeue")
    return waiting + on_disk + int(header["spilling_count"])


def _latency(view: QueueView) -> Latency:
    taken: Array = view.latency.copy()
    buckets = taken["window"]["buckets"].sum(axis=0, dtype=np.uint64)
    return Latency(
        count=int(buckets.sum()),
        total_count=int(taken["total"]["count"]),
        total_sum=int(taken["total"]["sum"]),
        buckets=buckets,
    )


def committed_bytes(header: Array) -> int:
    """Shared memory behind a queue, from its header; metadata that is not yet used included."""
    slots, rings = int(header["slots_committed"]), int(header["ring_mask"]) + 1
    return (
        header.dtype.itemsize
        + slots * layout.dtype("slot").itemsize
        + rings * (4 * 4 + 2 * 12)
        + int(header["sessions_committed"]) * layout.dtype("session").itemsize
        + layout.dtype("latency").itemsize
        + int(header["arena_committed"])
    )


def _oldest_age(view: QueueView) -> float | None:
    waiting = np.concatenate((view.requeue, view.front("ready", 1)))
    if not len(waiting):
        return None
    slots = view.slots
    oldest = int(slots["timestamp"][waiting[waiting < len(slots)]].min(initial=_LATEST))
    return None if oldest == _LATEST else max(time.time_ns() - oldest, 0) / 1e9


_LATEST = np.iinfo(np.int64).max


def _sessions(view: QueueView, clients: dict[int, ClientStats]) -> list[SessionStats]:
    table = view.sessions
    found = []
    for index in np.flatnonzero(table["client"]).tolist():
        row = table[index]
        client = clients.get(int(row["client"]) - 1)
        if client is not None:
            found.append(
                SessionStats(
                    client=client,
                    max_in_flight=int(row["max_in_flight"]),
                    in_flight=int(row["in_flight"]),
                    since=int(row["since"]),
                    delivered=int(row["delivered"]),
                    finished=int(row["finished"]),
                    requeued=int(row["requeued"]),
                    timed_out=int(row["timed_out"]),
                    index=index,
                )
            )
    return found
