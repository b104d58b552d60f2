"""The live topics and queues, with what the supervisor needs of each: header, files, a lock.

The directory segment is the truth; this is the supervisor's own index of it, which only its
creator changes (nobody else creates or deletes). Loops work on the tuples `queues` and `topics`:
they are replaced, never changed. With thousands of queues no loop walks them all in every round:
the scanner looks at the directory's two columns, the spiller at what it was told to look at.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shmq import layout
from shmq._native import Broker
from shmq.layout import Array, DirectoryView, Kind, QueueView
from shmq.names import base_name, is_ephemeral
from shmq.options import Options
from shmq.storage.deferred import Sidecar
from shmq.storage.diskqueue import DiskQueue, pack

# The lines of a queue's header that change all the time: both sides' indices and the disk
# positions. `Roster.look` copies them from all headers into one array.
_HOT_FIRST, _HOT_LAST = "slots_committed", "deliver"

_ASKING = 0.1  # seconds in which a publisher that found no room may try again

#: Where a new queue's files begin: not with 0, so that a flush has a file in front of the first.
FIRST_POSITION = pack(1, 0)


def _hot_dtype() -> tuple[int, np.dtype[Any]]:
    """Where those lines begin, and their type."""
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
    """Room for so many queues' hot lines (`Queue.hot`)."""
    return np.zeros(count, _HOT)


@dataclass(eq=False)
class Topic:
    """A live topic. `queues` by channel name, its backlog under None."""

    index: int
    generation: int
    name: str
    queues: dict[str | None, Queue] = field(default_factory=dict)

    @property
    def channels(self) -> list[Queue]:
        """Its queues but the backlog."""
        return [queue for name, queue in self.queues.items() if name is not None]


@dataclass(eq=False)
class Queue:
    """A live queue. Whoever spills, restores, renames or deletes holds `lock` and looks whether it
    is `gone` first. No core lock is held while waiting for it."""

    index: int
    serial: int
    topic: Topic
    channel: str | None
    view: QueueView
    disk: DiskQueue
    sidecar: Sidecar
    lock: threading.RLock = field(default_factory=threading.RLock)
    gone: bool = False
    had_consumer: bool = False
    # monotonic seconds, by kind of work (write, read, tidy): trouble before, do not try yet
    retry_at: dict[str, float] = field(default_factory=dict)
    asked_at: float = -math.inf  # monotonic seconds: when a publisher last rang for room
    spilled_at: float = 0.0  # monotonic seconds: when it was last given room
    restored_at: float = 0.0  # monotonic seconds: when something of it was read from disk
    delivered: tuple[float, int] = (0.0, 0)  # monotonic seconds: how many it had delivered then
    checked: tuple[int, int] = (-1, -1)  # positions last found to be possible
    seen_read: int = 0  # read position up to which files were dropped
    batch_bytes: int = 4 << 20  # to write at once; fewer while the disk is nearly full
    record_bytes: int = 512  # of a record on disk, as last seen
    no_room: int = -1  # free_tail when nothing more on disk fitted: nothing will until it moves
    no_room_until: float = 0.0  # monotonic seconds: or until then, if /dev/shm was full
    quiet_since: tuple[float, int] = (
        math.inf,
        0,
    )  # monotonic seconds: what had been published then

    def __post_init__(self) -> None:
        header = self.view.header.reshape(1).view(np.uint8)
        self.hot = header[_HOT_AT : _HOT_AT + _HOT.itemsize]

    def __str__(self) -> str:
        return base_name(self.topic.name, self.channel)

    @property
    def ephemeral(self) -> bool:
        """Whether what it holds ends with it: it never goes to disk."""
        return is_ephemeral(self.topic.name if self.channel is None else self.channel)

    @cached_property
    def capacity(self) -> int:
        """Messages its ready ring may hold."""
        return max(self.view.read("mem_queue_size"), layout.constant("TRANSIT"))

    @cached_property
    def limits(self) -> tuple[int, int, int, int]:
        """Its capacity, `inflight_slots`, `low_water` and `arena_max`: fixed when it was made."""
        read = self.view.read
        low_water = max(read("low_water"), 1)  # overwritten with 0 nothing would be read from disk
        return self.capacity, read("inflight_slots"), low_water, read("arena_max")

    @property
    def ready(self) -> int:
        """Messages in the ready ring."""
        return (self.view.read("ready_tail") - self.view.read("ready_head")) & layout.NONE

    @property
    def waiting(self) -> int:
        """Messages in the requeue ring."""
        return (self.view.read("requeue_tail") - self.view.read("requeue_head")) & layout.NONE

    @property
    def positions(self) -> tuple[int, int]:
        """Read and write position on disk, as the header has them."""
        return self.view.read("disk_read"), self.view.read("disk_write")

    @property
    def has_files(self) -> bool:
        """Whether there may be data files or a position file of it."""
        return self.positions[1] not in (0, FIRST_POSITION) or self.disk.meta_path.exists()


