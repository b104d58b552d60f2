"""`BrokerStats` in Prometheus' text format (version 0.0.4), for `/metrics` and `shmq stat`.

It does without prometheus-client, which would save only the three shortest functions, has no
quantiles in its summaries, and would make the command need an extra. The tests read the pages with
that package's parser.

Counters end in `_total` and are kept in the segments: they survive the death of clients and of the
supervisor, and begin at zero with a new queue or instance. The other families are gauges in base
units. Every sample has the label `broker`, the instance's name (`instance` is Prometheus' own). A
topic's backlog has the label channel="". The time from publish to finish is a summary: its count
and sum are counters, and its quantiles are those of the last minutes.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shmq import layout
from shmq.layout import ClientKind
from shmq.stats import BrokerStats, ChannelStats, TopicStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Number = int | float


@dataclass(frozen=True)
class Metric:
    """One family. name: without `shmq_`. kind: counter, gauge or summary."""

    name: str
    kind: str
    help: str


_BROKER: list[tuple[Metric, Callable[[BrokerStats], Number]]] = [
    (Metric("supervisor_up", "gauge", "Whether the supervisor lives."),
     lambda taken: int(taken.supervisor_alive)),
    (Metric("supervisor_heartbeat_age_seconds", "gauge",
            "Time since the supervisor last showed that it runs."),
     lambda taken: taken.heartbeat_age),
    (Metric("start_time_seconds", "gauge", "When the supervisor started, Unix time."),
     lambda taken: taken.start_time / 1e9),
    (Metric("epoch", "gauge", "How many supervisors this shared memory has seen."),
     lambda taken: taken.epoch),
    (Metric("shm_free_bytes", "gauge", "Bytes that are free in /dev/shm."),
     lambda taken: taken.shm_free),
    (Metric("shm_bytes", "gauge", "Size of /dev/shm; 0 if it has no limit of its own."),
     lambda taken: taken.shm_total),
    (Metric("clients_reaped_total", "counter",
            "Dead clients whose messages were taken back."),
     lambda taken: taken.reaped),
    (Metric("queues_rebuilt_total", "counter",
            "Queues rebuilt after a death inside them."),
     lambda taken: taken.rebuilt),
]  # fmt: skip

_TOPIC: list[tuple[Metric, Callable[[TopicStats], Number]]] = [
    (Metric("messages_published_total", "counter", "Messages published to the topic."),
     lambda topic: topic.message_count),
    (Metric("messages_published_bytes_total", "counter",
            "Bytes of the bodies published to the topic."),
     lambda topic: topic.message_bytes),
    (Metric("topic_paused", "gauge", "Whether the topic is paused."),
     lambda topic: int(topic.paused)),
]  # fmt: skip

_QUEUE: list[tuple[Metric, Callable[[ChannelStats], Number]]] = [
    (Metric("messages_enqueued_total", "counter", "Messages that entered the channel."),
     lambda queue: queue.message_count),
    (Metric("messages_delivered_total", "counter", "Deliveries to consumers, repeated ones too."),
     lambda queue: queue.delivered),
    (Metric("messages_finished_total", "counter", "Messages finished by a consumer."),
     lambda queue: queue.finished),
    (Metric("messages_requeued_total", "counter", "Deliveries given back by a consumer."),
     lambda queue: queue.requeue_count),
    (Metric("messages_timed_out_total", "counter", "Deliveries not finished in time."),
     lambda queue: queue.timeout_count),
    (Metric("messages_recovered_total", "counter",
            "Deliveries taken back from consumers that died or closed."),
     lambda queue: queue.returned),
    (Metric("messages_expired_total", "counter", "Messages whose time to live was over."),
     lambda queue: queue.expired),
    (Metric("messages_dead_lettered_total", "counter", "Messages moved to the dead topic."),
     lambda queue: queue.dead_lettered),
    (Metric("messages_dropped_total", "counter",
            "Messages that a full ephemeral channel did not take."),
     lambda queue: queue.dropped),
    (Metric("messages_dropped_oldest_total", "counter",
            "Waiting messages that made room for newer ones."),
     lambda queue: queue.dropped_oldest),
    (Metric("publishes_rejected_total", "counter", "Publishes that a limit refused."),
     lambda queue: queue.rejected),
    (Metric("messages_spilled_total", "counter", "Messages moved from memory to disk."),
     lambda queue: queue.spilled),
    (Metric("messages_restored_total", "counter", "Messages moved from disk to memory."),
     lambda queue: queue.restored),
    (Metric("ready_messages", "gauge", "Messages waiting, in memory and on disk."),
     lambda queue: queue.depth),
    (Metric("disk_messages", "gauge", "Those of the waiting messages that are on disk."),
     lambda queue: queue.backend_depth),
    (Metric("in_flight_messages", "gauge", "Messages handed out and not yet answered."),
     lambda queue: queue.in_flight),
    (Metric("deferred_messages", "gauge", "Messages whose time has not come."),
     lambda queue: queue.deferred),
    (Metric("leased_messages", "gauge", "Messages in leases."),
     lambda queue: queue.leased),
    (Metric("oldest_ready_age_seconds", "gauge",
            "Time since the longest waiting message in memory was published; 0 if none waits."),
     lambda queue: queue.oldest_age or 0),
    (Metric("segment_bytes", "gauge", "Shared memory committed for the channel."),
     lambda queue: queue.memory_bytes),
    (Metric("segment_body_bytes", "gauge", "Those of its bytes that hold message bodies."),
     lambda queue: queue.body_bytes),
    (Metric("segment_body_limit_bytes", "gauge",
            "Bytes of bodies that the channel may have in memory."),
     lambda queue: queue.body_limit),
    (Metric("segment_held_bytes", "gauge",
            "Bytes of bodies in flight, deferred or leased: at most about 3/4 of the limit."),
     lambda queue: queue.held_bytes),
    (Metric("channel_paused", "gauge", "Whether the channel is paused."),
     lambda queue: int(queue.paused)),
    (Metric("channel_consumers", "gauge", "Consumers of the channel."),
     lambda queue: len(queue.sessions)),
    (Metric("channel_gateway_consumers", "gauge",
            "Those of the consumers that are connections to the gateway."),
     lambda queue: sum(item.client.kind == "gateway" for item in queue.sessions)),
]  # fmt: skip

_BUILD = Metric("build_info", "gauge", "1, with the release and its layout in shared memory.")
_DISK = Metric(
    "disk_trouble", "gauge", "Whether the data path refuses to be written; reason: errno's name."
)
_DISK_FREE = Metric(
    "data_path_free_bytes",
    "gauge",
    "Bytes that are free where the data path is; NaN if that cannot be seen.",
)
_CLIENTS = Metric("clients", "gauge", "Attached processes, the supervisor included.")

_LATENCY = Metric(
    "end_to_end_seconds", "summary", "Time from publish to finish; quantiles of the last minutes."
)
_QUANTILES = (0.5, 0.95, 0.99)

#: Every family.
METRICS: list[Metric] = [
    _BUILD,
    *(metric for metric, _ in _BROKER),
    _DISK,
    _DISK_FREE,
    _CLIENTS,
    *(metric for metric, _ in _TOPIC),
    *(metric for metric, _ in _QUEUE),
    _LATENCY,
]


#: Counters of the processes of the gateway, by the names in their reports.
_GATEWAY: dict[str, Metric] = {
    "connections": Metric("gateway_connections", "gauge",
        "Connections of the gateway, of TCP and HTTP together."),
    "connections_refused": Metric("gateway_connections_refused_total", "counter",
        "Connections for which the gateway had no place."),
    "connections_ended": Metric("gateway_connections_ended_total", "counter",
        "Connections that waited for their client and had to give their place to another one."),
    "proofs_failed": Metric("gateway_proofs_failed_total", "counter",
        "Wrong tokens, passwords and secrets that were shown to the gateway."),
    "proofs_delayed": Metric("gateway_proofs_delayed_total", "counter",
        "Proofs that waited because of wrong ones before."),
    "proofs_refused": Metric("gateway_proofs_refused_total", "counter",
        "Proofs that were refused unseen, because too many of the address waited."),
    "handshakes_failed": Metric("gateway_handshakes_failed_total", "counter",
        "TLS handshakes that failed, also for the client's certificate."),
    "handshakes_refused": Metric("gateway_handshakes_refused_total", "counter",
        "TLS handshakes that were refused, because too many of the address had failed."),
    "identities_unknown": Metric("gateway_identities_unknown_total", "counter",
        "Requests that were refused because the client's certificate or uid is no user's."),
}  # fmt: skip


def of_gateway(instance: str, counts: Mapping[str, int]) -> str:
    """The counters of the processes of the gateway since they started, as text."""
    lines: list[str] = []
    for name, metric in _GATEWAY.items():
        lines += [*_head(metric), _sample(metric, counts.get(name, 0), broker=instance)]
    return "".join(f"{line}\n" for line in lines)


def exposition(taken: BrokerStats, topic: str | None = None, channel: str | None = None) -> str:
    """The page as text. topic, channel: show only these in the families that have such a label."""
    return "".join(f"{line}\n" for line in _lines(taken, topic, channel))


def _lines(taken: BrokerStats, topic: str | None, channel: str | None) -> Iterator[str]:
    broker = taken.instance
    topics = [item for item in taken.topics if topic in (None, item.name)]
    queues = [
        (item.name, queue)
        for item in topics
        for queue in [*item.channels, *([item.backlog] if item.backlog else [])]
        if channel in (None, queue.name)
    ]
    yield from _head(_BUILD)
    yield _sample(
        _BUILD, 1, broker=broker, version=layout.VERSION, layout=str(layout.LAYOUT_VERSION)
    )
    for metric, of_broker in _BROKER:
        yield from _head(metric)
        yield _sample(metric, of_broker(taken), broker=broker)
    reason = errno.errorcode.get(taken.disk_errno, str(taken.disk_errno or ""))
    yield from _head(_DISK)
    yield _sample(_DISK, int(taken.disk_errno != 0), broker=broker, reason=reason)
    yield from _head(_DISK_FREE)
    free = taken.data_path_free
    yield _sample(_DISK_FREE, math.nan if free is None else free, broker=broker)
    yield from _head(_CLIENTS)
    kinds = [item.kind for item in taken.clients]
    for role in dict.fromkeys([*(kind.name.lower() for kind in ClientKind), *kinds]):
        yield _sample(_CLIENTS, kinds.count(role), broker=broker, role=role)
    for metric, of_topic in _TOPIC:
        if topics:
            yield from _head(metric)
        for item in topics:
            yield _sample(metric, of_topic(item), broker=broker, topic=item.name)
    for metric, of_queue in _QUEUE:
        if queues:
            yield from _head(metric)
        for name, queue in queues:
            labels = {"broker": broker, "topic": name, "channel": queue.name or ""}
            yield _sample(metric, of_queue(queue), **labels)
    if queues:
        yield from _head(_LATENCY)
    for name, queue in queues:
        yield from _summary(queue, broker=broker, topic=name, channel=queue.name or "")


def _summary(queue: ChannelStats, **labels: str) -> Iterator[str]:
    latency = queue.latency
    for share in _QUANTILES:
        seconds = latency.percentile(share)
        value = math.nan if seconds is None else seconds
        yield _sample(_LATENCY, value, **labels, quantile=str(share))
    yield _sample(_LATENCY, latency.total_sum / 1e9, "_sum", **labels)
    yield _sample(_LATENCY, latency.total_count, "_count", **labels)


def _head(metric: Metric) -> Iterator[str]:
    help = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    yield f"# HELP shmq_{metric.name} {help}"
    yield f"# TYPE shmq_{metric.name} {metric.kind}"


def _sample(metric: Metric, value: Number, suffix: str = "", **labels: str) -> str:
    pairs = ",".join(f'{name}="{escape(text)}"' for name, text in labels.items())
    text = "NaN" if math.isnan(value) else value
    return f"shmq_{metric.name}{suffix}{{{pairs}}} {text}"


def escape(text: str) -> str:
    """A label's value: backslash, quotation mark and line feed."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
