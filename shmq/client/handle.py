"""The part that producers, consumers and lease holders share: the broker that made them, which
their `repr` shows and by which they can be pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

#: A function and its arguments, as `pickle` wants them.
Reduction = tuple[Callable[..., Any], tuple[Any, ...]]


class ReplyStore(Protocol):
    """The results store that replies go to."""

    def set(self, key: bytes, value: Any, ttl: float | None = None) -> None:
        """Store a reply for `ttl` seconds."""


class Home(Protocol):
    """The broker that made a handle."""

    instance: str

    def producer(self, topic: str) -> Any:
        """A producer for the topic."""

    def limit(self, name: str) -> int:
        """One of the broker's limits, by the name of its option."""

    def reduction(self, kind: str, *settings: Any) -> Reduction:
        """A call that makes the same handle again, in this process or another."""

    def reply_store(self, name: str, again: bool = False) -> ReplyStore:
        """The results store of this name, kept open. again: open it anew."""


def home_of(finder: Callable[..., Any]) -> Home | None:
    """The broker whose method a partial function is; None if a test made the handle."""
    return getattr(getattr(finder, "func", None), "__self__", None)


def reduction(home: Home | None, kind: str, *settings: Any) -> Reduction:
    """Like `Home.reduction`. Raises TypeError if no broker made the handle."""
    if home is None:
        raise TypeError(f"this {kind} was not made by a Broker, so it cannot be pickled")
    return home.reduction(kind, *settings)


class Shown(type):
    """Hides from `dir` and `help` the methods that only other parts of the package call."""

    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in cls._internal]
