"""The live topics and queues, with the header, the files and the lock of each.

The directory segment is the truth. This is the supervisor's own index of it. Only the topic manager
changes it, because nobody else creates or deletes queues. Loops work on the tuples `queues` and
`topics`, which are replaced and never changed. With thousands of queues no loop walks all of them
in every round: the scanner looks at two columns of the directory, the spiller at requested queues.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmq import layout
from shmq._native import Broker
from shmq.layout import Array, ClientKind
from shmq.names import base_name, is_ephemeral
from shmq.options import Options
from shmq.shared import Shared
from shmq.storage.deferred import DeferredStore
from shmq.storage.diskqueue import DiskQueue
from shmq.storage.positions import pack
from shmq.views import DirectoryView, QueueView

# The cache lines of a queue's header that change all the time: both sides' indices and the disk
# positions. `Snapshot.of` copies them from several headers into one array.
_HOT_FIRST, _HOT_LAST = "slots_committed", "deliver"

_MEMORY = layout.constant("POLICY_MEMORY")

#: Where a new queue's files begin: not with file 0, so that a flush can write a file before it.
FIRST_POSITION = pack(1, 0)


def _hot_dtype() -> tuple[int, np.dtype[Any]]:
    """Offset of those lines in the header, and their type."""
    whole = layout.dtype("queue")
    assert whole.fields is not None
    begin, end = whole.fields[_HOT_FIRST][1], whole.fields[_HOT_LAST][1]
    inside = {name: item for name, item in whole.fields.items() if begin <= item[1] < end}
    kind = np.dtype(
        {
            "names": list(inside),
            "formats": [item[0] for item in inside.values()],
            "offsets": [item[1] - begin for item in inside.values()],
            "itemsize": end - begin,
        }
    )
    return begin, kind


_HOT_AT, _HOT = _hot_dtype()


def hot_array(count: int) -> Array:
    """An array for the hot lines (`Queue.hot`) of `count` queues."""
    return np.zeros(count, _HOT)


@dataclass(eq=False)
class Topic:
    """A live topic. `queues` maps channel names to queues, and None to the backlog."""

    index: int
    generation: int
    name: str
    queues: Shared[str | None, Queue] = field(default_factory=Shared)

    @property
    def channels(self) -> list[Queue]:
        """Its queues without the backlog."""
        return [queue for name, queue in self.queues.items() if name is not None]


@dataclass(eq=False)
class Queue:
    """A live queue. A thread that spills, restores, renames or deletes holds `lock`, and checks
    `gone` first. No thread waits for `lock` while it holds a lock of the core."""

    index: int
    serial: int
    topic: Topic
    channel: str | None
    view: QueueView
    disk: DiskQueue
    deferred_store: DeferredStore
    lock: threading.RLock = field(default_factory=threading.RLock)
    gone: bool = False
    had_consumer: bool = False
    first_read: int = 0  # read position when the queue was entered

    def __post_init__(self) -> None:
        header = self.view.header.reshape(1).view(np.uint8)
        self.hot = header[_HOT_AT : _HOT_AT + _HOT.itemsize]

    def __str__(self) -> str:
        return base_name(self.topic.name, self.channel)

    @property
    def ephemeral(self) -> bool:
        """True if its messages end with the queue and never go to disk."""
        return is_ephemeral(self.topic.name if self.channel is None else self.channel)

    @property
    def in_memory(self) -> bool:
        """True if its messages do not go to disk while the broker runs: it is ephemeral, or its
        settings say what happens instead when it is full."""
        return self.ephemeral or bool(self.view.read("policy") & _MEMORY)

    @cached_property
    def capacity(self) -> int:
        """How many messages its ready ring may hold."""
        return max(self.view.read("mem_queue_size"), layout.constant("TRANSIT"))

    @cached_property
    def limits(self) -> tuple[int, int, int, int]:
        """Its capacity, `in_flight_slots`, `low_water` and `arena_max`, fixed at its creation."""
        read = self.view.read
        low_water = max(read("low_water"), 1)  # with an overwritten 0 nothing would be restored
        return self.capacity, read("in_flight_slots"), low_water, read("arena_max")

    @property
    def ready(self) -> int:
        """Number of messages in the ready ring."""
        return (self.view.read("ready_tail") - self.view.read("ready_head")) & layout.NONE

    @property
    def waiting(self) -> int:
        """Number of messages in the requeue ring."""
        return (self.view.read("requeue_tail") - self.view.read("requeue_head")) & layout.NONE

    @property
    def positions(self) -> tuple[int, int]:
        """The header's read and write position on disk."""
        return self.view.read("disk_read"), self.view.read("disk_write")

    @property
    def has_files(self) -> bool:
        """True if data files or a position file of it may exist."""
        return self.positions[1] not in (0, FIRST_POSITION) or self.disk.meta_path.exists()


