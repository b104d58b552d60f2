"""An item that belongs to its queue until it is done."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final

from shmq.client import Message
from shmq.objects import unseal

_UNSET: Final = object()


class Item:
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
    def value(self) -> Any:
        """The object that was put. It is made at the first use, which raises what unpickling
        raises."""
        if self._value is _UNSET:
            self._value = unseal(self._message, writable=self._writable)
        return self._value

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

    def __enter__(self) -> Any:
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
