"""An item that belongs to its queue until it is done."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic

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
#: Parts of /dev/shm; after one of them its room is looked at again.
_PARTS: Final = 64


def value_of(message: Message, writable: bool, view: memoryview | None = None) -> Any:
    """The object in a message, which the program may keep as long as it likes. Its arrays are
    copies if more than half of /dev/shm is used: a program that keeps all it gets would leave no
    room for what it waits for. writable, view: as of `unseal`."""
    length = len(message)
    if length >= LARGE and not writable and _room.is_short(length):
        view = memoryview(bytes(message.view if view is None else view))
    return unseal(message, view=view, writable=writable)


class _Room:
    """The room in /dev/shm as this process saw it last. A look costs as much as a short copy, so
    the process looks again when it got a small part of /dev/shm since."""

    def __init__(self) -> None:
        self._short = False
        self._left = 0  # bytes until the next look

    def is_short(self, length: int) -> bool:
        """Whether more than half is used; length: of the body that is about to be kept."""
        self._left -= length
        if self._left < 0:
            room = os.statvfs(shm.SHM_DIRECTORY)
            self._short = room.f_bavail * 2 < room.f_blocks
            self._left = room.f_blocks * room.f_frsize // _PARTS
        return self._short


_room = _Room()


class Item(Generic[T]):
    """An item of a queue that was got with `ack=True`. It comes back if this process dies before
    `done()` is called.

    `with item as value:` calls `done()` at the end of the block, or `requeue()` if the block
    raised.
    """

    __slots__ = ("_message", "_queue", "_value", "_writable")

    def __init__(self, message: Message, queue: object, writable: bool = False) -> None:
        """queue: the one it comes from, which lasts as long as its item. writable: as of it."""
        self._writable = writable
        self._message = message
        self._queue = queue
        self._value: Any = _UNSET

    @property
    def value(self) -> T:
        """The object that was put. It is made at the first use, which raises what unpickling
        raises."""
        if self._value is _UNSET:
            self._value = value_of(self._message, self._writable)
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