@dataclass(eq=False)
class Snapshot:
    """A copy of the hot header lines of some queues; row i belongs to `queues[i]`. The words of a
    row may be from slightly different moments, so they serve to choose queues, not to decide."""

    queues: Sequence[Queue]
    hot: Array
    capacity: NDArray[np.int64]
    in_flight_slots: NDArray[np.int64]
    low_water: NDArray[np.int64]
    arena_max: NDArray[np.int64]
    in_memory: NDArray[np.bool_]

    @classmethod
    def of(cls, queues: Sequence[Queue]) -> Snapshot:
        """Copy the hot lines of these queues now."""
        hot = hot_array(len(queues))
        if queues:
            np.concatenate([queue.hot for queue in queues], out=hot.view(np.uint8))
        ephemeral = np.array([queue.ephemeral for queue in queues], np.bool_)
        limits = np.array([queue.limits for queue in queues], np.int64).reshape(-1, 4)
        capacity, in_flight_slots, low_water, arena_max = limits.T
        return cls(
            queues,
            hot,
            capacity,
            in_flight_slots,
            low_water,
            arena_max,
            ephemeral | ((hot["policy"] & _MEMORY) != 0),
        )

    @property
    def ready(self) -> NDArray[np.int64]:
        """Number of messages in each ready ring."""
        return _ring_length(self.hot, "ready")

    def at(self, rows: NDArray[np.bool_]) -> list[Queue]:
        """The queues of the rows that are true."""
        return [self.queues[row] for row in np.flatnonzero(rows).tolist()]

    @property
    def waiting(self) -> NDArray[np.int64]:
        """Number of messages in each requeue ring."""
        return _ring_length(self.hot, "requeue")

    @property
    def deferring(self) -> NDArray[np.int64]:
        """Number of messages in each defer ring."""
        return _ring_length(self.hot, "defer")


def _ring_length(hot: Array, ring: str) -> NDArray[np.int64]:
    # unsigned subtraction wraps as the indices do
    length: Array = hot[f"{ring}_tail"] - hot[f"{ring}_head"]
    return length.astype(np.int64)


