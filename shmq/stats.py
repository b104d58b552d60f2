"""The counts of a broker, read from its segments without a lock; and nsqd's `/stats` document.

Counts follow nsqd's (`nsqd/stats.go`): `depth` leaves out messages in flight or deferred, and
`message_count` counts arrivals, not deliveries. Counters begin at zero when a queue is created;
unlike nsqd's they survive a restart of the supervisor.

The numbers of one queue are read within microseconds of each other but not under its locks, so they
may differ by the number of messages that moved meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import time
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shmq import layout, peek, sources
from shmq.arguments import number
from shmq.errors import Gone
from shmq.layout import Array, ClientKind, ClientState
from shmq.nsqd import NSQD_VERSION
from shmq.peek import LeaseEntry
from shmq.settings import Settings
from shmq.shm import SHM_DIRECTORY
from shmq.sources import Source
from shmq.views import DirectoryView, QueueView

#: Free bytes of /dev/shm below which it counts as full: a channel takes 84 KiB at once and doubles
#: its memory as it fills.
_LEAST_SHM = 1 << 20


@dataclass(frozen=True)
class ClientStats:
    """A process that is attached. pid, uid: the process and its user."""

    index: int
    """Index of its client entry."""
    pid: int
    kind: str
    """client, supervisor or gateway."""
    uid: int
    attached_at: int
    """When it attached, CLOCK_REALTIME ns."""
    pins: int
    """Number of message views it holds."""

    @functools.cached_property
    def cmd(self) -> str:
        """Its command line, looked up at first use; "" if the process has ended or this user may
        not see it."""
        import psutil

        try:
            return " ".join(psutil.Process(self.pid).cmdline())
        except psutil.Error:
            return ""


@dataclass(frozen=True)
class SessionStats:
    """A consumer of a channel. One process may have several.

    max_in_flight: the messages it may hold at a time. in_flight: those it holds. delivered,
    finished, requeued, timed_out: counts of its deliveries since it was opened.
    """

    client: ClientStats
    max_in_flight: int
    in_flight: int
    since: int
    """When it was opened, CLOCK_REALTIME ns."""
    delivered: int
    finished: int
    requeued: int
    timed_out: int
    index: int
    """Index of its session in the queue."""

    def to_json(self) -> dict[str, Any]:
        """Return the document that nsqd's /stats has for a client of a channel."""
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
    """Messages finished in the last 5 to 10 minutes, from which the percentiles are taken."""
    total_count: int
    """Messages finished since the channel was created."""
    total_sum: int
    """The sum of the times of `total_count` messages, in ns."""
    buckets: NDArray[np.uint64] = field(repr=False)
    """The messages of `count` by bucket; `bounds()` has each bucket's upper bound."""

    @staticmethod
    def bounds() -> NDArray[np.float64]:
        """Return the upper bound of each bucket, in ns; the last bucket has none."""
        count, first = layout.constant("LATENCY_BUCKETS"), layout.constant("LATENCY_FIRST")
        index = np.arange(count - 1)
        upper = 2.0 ** (first + index // 8) * (1 + (index % 8 + 1) / 8)
        return np.concatenate(([2.0**first], upper))

    def percentile(self, quantile: float) -> float | None:
        """Return the seconds within which a share of the messages was finished; None if there were
        none. quantile: from 0 to 1, else raises ValueError."""
        if not 0 <= number("quantile", quantile) <= 1:
            raise ValueError(f"quantile must be from 0 to 1, not {quantile}")
        if not self.count:
            return None
        reached = np.searchsorted(np.cumsum(self.buckets), max(quantile * self.count, 1))
        return float(self.bounds()[min(int(reached), len(self.buckets) - 1)]) / 1e9


@dataclass(frozen=True)
class ChannelStats:
    """Counts of a channel, or of a topic's backlog (then `name` is None).

    in_flight, deferred: messages now. delivered, finished, requeue_count, timeout_count, spilled,
    restored: counters since the channel was created. message_bytes: bytes of the bodies of
    `message_count`.
    """

    name: str | None
    depth: int
    """Messages that wait, in memory and on disk, without those in flight or deferred."""
    backend_depth: int
    """Those of `depth` that are on disk."""
    in_flight: int
    deferred: int
    message_count: int
    """Messages that entered the channel; redeliveries do not count."""
    message_bytes: int
    delivered: int
    finished: int
    requeue_count: int
    timeout_count: int
    returned: int
    """Deliveries taken back from consumers that died or closed."""
    dropped: int
    """Messages that a full ephemeral channel did not take."""
    spilled: int
    """Messages moved from memory to disk; `restored`: from disk to memory."""
    restored: int
    paused: bool
    ephemeral: bool
    memory_bytes: int
    """Bytes of shared memory that are committed for it."""
    body_bytes: int
    """Those of `memory_bytes` that hold bodies, also of finished messages whose room is not needed
    yet."""
    oldest_age: float | None
    """Seconds since the longest waiting message in memory was published; None if none waits."""
    queue: int
    """Index of its queue."""
    serial: int
    """Serial of its queue, the number in the segment's name."""
    latency: Latency
    expired: int = 0
    """Messages whose time to live was over."""
    dead_lettered: int = 0
    """Messages moved to the dead topic."""
    dropped_oldest: int = 0
    """Waiting messages that made room for newer ones (overflow=drop-oldest)."""
    rejected: int = 0
    """Publishes that a limit refused (overflow=reject)."""
    body_limit: int = 0
    """Bytes of bodies that it may have in memory (`arena_size`)."""
    held_bytes: int = 0
    """Bytes of the bodies of messages in flight, deferred or leased in memory. With three quarters
    of `body_limit` consumers get no more, so that the others can still go to disk."""
    settings: Settings | None = None
    """Its settings; None if its segment is damaged."""
    leased: int = 0
    """Messages in leases."""
    leases: list[LeaseEntry] = field(default_factory=list)
    """Open leases, the oldest first."""
    sessions: list[SessionStats] = field(default_factory=list)
    """Its consumers."""

    def to_json(self, include_clients: bool = True) -> dict[str, Any]:
        """Return the document that nsqd's /stats has for a channel."""
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
                "expired_count": self.expired,
                "dead_lettered_count": self.dead_lettered,
                "dropped_oldest_count": self.dropped_oldest,
                "rejected_count": self.rejected,
                "settings": None if self.settings is None else self.settings.to_json(),
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
    """Counts of a topic. Its own depth is that of its backlog: the messages that no channel has
    yet."""

    name: str
    message_count: int
    """Messages published to it."""
    message_bytes: int
    """Bytes of their bodies."""
    paused: bool
    ephemeral: bool
    channels: list[ChannelStats] = field(default_factory=list)
    """Its channels, by name."""
    backlog: ChannelStats | None = None
    """Its backlog queue; None if it has none."""
    settings: Settings | None = None
    """Its later channels begin with these; None if its entry is damaged."""

    @property
    def depth(self) -> int:
        """Messages that wait for a channel, or until the topic is no longer paused."""
        return self.backlog.depth if self.backlog else 0

    @property
    def backend_depth(self) -> int:
        """Those of `depth` that are on disk."""
        return self.backlog.backend_depth if self.backlog else 0

    def to_json(self, include_clients: bool = True) -> dict[str, Any]:
        """Return the document that nsqd's /stats has for a topic."""
        return {
            "topic_name": self.name,
            "channels": [channel.to_json(include_clients) for channel in self.channels],
            "depth": self.depth,
            "backend_depth": self.backend_depth,
            "message_count": self.message_count,
            "message_bytes": self.message_bytes,
            "paused": self.paused,
            "e2e_processing_latency": {"count": 0, "percentiles": None},
            "shmq": {"settings": None if self.settings is None else self.settings.to_json()},
        }


_N = TypeVar("_N", TopicStats, ChannelStats)


@dataclass(frozen=True)
class BrokerStats:
    """Counts of an instance."""

    instance: str
    """Its name."""
    supervisor_pid: int
    """The supervisor's process, or the last one's; 0 if there was none yet."""
    supervisor_alive: bool
    heartbeat_age: float
    """Seconds since the supervisor's last heartbeat."""
    start_time: int
    """When the supervisor started, CLOCK_REALTIME ns."""
    epoch: int
    """Number of supervisors this shared memory has had."""
    stopping: bool
    """Whether the instance is being stopped."""
    reaped: int
    """Dead clients whose messages were taken back."""
    rebuilt: int
    """Queues rebuilt after a death inside them."""
    topics: list[TopicStats] = field(default_factory=list)
    """Its topics, by name."""
    clients: list[ClientStats] = field(default_factory=list)
    """The attached processes, including supervisor and gateway."""
    foreign: bool = False
    """Whether the supervisor is in another PID namespace; `supervisor_alive` is then judged by its
    heartbeat."""
    data_path: str = ""
    """The directory where the supervisor keeps its files; "" if it is not known."""
    disk_errno: int = 0
    """The errno with which the data path refuses writes; 0 if it does not, or no supervisor
    lives."""
    disk_trouble_since: int | None = None
    """Since when it refuses them, in seconds since 1970."""
    shm_total: int = 0
    """Bytes of /dev/shm; 0 if it has no limit of its own."""
    shm_free: int = 0
    """Free bytes of /dev/shm."""

    @property
    def health(self) -> str:
        """`OK`, or `NOK - <reason>` as in nsqd: no supervisor lives, its data path cannot be
        written, or /dev/shm is full."""
        trouble = self.trouble
        return f"NOK - {trouble[0]}" if trouble else "OK"

    @property
    def trouble(self) -> list[str]:
        """The conditions that keep the broker from its work, as sentences, the worst first."""
        found = []
        if not self.supervisor_alive:
            found.append(
                "the supervisor, in another PID namespace, gives no sign of life"
                if self.foreign
                else "the supervisor is not running"
            )
        if self.disk_errno:
            found.append(self._disk_said)
        if self.shm_is_full:
            found.append(f"/dev/shm is full: {self.shm_free} of {self.shm_total} bytes are free")
        return found

    @property
    def _disk_said(self) -> str:
        path, said = f"the data path {self.data_path}", os.strerror(self.disk_errno)
        if self.disk_errno == errno.ESTALE:
            return f"{path} is not the directory that it was (moved, or its file system unmounted)"
        if self.disk_errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{path} is full: {said}{self._without_names}"
        return f"{path} cannot be written: {said}"

    @property
    def _without_names(self) -> str:
        with contextlib.suppress(OSError):
            room = os.statvfs(self.data_path)
            if self.disk_errno == errno.ENOSPC and room.f_files and not room.f_favail:
                return ": no inodes are left there"
        return ""

    @property
    def shm_is_full(self) -> bool:
        """Whether /dev/shm has no room for another channel."""
        return self.shm_total > 0 and self.shm_free < _LEAST_SHM

    @functools.cached_property
    def data_path_free(self) -> int | None:
        """Free bytes of the data path's file system, looked up at first use; None if this process
        cannot see that directory."""
        try:
            room = os.statvfs(self.data_path) if self.data_path else None
        except OSError:
            return None
        return None if room is None else room.f_bavail * room.f_frsize

    def topic(self, name: str) -> TopicStats:
        """Return the topic of this name. Raises Gone, which is also a KeyError, if there is
        none."""
        return _named(self.topics, name, f"topic {name!r} on instance {self.instance!r}")

    def channel(self, topic: str, channel: str) -> ChannelStats:
        """Return the channel of this name. Raises Gone, which is also a KeyError, if there is
        none."""
        what = f"channel {topic}/{channel} on instance {self.instance!r}"
        return _named(self.topic(topic).channels, channel, what)

    def to_json(
        self,
        topic: str | None = None,
        channel: str | None = None,
        include_clients: bool = True,
    ) -> dict[str, Any]:
        """Return nsqd's `/stats?format=json` without its `memory`; fields that nsqd does not have
        are under "shmq".

        topic, channel: show only these, with nsqd's answers for unknown ones (null and []).
        include_clients: show the consumers of each channel.
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
    """Gone, as everywhere else, and also a KeyError, because a name was looked up."""

    __str__ = Exception.__str__  # KeyError's would put the text in quotation marks


def _named(items: list[_N], name: str, what: str) -> _N:
    for item in items:
        if item.name == name:
            return item
    raise _Missing(f"there is no {what}")


# ---- reading ----


def collect(source: Source, alive: bool | None = None, topic_name: str = "") -> BrokerStats:
    """Read all counts. alive: whether the supervisor lives, if the caller knows exactly from an
    attachment. topic_name: read only those of this topic, which costs no look at other queues."""
    directory = source.directory
    broker = read_broker(source, alive)
    clients = {client.index: client for client in broker.clients}
    found: dict[int, list[ChannelStats]] = {}
    topics = [item for item in directory.live_topics() if topic_name in ("", item.name)]
    wanted = {item.index for item in topics} if topic_name else None
    for entry, view in sources.live_queues(source, wanted):
        stats = read_queue(entry.channel, view, clients, entry.ephemeral)
        found.setdefault(entry.topic, []).append(stats)
    for topic in topics:
        queues = found.get(topic.index, [])
        channels = [item for item in queues if item.name is not None]
        broker.topics.append(
            TopicStats(
                name=topic.name,
                message_count=topic.messages,
                message_bytes=topic.bytes,
                paused=topic.paused,
                ephemeral=topic.ephemeral,
                channels=sorted(channels, key=lambda item: item.name or ""),
                backlog=next((item for item in queues if item.name is None), None),
                settings=directory.topic_settings(topic.index),
            )
        )
    broker.topics.sort(key=lambda item: item.name)
    return broker


def read_broker(source: Source, alive: bool | None = None) -> BrokerStats:
    """Read the counts of the instance itself, without those of its topics. alive: as in
    `collect`."""
    directory = source.directory
    header = directory.header
    age = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - int(header["heartbeat"])
    alive = sources.supervisor_alive(directory) if alive is None else alive
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
        clients=list(read_clients(directory).values()),
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
            kind=ClientKind(kind).name.lower() if kind in _KINDS else str(kind),
            uid=int(row["uid"]),
            attached_at=int(row["attached_at"]),
            pins=int(np.count_nonzero(used)),
        )
    return found


_KINDS = frozenset(ClientKind)


def read_queue(
    name: str | None,
    view: QueueView,
    clients: dict[int, ClientStats] | None = None,
    ephemeral: bool = False,
) -> ChannelStats:
    """Read the counts of a channel, or (name None) of a topic's backlog, from its segment."""
    header: Array = view.header.copy()  # read once, so that the numbers fit together
    run = peek.run_length(header)
    disk = max(0, int(header["disk_depth"]) - run)
    body_bytes = int(header["arena_committed"]) - int(header["arena"]["free_bytes"])
    return ChannelStats(
        name=name,
        depth=_depth(view, header, disk),
        backend_depth=disk,
        in_flight=int(header["in_flight_len"]),
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
        oldest_age=oldest_age(view),
        queue=int(header["index"]),
        serial=int(header["segment"]["serial"]),
        latency=_latency(view),
        expired=int(header["expired"]),
        dead_lettered=int(header["dead_lettered"]),
        dropped_oldest=int(header["dropped_oldest"]),
        rejected=int(header["rejected"]),
        body_limit=int(header["arena_max"]),
        held_bytes=_held_bytes(view, header),
        settings=view.settings,
        leased=int(header["leased"]) + run,
        leases=peek.open_leases(view) if header["leased"] or run else [],
        sessions=_sessions(view, clients or {}),
    )


def depth(view: QueueView) -> int:
    """The number of messages of a queue that wait, in memory and on disk."""
    header: Array = view.header.copy()
    return _depth(view, header, max(0, int(header["disk_depth"]) - peek.run_length(header)))


def _depth(view: QueueView, header: Array, on_disk: int) -> int:
    waiting = view.ring_length("ready") + view.ring_length("requeue")
    return waiting + on_disk + int(header["spilling_count"])


def _held_bytes(view: QueueView, header: Array) -> int:
    """Bytes of the blocks of messages in flight, deferred or leased. The core counts those with
    them that came back, or were read from disk, and wait again."""
    used = int(header["in_use_bytes"])
    if used:
        slots, waiting = view.slots, view.front("requeue", layout.NONE)
        blocks = slots["capacity"][waiting[waiting < len(slots)]].astype(np.int64)
        used -= int(blocks.sum()) + layout.constant("ARENA_HEAD") * len(blocks)
    return max(used, 0)


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
    """Bytes of shared memory that a queue has committed, from its header, including metadata that
    is not used yet."""
    slots, rings = int(header["slots_committed"]), int(header["ring_mask"]) + 1
    return (
        header.dtype.itemsize
        + slots * layout.dtype("slot").itemsize
        + rings * (4 * 4 + 2 * 12)
        + int(header["sessions_committed"]) * layout.dtype("session").itemsize
        + layout.dtype("latency").itemsize
        + int(header["arena_committed"])
    )


def oldest_age(view: QueueView) -> float | None:
    """Seconds since the longest waiting message of a queue in memory was published; None if none
    waits there."""
    oldest = peek.oldest_at(view)
    return None if oldest is None else max(time.time_ns() - oldest, 0) / 1e9


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
