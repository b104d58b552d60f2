"""One channel, the dead letters, the leases, the processes and the results stores, for the page."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final

import numpy as np

from shmq import peek, settings, stats
from shmq.client.dead_letters import DeadLetter
from shmq.errors import Gone, LayoutMismatch
from shmq.page import arrow, bodies
from shmq.page.snapshot import Snapshots
from shmq.settings import Settings
from shmq.sources import ReadOnlySource
from shmq.stats import ChannelStats, ClientStats, Latency
from shmq.views import QueueEntry, QueueView

#: Messages of one state that travel at once.
MOST_MESSAGES: Final = 200
#: Dead letters of one topic that are grouped.
_MOST_LETTERS: Final = 20_000
_PREVIEW: Final = 200  # bytes of a body in a list


def find(source: ReadOnlySource, topic: str, channel: str | None) -> tuple[QueueEntry, QueueView]:
    """A channel's queue, or (channel None) the backlog of a topic. Raises Gone."""
    entry = source.directory.find_topic(topic)
    found = entry and source.directory.find_queue(entry.index, channel)
    if not found:
        raise no_channel(source.instance, topic, channel)
    return found, source.queue(found)


def no_channel(instance: str, topic: str, channel: str | None) -> Gone:
    """The error for a channel that is not there, or not for this viewer."""
    return Gone(f"there is no channel {topic}/{channel or ''} on instance {instance!r}")


def no_topic(instance: str, topic: str) -> Gone:
    """The error for a topic that is not there, or not for this viewer."""
    return Gone(f"there is no topic {topic!r} on instance {instance!r}")


# ---- a channel ----


def channel(source: ReadOnlySource, topic: str, name: str | None) -> dict[str, Any]:
    """Counts, settings, consumers, holders, leases and times of a channel. Raises Gone."""
    entry, view = find(source, topic, name)
    clients = stats.read_clients(source.directory)
    counts = stats.read_queue(entry.channel, view, clients, entry.ephemeral)
    held = peek.peek(view, "in_flight", MOST_MESSAGES, source.directory.clients, _PREVIEW)
    return {
        "topic": topic,
        "channel": name,
        "ephemeral": entry.ephemeral,
        "counts": _counts(counts),
        "settings": _fields(counts.settings),
        "consumers": [
            {
                "pid": session.client.pid,
                "command": session.client.cmd,
                "since": session.since // 10**6,
                "max_in_flight": _bounded(session.max_in_flight),
                "in_flight": session.in_flight,
                "delivered": session.delivered,
                "finished": session.finished,
                "requeued": session.requeued,
                "timed_out": session.timed_out,
            }
            for session in counts.sessions
        ],
        "holders": [_message(message, clients) for message in held],
        "leases": [_lease(lease) for lease in counts.leases],
        "latency": _latency(counts.latency),
    }


def _counts(counts: ChannelStats) -> dict[str, Any]:
    names = (
        "depth backend_depth in_flight deferred leased message_count message_bytes delivered "
        "finished requeue_count timeout_count returned dropped spilled restored expired "
        "dead_lettered dropped_oldest rejected paused memory_bytes body_bytes oldest_age"
    )
    return {name: getattr(counts, name) for name in names.split()}


def _fields(held: Settings | None) -> list[dict[str, Any]]:
    """The settings as a form has them: name, text, what may be written, what it means, and the
    choices if there are few."""
    return [
        {
            "name": name,
            "text": text,
            "values": settings.MEANINGS[name][0],
            "meaning": settings.MEANINGS[name][1],
            "choices": _choices(name),
        }
        for name, text in ({} if held is None else held.texts()).items()
    ]


def _choices(name: str) -> list[str] | None:
    values = settings.MEANINGS[name][0].split(", ")
    return values if name == "overflow" or values == ["true", "false"] else None


def topic(source: ReadOnlySource, name: str) -> dict[str, Any]:
    """A topic's counts, its channels and the settings that its later channels begin with. Raises
    Gone."""
    entry = source.directory.find_topic(name)
    if entry is None:
        raise no_topic(source.instance, name)
    channels = []
    for queue in source.directory.live_queues():
        if queue.topic != entry.index:
            continue
        with contextlib.suppress(Gone, LayoutMismatch):
            counts = stats.read_queue(queue.channel, source.queue(queue))
            names = ("depth", "in_flight", "deferred", "paused")
            found = {name: getattr(counts, name) for name in names}
            channels.append({"channel": queue.channel, **found})
    return {
        "topic": name,
        "message_count": entry.messages,
        "message_bytes": entry.bytes,
        "paused": entry.paused,
        "settings": _fields(source.directory.topic_settings(entry.index)),
        "channels": sorted(channels, key=lambda each: str(each["channel"] or "")),
    }


def _bounded(number: int) -> int | None:
    return None if number >= (1 << 32) - 1 else number


def _latency(latency: Latency) -> dict[str, Any]:
    """The histogram's upper bounds in ms (the last bucket has none) and the messages in each."""
    used = np.flatnonzero(latency.buckets)
    first, last = (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)
    bounds = (latency.bounds() / 1e6).tolist()
    return {
        "count": latency.count,
        "bounds": [round(bound, 6) for bound in bounds[first:last]],
        "messages": latency.buckets[first:last].tolist(),
        "percentiles": {
            f"p{share * 100:g}": latency.percentile(share) for share in (0.5, 0.9, 0.99, 0.999)
        },
    }


# ---- messages ----