class Registry:
    """The index of the directory."""

    def __init__(self, broker: Broker, options: Options, max_msg_size: int) -> None:
        """max_msg_size: the largest body that may be on disk. It exceeds the options' limit if a
        predecessor allowed more."""
        self._max_msg_size = max_msg_size
        self.directory = DirectoryView(broker.view(), f"instance {options.instance!r}")
        self._broker = broker
        self._options = options
        self._topics: Shared[str, Topic] = Shared()
        self._queues: Shared[int, Queue] = Shared()
        self._lists: tuple[tuple[Topic, ...], tuple[Queue, ...]] | None = None
        self._lock = threading.Lock()  # of these three
        self.changes = 0  # of names; each counts here after it counted in the directory
        self.ephemeral: Shared[int, Queue] = Shared()  # ephemeral channels, by index

    @property
    def topics(self) -> tuple[Topic, ...]:
        """All live topics."""
        return self._listed()[0]

    @property
    def queues(self) -> tuple[Queue, ...]:
        """All live queues."""
        return self._listed()[1]

    def queue(self, index: int) -> Queue | None:
        """The queue at this place in the directory."""
        return self._queues.get(index)

    def _listed(self) -> tuple[tuple[Topic, ...], tuple[Queue, ...]]:
        lists = self._lists
        if lists is None:
            with self._lock:
                lists = self._lists = tuple(self._topics.values()), tuple(self._queues.values())
        return lists

    # -- changes, by the topic manager

    def topic(self, name: str) -> Topic | None:
        """The live topic of this name."""
        return self._topics.get(name)

    def enter_topic(self, index: int, generation: int, name: str) -> Topic:
        """Enter a topic that is in the directory."""
        topic = Topic(index, generation, name)
        with self._lock:
            self._topics[name] = topic
            self._lists = None
        self.changes += 1
        return topic

    def leave_topic(self, topic: Topic) -> None:
        """Remove a topic that has left the directory."""
        with self._lock:
            del self._topics[topic.name]
            self._lists = None
        self.changes += 1

    def enter_queue(
        self,
        index: int,
        serial: int,
        topic: Topic,
        channel: str | None,
        disk: DiskQueue,
        store: DeferredStore,
    ) -> Queue:
        """Enter a queue that is in the directory, or about to be."""
        view = QueueView(self._broker.view(index), f"queue {serial}")
        queue = Queue(index, serial, topic, channel, view, disk, store)
        queue.first_read = queue.positions[0]
        topic.queues[channel] = queue
        with self._lock:
            self._queues[index] = queue
            self._lists = None
        self.changes += 1
        self._note_ephemeral(queue)
        self._broker.spiller_request(index)
        if None in topic.queues:
            self._broker.spiller_request(
                topic.queues[None].index
            )  # the backlog's messages are for this queue too
        return queue

    def leave_queue(self, queue: Queue) -> None:
        """Remove a queue that has left the directory."""
        queue.gone = True
        if queue.topic.queues.get(queue.channel) is queue:
            del queue.topic.queues[queue.channel]
        with self._lock:
            del self._queues[queue.index]
            self._lists = None
        self.changes += 1
        self.ephemeral.pop(queue.index, None)

    def becomes_channel(self, backlog: Queue, channel: str) -> None:
        """Note that a backlog has become its topic's first channel."""
        del backlog.topic.queues[None]
        backlog.channel = channel
        backlog.topic.queues[channel] = backlog
        self.changes += 1
        self._note_ephemeral(backlog)

    def _note_ephemeral(self, queue: Queue) -> None:
        if queue.channel is not None and queue.ephemeral:
            self.ephemeral[queue.index] = queue

    def disk_queue(self, base: str) -> DiskQueue:
        """The segment files of a base name, with the options of this broker."""
        options = self._options
        return DiskQueue(
            Path(options.data_path or "."),
            base,
            max_bytes_per_file=options.max_bytes_per_file,
            max_msg_size=self._max_msg_size,
            sync_every=options.sync_every,
            sync_timeout=options.sync_timeout,
        )

    def deferred_store(self, base: str) -> DeferredStore:
        """The chunks of a base name."""
        return DeferredStore(Path(self._options.data_path or "."), base)

    # -- what loops look at

    def earliest(self) -> tuple[int, int]:
        """Lower bounds of the earliest deadline (monotonic ns) and due time (Unix ns)."""
        columns = self.directory.next_deadline, self.directory.next_due
        deadline, due = (int(column.min(initial=np.iinfo(np.int64).max)) for column in columns)
        return deadline, due

    def overdue(self, monotonic: int, realtime: int) -> list[int]:
        """Indices of queues whose earliest deadline or due time (in ns) may have passed."""
        directory = self.directory
        late = (directory.next_deadline <= monotonic) | (directory.next_due <= realtime)
        indices = np.flatnonzero(late)
        # entries that were never used say 0
        live = directory.queues["state"][indices] == layout.EntryState.LIVE
        return [int(index) for index in indices[live]]

    def convicted(self) -> list[int]:
        """Indices of queues in which a convicted message waits to be moved to the dead topic."""
        directory = self.directory
        indices = np.flatnonzero(directory.next_due == layout.constant("DUE_CONVICTED"))
        live = directory.queues["state"][indices] == layout.EntryState.LIVE
        return [int(index) for index in indices[live]]

    def other_clients(self, mine: int) -> int:
        """How many clients are attached, without the entry `mine` and the gateway processes, which
        belong to the supervisor."""
        clients = self.directory.clients
        others = (clients["state"] != 0) & (clients["kind"] != ClientKind.GATEWAY)
        return int(np.count_nonzero(others)) - int(others[mine])

    def highest_clock(self) -> int:
        """The highest id clock of all topics (in units of 64 ns)."""
        clocks = self.directory.topics["id_clock"]
        return int(clocks.max()) if len(clocks) else 0
