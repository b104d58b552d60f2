"""The place of a queue: a topic with one channel, which any process of the broker may open."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import weakref
from typing import TYPE_CHECKING, Any, Final

from shmq import layout
from shmq.broker import Broker, joined
from shmq.client import Consumer, Producer
from shmq.errors import Gone, ShmqError
from shmq.layout import State
from shmq.queues.hold import Hold
from shmq.queues.item import Room
from shmq.taken import is_taken, take_topic

if TYPE_CHECKING:
    from shmq.attachment import Kept
    from shmq.views import QueueView

#: The only channel of a queue's topic.
CHANNEL: Final = "queue"
#: Messages that one process may hold at a time: any number.
_ALL: Final = (1 << 32) - 1
#: The limit of bytes that shuts a queue: no pickle is so short, so nothing enters any more.
_SHUT: Final = 1


class Place:
    """A topic with one channel that never touches a disk. Every process opens its own producer and
    consumer at the first use; forked children get theirs by themselves."""

    def __init__(self, broker: Broker, topic: str, lasting: bool) -> None:
        """lasting: the queue stays when no process has it any more."""
        self._broker: Broker | None = broker
        self._home = (broker.instance, broker.owner)
        self.topic = topic
        """Name of the topic."""
        self._memory = Room()
        delete = functools.partial(_delete, weakref.ref(broker), topic)
        self._hold: Hold | None = None
        self._kept: Kept | None = None
        if not lasting:
            self._hold = Hold.made(delete, broker.directory().data_path, topic)

    @property
    def broker(self) -> Broker:
        """The broker, which a copy in another process joins at its first use. Raises NotRunning."""
        if self._broker is None:
            self._broker = joined(*self._home)
        return self._broker

    @property
    def instance(self) -> str:
        """Name of the broker."""
        return self._home[0]

    def __getstate__(self) -> tuple[Any, str, Hold | None]:
        return self._home, self.topic, self._hold

    def __setstate__(self, state: tuple[Any, str, Hold | None]) -> None:
        self._broker = self._kept = None
        self._home, self.topic, self._hold = state
        self._memory = Room()
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            with contextlib.suppress(OSError, ShmqError):
                self._keep()  # this process was started with it, and is root until it says so

    # ---- making it ----

    def create(self, maxsize: int) -> None:
        """Create topic and channel unless they exist. maxsize: how many items may wait; 0: as many
        as memory holds. Raises BadName, NotRunning, Gone and BadArgument."""
        self._make(maxsize)
        self._keep()

    def _make(self, maxsize: int) -> None:
        broker = self.broker
        with contextlib.suppress(Gone):
            if broker.settings(self.topic, CHANNEL).overflow == "block":
                if not is_taken(broker, self.topic, CHANNEL):  # a version without seals made it
                    take_topic(broker, self.topic, CHANNEL)
                return
        most = min(maxsize, broker.limits["mem_queue_size"]) or None
        # The channel begins with the settings of its topic, so it is never without them.
        take_topic(broker, self.topic, CHANNEL, overflow="block", max_messages=most)

    def _keep(self) -> None:
        """Keep what is needed to use the queue after this process, or a child that it forks, has
        become another user."""
        if os.geteuid() == 0:
            with contextlib.suppress(OSError, Gone):  # it was deleted just now; no file is left
                self._kept = self.broker.keep(self._found()[1])

    def producer(self) -> Producer:
        """A producer of this process, which alone may publish here. Raises Gone if the queue was
        deleted: a producer of a broker would make a topic that is no queue."""
        self._found()
        made = self.broker.producer(self.topic)
        made.seal()
        return made

    def consumer(self) -> Consumer:
        """A consumer of this process, without a limit of number or time. Raises Gone as
        `producer`."""
        self._found()
        return self.broker.consumer(self.topic, CHANNEL, _ALL, None)

    # ---- looking at it ----

    def size(self) -> int:
        """How many items wait."""
        return self.broker.channel_depth(self.topic, CHANNEL)

    def held_up(self) -> str:
        """Why nobody gets the items that wait: those that were got and are not done yet hold all
        that may be held. Empty if nobody is held up. Raises Gone."""
        header = self._view().header
        held = int(header["in_flight_len"])
        if not held or header["paused"] or not self.size():
            return ""
        slots, most = int(header["in_flight_slots"]), int(header["arena_max"])
        return (
            f"items wait, but the {held} that were got and are not done yet hold all that "
            f"in_flight_slots ({slots}) and three quarters of arena_size ({most}) allow; call "
            "task_done, or done of an item, or raise these options of the broker"
        )

    def maxsize(self) -> int:
        """How many items may wait; 0: as many as memory holds."""
        return self.broker.settings(self.topic, CHANNEL).max_messages or 0

    def unfinished(self) -> bool:
        """Returns True if some item was put and not finished yet: if it waits, or is held.

        A message stays in its slot until it is finished, whatever happens to it. One that is put
        during the look may be missed, so the look counts only if none was."""
        view = self._view()
        while True:
            before = view.read("ready_tail")
            states = layout.state(view.slots["word"])
            busy = bool(((states != State.FREE) & (states != State.PINNED)).any())
            if busy or view.read("ready_tail") == before:
                return busy

    def is_short(self, length: int) -> bool:
        """Whether more than half of the memory for bodies is used, as this process saw it last.
        length: of the body that is about to be kept."""
        try:
            return self._memory.is_short(length, self._bytes)
        except ShmqError:  # it was deleted meanwhile, and what was got stays
            return False

    def _bytes(self) -> tuple[int, int]:
        """The bytes of the memory for bodies that are free, and all of them. Memory that is not
        committed yet is free."""
        header = self._view().header
        most = int(header["arena_max"])
        used = int(header["arena_committed"]) - int(header["arena"]["free_bytes"])
        return most - used, most

    def _view(self) -> QueueView:
        return self.broker.views().queue_at(*self._found())

    def _found(self) -> tuple[int, int]:
        """(index, serial) of the channel. Raises Gone."""
        native = self.broker.native()
        topic = native.find_topic(self.topic)
        found = topic and native.find_queue(topic[0], CHANNEL)
        if not found:
            raise Gone(f"there is no queue {self.topic!r} on instance {self.instance!r}")
        return found

    # ---- the end ----

    def shut(self) -> None:
        """Let nothing enter any more, in any process."""
        self.broker.configure(self.topic, CHANNEL, max_bytes=_SHUT)

    def is_shut(self) -> bool:
        """Whether `shut` was called, by any process."""
        return self.broker.settings(self.topic, CHANNEL).max_bytes == _SHUT


def _delete(broker: weakref.ref[Broker], topic: str) -> None:
    """Delete the queue, unless the program has dropped the broker too, which ends it."""
    found = broker()
    if found is not None:
        found.delete_topic(topic)
