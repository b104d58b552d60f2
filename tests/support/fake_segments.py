"""Segments made of bytes, so that a test can show a view any state, half-done ones too."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from shmq import _native, layout
from shmq.layout import EntryState, Ready, Role, State
from shmq.views import DirectoryView, QueueEntry, QueueView

SECOND = 10**9


def _segment(header: Any, kind: int, size: int, serial: int = 0) -> None:
    segment = header["segment"]
    segment["magic"] = layout.MAGIC
    segment["layout_version"] = layout.LAYOUT_VERSION
    segment["kind"] = kind
    segment["fingerprint"] = _native.fingerprint()
    segment["size"] = size
    segment["serial"] = serial
    segment["ready"] = Ready.READY


class FakeQueue:
    """A queue segment with room for `slots` messages of up to 64 bytes."""

    def __init__(self, slots: int = 8, serial: int = 7, index: int = 0) -> None:
        at = _native.SIZES["queue"]
        ring = 1 << (slots - 1).bit_length()
        places = {}
        for name, nbytes in (
            ("slots_at", slots * _native.SIZES["slot"]),
            *((f"{name}_at", 8 * ring) for name in ("ready", "defer", "requeue", "free")),
            *((f"{name}_at", 8 * slots) for name in ("in_flight_when", "in_flight_slot")),
            *((f"{name}_at", 8 * slots) for name in ("deferred_when", "deferred_slot")),
            ("sessions_at", layout.constant("SESSIONS") * _native.SIZES["session"]),
            ("leases_at", layout.constant("LEASES") * _native.SIZES["lease"]),
            ("lease_holders_at", layout.constant("LEASE_HOLDERS") * _native.SIZES["lease_holder"]),
            ("latency_at", _native.SIZES["latency"]),
            ("arena_at", slots * 64),
        ):
            places[name], at = at, at + nbytes
        self.buffer = bytearray(at)
        self.header = np.ndarray((), layout.dtype("queue"), self.buffer)
        _segment(self.header, 2, at, serial)
        for name, place in places.items():
            self.header[name] = place
        self.header["index"] = index
        self.header["slots_max"] = self.header["slots_committed"] = slots
        self.header["arena_max"] = self.header["arena_committed"] = slots * 64
        self.header["arena"]["free_bytes"] = slots * 64
        self.header["sessions_committed"] = 4
        self.header["ring_mask"] = ring - 1
        self.slots = np.ndarray((slots,), layout.dtype("slot"), self.buffer, places["slots_at"])
        self.sessions = np.ndarray(
            (4,), layout.dtype("session"), self.buffer, places["sessions_at"]
        )
        self.arena = np.ndarray((slots * 64,), "u1", self.buffer, places["arena_at"])
        self.rings = {
            name: np.ndarray((ring,), "<u4", self.buffer, places[f"{name}_at"])
            for name in ("ready", "defer", "requeue", "free")
        }
        self.heaps = {
            name: (
                np.ndarray((slots,), "<i8", self.buffer, places[f"{name}_when_at"]),
                np.ndarray((slots,), "<u4", self.buffer, places[f"{name}_slot_at"]),
            )
            for name in ("in_flight", "deferred")
        }
        self.used = 0

    def message(
        self, state: State, body: bytes = b"body", deadline: int = 0, client: int = 0
    ) -> int:
        """The next slot in this state; its id is its number + 1, its age its number in seconds."""
        number, self.used = self.used, self.used + 1
        slot = self.slots[number]
        slot["word"] = int(state) | client << 8 | 1 << 24
        slot["id"] = number + 1
        slot["timestamp"] = time.time_ns() - number * SECOND
        slot["attempts"] = number
        slot["deadline"] = deadline
        slot["body"] = number * 64
        slot["length"] = len(body)
        self.arena[number * 64 : number * 64 + len(body)] = np.frombuffer(body, "u1")
        self.header["arena"]["free_bytes"] -= 64
        return number

    def ring(self, name: str, slots: list[int], head: int = 0) -> None:
        """The entries of the ring and its head."""
        mask = len(self.rings[name]) - 1
        for position, slot in enumerate(slots, head):
            self.rings[name][position & mask] = slot
        self.header[f"{name}_head"] = head & layout.NONE
        self.header[f"{name}_tail"] = (head + len(slots)) & layout.NONE

    def heap(self, name: str, entries: list[tuple[int, int]]) -> None:
        """The entries of the heap `in_flight` or `deferred`: (time, slot)."""
        when, slot = self.heaps[name]
        for position, entry in enumerate(sorted(entries)):
            when[position], slot[position] = entry
        self.header[f"{name}_len"] = len(entries)

    def view(self) -> QueueView:
        return QueueView(self.buffer)


class FakeDirectory:
    """A directory segment with room for four clients, topics and queues."""

    def __init__(self) -> None:
        at = _native.SIZES["directory"]
        places = {}
        for field, structure, table in (
            ("clients_at", "client", "CLIENTS"),
            ("waiters_at", "waiter", "WAITERS"),
            ("requests_at", "request", "REQUESTS"),
            ("topics_at", "topic", "TOPICS"),
            ("queues_at", "entry", "QUEUES"),
        ):
            places[field] = at
            at += _native.SIZES[structure] * layout.constant(table)
        for field in ("deadline_at", "due_at"):
            places[field], at = at, at + 8 * layout.constant("QUEUES")
        places["writers_at"] = at
        at += _native.SIZES["writer"] * layout.constant("WRITERS")
        places["stores_at"] = at
        at += _native.SIZES["store_entry"] * layout.constant("STORES")
        self.buffer = bytearray(at)
        self.header = np.ndarray((), layout.dtype("directory"), self.buffer)
        _segment(self.header, 1, at)
        for field, place in places.items():
            self.header[field] = place
        for table in ("clients", "topics", "queues"):
            self.header[f"{table}_committed"] = 4
        self.header["heartbeat"] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self.clients, self.topics, self.queues = (
            np.ndarray((4,), layout.dtype(structure), self.buffer, places[field])
            for structure, field in (
                ("client", "clients_at"),
                ("topic", "topics_at"),
                ("entry", "queues_at"),
            )
        )

    def topic(self, index: int, name: str, messages: int = 0) -> None:
        row = self.topics[index]
        row["state"], row["name"], row["messages"] = EntryState.LIVE, name.encode(), messages

    def queue(self, index: int, topic: int, channel: str | None, serial: int) -> None:
        row = self.queues[index]
        row["state"], row["topic"], row["serial"] = EntryState.LIVE, topic, serial
        row["role"] = Role.BACKLOG if channel is None else Role.CHANNEL
        row["name"] = (channel or "").encode()

    def view(self) -> DirectoryView:
        return DirectoryView(self.buffer)


class FakeSource:
    """A directory and its queues, by serial."""

    instance = "fake"

    def __init__(self, directory: FakeDirectory, *queues: FakeQueue) -> None:
        self.directory = directory.view()
        self._queues = {int(queue.header["segment"]["serial"]): queue for queue in queues}

    def queue(self, entry: QueueEntry) -> QueueView:
        return self._queues[entry.serial].view()
