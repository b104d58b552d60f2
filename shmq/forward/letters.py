"""The dead letters of a forwarder: copies of messages that the target refuses.

A lease is finished as a whole, so a message in it cannot move: its copy goes to the dead topic, and
the message ends with its lease. A mark in the dead topic says which copies of a lease were made, so
a forwarder that dies before the lease is finished makes none twice.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shmq.client.dead_letters import CHANNEL
from shmq.client.properties import MOST_BYTES, pack
from shmq.errors import BadArgument, Full, Gone, MessageTooBig, Rejected, ShmqError
from shmq.forward.refusal import Refusal
from shmq.patience import Patience
from shmq.settings import dead_topic

if TYPE_CHECKING:
    from shmq.broker import Broker

#: Seconds that one wait for room in the dead topic lasts.
_WAIT: Final = 0.5
_EPOCH: Final = 1
#: Marks count copies: a lease has fewer messages than this.
_PLACES: Final = 1 << 13
_ERROR: Final = 1024


class Letters:
    """Makes dead letters of one channel."""

    def __init__(self, broker: Broker, topic: str, channel: str, identity: str) -> None:
        """identity: of the channel. Raises ShmqError if the channel can have no dead letters."""
        self._place = f"{topic}/{channel}"
        if broker.settings(topic).sealed or broker.settings(topic, channel).sealed:
            raise ShmqError(
                f"forward {self._place} with --refused=dead: the topic is that of a pool or a "
                "queue, and a copy of its message would lose its seal; use --refused=stop or skip"
            )
        if _holds_letters(broker, topic):
            raise ShmqError(
                f"forward {self._place} with --refused=dead: the topic holds dead letters itself, "
                "so there is no dead topic for them; use --refused=stop or skip"
            )
        self._broker = broker
        self.topic = broker.dead(topic, channel).topic
        self._key = _key(f"{identity}/{self._place}")
        self._producer: Any = None
        self._is_new = False
        """Whether another key was taken, because the mark was forgotten."""

    def put(
        self,
        lease: int,
        rows: Sequence[tuple[int, bytes, Mapping[str, bytes], Refusal]],
        is_stopped: Callable[[], bool],
    ) -> bool:
        """Make a dead letter of each row of a lease: its place there, body and properties. Waits
        for room; False if `is_stopped` came before."""
        for place, body, properties, refusal in rows:
            number = lease * _PLACES + place + 1
            own = {name: each for name, each in properties.items() if not name.startswith("dead-")}
            # beside a body of nearly max_msg_size there is no room for notes, or for properties
            blocks = [self._packed(own, refusal), pack(own), b""]
            patience = Patience()
            while not self._put(number, body, blocks, patience):
                if is_stopped():
                    return False
        return True

    def _put(self, number: int, body: bytes, blocks: Sequence[bytes], patience: Patience) -> bool:
        """Publish one letter with the first of the blocks that fits, unless it was published; False
        if there is no room."""
        producer = self._opened()
        try:
            epoch, last = producer.mark(*self._key)
            after = int(last) if epoch == _EPOCH + 1 else 0
            if after >= number:
                return True
            ends = np.array((0, len(body)), np.int64)
            arguments = (body, ends, True, 0, 1, *self._key, _EPOCH, after, number, _WAIT)
            for block in blocks:
                try:
                    producer.publish_once(*arguments, block)
                    break
                except MessageTooBig:
                    if block is blocks[-1]:
                        raise
        except Full as exc:
            patience.refused(exc)
            if isinstance(exc, Rejected):  # which waits for nothing
                time.sleep(_WAIT)
            return False
        except Gone:  # the dead topic was deleted: it is made again
            self._producer = None
            return False
        except BadArgument:
            # The mark was forgotten for those of others, so what was put is not known. Twice is
            # better than never.
            if self._is_new:
                raise
            self._key, self._is_new = _key(os.urandom(16).hex()), True
            return False
        self._is_new = False
        return True

    def _opened(self) -> Any:
        if self._producer is None:
            directory = self._broker.views().directory
            found = directory.find_topic(self.topic)
            channels = [
                entry
                for entry in directory.live_queues()
                if found is not None and entry.topic == found.index and entry.channel is not None
            ]
            if not channels:
                self._broker.create_channel(self.topic, CHANNEL)
            self._producer = self._broker.producer(self.topic)
        return self._producer

    def _packed(self, own: Mapping[str, bytes], refusal: Refusal) -> bytes:
        """The block of a letter: the message's own properties, and the notes that fit."""
        notes = {
            "dead-reason": b"rejected",
            "dead-from": self._place.encode(),
            "dead-when": str(time.time_ns()).encode(),
            "dead-pid": str(os.getpid()).encode(),
            "dead-error": f"refused: message {refusal.name}: {refusal.why}".encode()[:_ERROR],
        }
        kept = dict(own)
        size = sum(3 + len(name) + len(value) for name, value in own.items())
        for name, value in notes.items():
            size += 3 + len(name) + len(value)
            if size > MOST_BYTES:
                break
            kept[name] = value
        return pack(kept)


def _holds_letters(broker: Broker, topic: str) -> bool:
    """Whether the dead letters of a channel go to this topic."""
    source = broker.views()
    names = {entry.index: entry.name for entry in source.directory.live_topics()}
    for entry in source.directory.live_queues():
        if entry.channel is None or entry.topic not in names:
            continue
        held = source.queue(entry).settings
        named = None if held is None else held.dead_letter
        if topic == (named or dead_topic(names[entry.topic], entry.channel)):
            return True
    return False


def _key(text: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"forward dead\0{text}".encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
