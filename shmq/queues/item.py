"""An item that belongs to its queue until it is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol

from shmq import shm
from shmq.client import Message
from shmq.objects import LARGE, unseal

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T = TypeVar("T", default=Any)
else:
    from typing import TypeVar

    T = TypeVar("T")

_UNSET: Final = object()
#: Parts of a memory; after one of them its room is looked at again.
_PARTS: Final = 64


class Room:
    """The room in a memory as this process saw it last. A look costs as much as a short copy, so
    the process looks again when it got a small part of the memory since."""

    __slots__ = ("_left", "_short")

    def __init__(self) -> None:
        self._short = False
        self._left = 0  # bytes until the next look

    def is_short(self, length: int, look: Callable[[], tuple[int, int]]) -> bool:
        """Whether more than half is used. length: of the body that is about to be kept. look:
        returns the bytes that are free, and those that the memory has. Raises what it raises."""
        self._left -= length
        if self._left < 0:
            free, whole = look()
            self._short = free * 2 < whole
            self._left = whole // _PARTS
        return self._short


class HasRoom(Protocol):
    """A queue's place, which knows the room in its memory."""

    def is_short(self, length: int) -> bool:
        """Whether more than half of it is used. length: of the body that is about to be kept."""
        ...


_shared_memory = Room()


def _look() -> tuple[int, int]:
    room = os.statvfs(shm.SHM_DIRECTORY)
    return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize


def value_of(
    message: Message, writable: bool, place: HasRoom, view: memoryview | None = None
) -> Any:
    """The object in a message, which the program may keep as long as it likes. Its arrays are
    copies if more than half of /dev/shm, or of the queue's memory, is used: a program that keeps
    all it gets would leave no room for what it waits for. place: that of the queue. writable, view:
    as of `unseal`."""
    length = len(message)
    if (
        length >= LARGE
        and not writable
        and (_shared_memory.is_short(length, _look) or place.is_short(length))
    ):
        view = memoryview(bytes(message.view if view is None else view))
    return unseal(message, view=view, writable=writable)


class Item(Generic[T]):
    """An item of a queue that was got with `ack=True`. It comes back if this process dies before
    `done()` is called.

    `with item as value:` calls `done()` at the end of the block, or `requeue()` if the block
    raised.
    """

    __slots__ = ("_message", "_place", "_queue", "_value", "_writable")

    def __init__(
        self, message: Message, queue: object, place: HasRoom, writable: bool = False
    ) -> None:
        """queue: the one it comes from, which lasts as long as its item. place, writable: its."""
        self._writable = writable
        self._place = place
        self._message = message
        self._queue = queue
        self._value: Any = _UNSET

    @property
    def value(self) -> T:
        """The object that was put. It is made at the first use, which raises what unpickling
        raises."""
        if self._value is _UNSET:
            self._value = value_of(self._message, self._writable, self._place)
        found: T = self._value
        return found

    @property
    def attempts(self) -> int:
        """How often the item was got, with this time."""
        return self._message.attempts

    def done(self) -> None:
        """The work on the item is complete. Raises NotInFlight if it was given back before, and
        Gone."""
        self._message.finish()

    def requeue(self) -> None:
        """Give the item back to the queue, behind those that wait. Raises as `done`."""
        self._message.requeue()

    def __enter__(self) -> T:
        try:
            return self.value
        except BaseException:
            self.requeue()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._message.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return f"<shmq item of {self._message.topic!r}, attempt {self.attempts}>"