@dataclass(eq=False)
class Look:
    """Some queues' hot header lines, copied; row i belongs to `queues[i]`. Words of one row may be
    from slightly different moments: good for choosing, not for deciding."""

    queues: Sequence[Queue]
    hot: Array
    capacity: NDArray[np.int64]
    inflight_slots: NDArray[np.int64]
    low_water: NDArray[np.int64]
    arena_max: NDArray[np.int64]
    ephemeral: NDArray[np.bool_]
    seen_read: NDArray[np.uint64]  # read positions that the spiller has acted on

    @classmethod
    def at(cls, queues: Sequence[Queue]) -> Look:
        """These queues as they are now."""
        hot = hot_array(len(queues))
        if queues:
            np.concatenate([queue.hot for queue in queues], out=hot.view(np.uint8))
        limits = np.array([queue.limits for queue in queues], np.int64).reshape(-1, 4)
        capacity, inflight_slots, low_water, arena_max = limits.T
        return cls(
            queues,
            hot,
            capacity,
            inflight_slots,
            low_water,
            arena_max,
            np.array([queue.ephemeral for queue in queues], np.bool_),
            np.array([queue.seen_read for queue in queues], np.uint64),
        )

    @property
    def ready(self) -> NDArray[np.int64]:
        """Messages in the ready rings."""
        return _ring_length(self.hot, "ready")

    @property
    def wanted(self) -> NDArray[np.bool_]:
        """Where a publisher waits for room, or does not wait but tried a moment ago and may try
        again, as a gateway does. (What one that gave up needed may still stand.)"""
        needs = (self.hot["need_bytes"] != 0) | (self.hot["need_slots"] != 0)
        recently = time.monotonic() - _ASKING
        for row in np.flatnonzero(needs).tolist():
            queue = self.queues[row]
            needs[row] = queue.asked_at > recently or queue.view.header["space"]["summary"] != 0
        wanted: NDArray[np.bool_] = needs
        return wanted

    @property
    def waiting(self) -> NDArray[np.int64]:
        """Messages in the requeue rings."""
        return _ring_length(self.hot, "requeue")

    @property
    def deferring(self) -> NDArray[np.int64]:
        """Messages in the defer rings."""
        return _ring_length(self.hot, "defer")


def _ring_length(hot: Array, ring: str) -> NDArray[np.int64]:
    # unsigned subtraction wraps as the indices do
    length: Array = hot[f"{ring}_tail"] - hot[f"{ring}_head"]
    return length.astype(np.int64)