def messages(
    source: ReadOnlySource, topic: str, name: str | None, state: str, n: int
) -> list[dict[str, Any]]:
    """The first messages of a state ("ready", "requeued", "in_flight", "deferred") in memory, with
    the beginning of their bodies. Raises Gone, and ValueError for another state."""
    _, view = find(source, topic, name)
    clients = stats.read_clients(source.directory)
    found = peek.peek(view, state, min(n, MOST_MESSAGES), source.directory.clients, most=_PREVIEW)
    return [_message(message, clients) for message in found]


def message(
    source: ReadOnlySource, topic: str, name: str | None, wanted: str
) -> tuple[dict[str, Any], bytes | None]:
    """One message in memory with its body, and, if that may be Arrow data, the beginning of it.
    wanted: its id. Raises Gone if it is not there."""
    _, view = find(source, topic, name)
    table = source.directory.clients
    id = int(wanted, 16) if re.fullmatch("[0-9a-f]{16}", wanted) else None
    seen = None if id is None else peek.find(view, id, table, bodies.MOST)
    if id is None or seen is None:
        raise Gone(f"message {wanted} is not in the memory of {topic}/{name or ''} any more")
    data = None
    if arrow.begins(seen.body):
        again = peek.find(view, id, table, arrow.MOST)
        data = None if again is None else again.body
    return _message(seen, stats.read_clients(source.directory), bodies.MOST), data


def _message(
    seen: peek.Peeked, clients: dict[int, ClientStats], most: int = _PREVIEW
) -> dict[str, Any]:
    client = None if seen.client is None else clients.get(seen.client)
    return {
        "id": seen.id,
        "state": seen.state,
        "published": seen.timestamp // 10**6,
        "attempts": seen.attempts,
        "failures": seen.failures,
        "due": None if seen.due is None else seen.due // 10**6,
        "pid": seen.pid,
        "command": None if client is None else client.cmd,
        "since": None if seen.since is None else seen.since // 10**6,
        "until": None if seen.until is None else seen.until // 10**6,
        "properties": {
            key: bodies.shown(value, _PREVIEW)["text"] for key, value in seen.properties.items()
        },
        "body": bodies.shown(seen.body, most, seen.length),
    }


# ---- dead letters ----


def dead(snapshots: Snapshots) -> list[dict[str, Any]]:
    """The dead letters in memory of all channels, grouped by where they died, reason and error,
    the most frequent group first."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for topic, entry, view in snapshots.holding("messages"):
        if entry.channel is None:
            continue
        for most in (1, _MOST_LETTERS):  # a channel holds dead letters, or none
            letters = peek.peek(view, "ready", most, most=_PREVIEW)
            if not letters or "dead-reason" not in letters[0].properties:
                break
        else:
            for seen in letters:
                if "dead-reason" not in seen.properties:
                    break
                _add(groups, topic, entry.channel, DeadLetter.of(seen), seen.length)
    return sorted(groups.values(), key=lambda group: -group["count"])


def _add(
    groups: dict[tuple[Any, ...], dict[str, Any]],
    topic: str,
    name: str,
    letter: DeadLetter,
    length: int,
) -> None:
    key = (topic, name, letter.source, letter.reason, letter.error)
    when = None if letter.when is None else letter.when // 10**6
    group = groups.setdefault(
        key,
        {
            "topic": topic,
            "channel": name,
            "source": letter.source,
            "reason": letter.reason,
            "error": letter.error,
            "count": 0,
            "first": when,
            "last": when,
            "example": {"id": letter.id, "body": bodies.shown(letter.body, _PREVIEW, length)},
        },
    )
    group["count"] += 1
    if when is not None:
        group["first"] = min(group["first"] or when, when)
        group["last"] = max(group["last"] or when, when)


# ---- leases, processes, results ----


def leases(snapshots: Snapshots) -> list[dict[str, Any]]:
    """The open leases of all channels."""
    found = []
    for topic, entry, view in snapshots.holding("leases"):
        place = {"topic": topic, "channel": entry.channel}
        found += [place | _lease(lease) for lease in peek.open_leases(view)]
    return found


def _lease(lease: peek.LeaseEntry) -> dict[str, Any]:
    return {
        "id": lease.id,
        "holder": lease.holder,
        "pid": lease.pid or None,
        "messages": lease.count,
        "on_disk": lease.on_disk,
        "bytes": lease.bytes,
        "parts": lease.parts,
        "replays": lease.replays,
        "since": lease.since // 10**6,
    }


def processes(snapshots: Snapshots) -> list[dict[str, Any]]:
    """The attached processes with the messages that each one holds."""
    clients = stats.read_clients(snapshots.source.directory)
    held: dict[int, int] = {}
    for _, _, view in snapshots.holding("deliveries"):
        table = view.sessions
        for row in table[table["client"] != 0]:
            client = int(row["client"]) - 1
            held[client] = held.get(client, 0) + int(row["in_flight"])
    return [
        {
            "pid": client.pid,
            "kind": client.kind,
            "user": client.uid,
            "command": client.cmd,
            "since": client.attached_at // 10**6,
            "holds": held.get(client.index, 0),
            "views": client.pins,
        }
        for client in clients.values()
    ]


def results(snapshots: Snapshots) -> list[dict[str, Any]]:
    """The results stores with their counts and limits."""
    source, found = snapshots.source, []
    for store in source.directory.live_stores():
        with contextlib.suppress(Gone, LayoutMismatch):
            view = source.store(store)
            names = ("keys", "bytes", "stored", "removed", "expired", "refused")
            counts = {name: view.read(name) for name in names}
            limits = {"max_keys": store.max_keys, "max_bytes": store.max_bytes}
            found.append({"name": store.name, **counts, **limits})
    return found