class Roster:
    """Index of the directory."""

    def __init__(self, broker: Broker, options: Options, max_msg_size: int) -> None:
        """max_msg_size: the largest body that may be on disk, more than the options say if a
        predecessor allowed more."""
        self._max_msg_size = max_msg_size
        self.directory = DirectoryView(broker.view(), f"instance {options.instance!r}")
        self._broker = broker
        self._options = options
        self._topics: dict[str, Topic] = {}
        self._queues: dict[int, Queue] = {}
        self._lists: tuple[tuple[Topic, ...], tuple[Queue, ...]] | None = None
        self._lock = threading.Lock()  # of these three
        self.changes = 0  # of names; each is counted here after the directory's generation was
        self.ephemeral: dict[int, Queue] = {}  # ephemeral channels; the creator's

    @property
    def topics(self) -> tuple[Topic, ...]:
        """All of them."""
        return self._listed()[0]

    @property
    def queues(self) -> tuple[Queue, ...]:
        """All of them."""
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

    # -- changes, by the creator

    def topic(self, name: str) -> Topic | None:
        """The live topic of this name."""
        return self._topics.get(name)

    def enter_topic(self, index: int, generation: int, name: str) -> Topic:
        """Take up a topic that is in the directory."""
        topic = Topic(index, generation, name)
        with self._lock:
            self._topics[name] = topic
            self._lists = None
        self.changes += 1
        return topic

    def leave_topic(self, topic: Topic) -> None:
        """Forget a topic that has left the directory."""
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
        sidecar: Sidecar,
    ) -> Queue:
        """Take up a queue that is in the directory, or about to be."""
        view = QueueView(self._broker.view(index), f"queue {serial}")
        queue = Queue(index, serial, topic, channel, view, disk, sidecar)
        queue.seen_read = queue.positions[0]
        topic.queues[channel] = queue
        with self._lock:
            self._queues[index] = queue
            self._lists = None
        self.changes += 1
        self._note_ephemeral(queue)
        self._broker.attend(index)
        if None in topic.queues:
            self._broker.attend(topic.queues[None].index)  # its messages are for this one too
        return queue

    def leave_queue(self, queue: Queue) -> None:
        """Forget a queue that has left the directory."""
        queue.gone = True
        if queue.topic.queues.get(queue.channel) is queue:
            del queue.topic.queues[queue.channel]
        with self._lock:
            del self._queues[queue.index]
            self._lists = None
        self.changes += 1
        self.ephemeral.pop(queue.index, None)

    def becomes_channel(self, backlog: Queue, channel: str) -> None:
        """A backlog has become its topic's first channel."""
        del backlog.topic.queues[None]
        backlog.channel = channel
        backlog.topic.queues[channel] = backlog
        self.changes += 1
        self._note_ephemeral(backlog)

    def _note_ephemeral(self, queue: Queue) -> None:
        if queue.channel is not None and queue.ephemeral:
            self.ephemeral[queue.index] = queue

    def disk_queue(self, base: str) -> DiskQueue:
        """The files of a queue, with the options of this broker."""
        options = self._options
        return DiskQueue(
            Path(options.data_path or "."),
            base,
            max_bytes_per_file=options.max_bytes_per_file,
            max_msg_size=self._max_msg_size,
            sync_every=options.sync_every,
            sync_timeout=options.sync_timeout,
        )

    def sidecar(self, base: str) -> Sidecar:
        """The chunks of a queue."""
        return Sidecar(Path(self._options.data_path or "."), base)

    # -- what loops look at

    def earliest(self) -> tuple[int, int]:
        """Lower bounds of the earliest deadline (monotonic, ns) and due time (real, ns)."""
        columns = self.directory.next_deadline, self.directory.next_due
        deadline, due = (int(column.min(initial=np.iinfo(np.int64).max)) for column in columns)
        return deadline, due

    def overdue(self, monotonic: int, realtime: int) -> list[int]:
        """Indices of queues whose earliest deadline or due time may have passed."""
        directory = self.directory
        late = (directory.next_deadline <= monotonic) | (directory.next_due <= realtime)
        indices = np.flatnonzero(late)
        # entries that were never used say 0
        live = directory.queues["state"][indices] == layout.EntryState.LIVE
        return [int(index) for index in indices[live]]

    def other_clients(self, mine: int) -> int:
        """How many clients are attached beside the entry `mine` and gateway processes, which are
        the supervisor's own."""
        clients = self.directory.clients
        others = (clients["state"] != 0) & (clients["kind"] != Kind.GATEWAY)
        return int(np.count_nonzero(others)) - int(others[mine])

    def highest_clock(self) -> int:
        """The highest id clock of all topics (64 ns units)."""
        clocks = self.directory.topics["id_clock"]
        return int(clocks.max()) if len(clocks) else 0
