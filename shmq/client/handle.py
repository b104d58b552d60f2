"""What producers, consumers and lessees have in common: the broker that made them, by which they
are shown and travel to other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

#: A function and its arguments, as `pickle` wants them.
Reduction = tuple[Callable[..., Any], tuple[Any, ...]]


class Home(Protocol):
    """The broker that made a handle."""

    instance: str

    def _reduction(self, kind: str, *settings: Any) -> Reduction:
        """What makes the same handle again, in this process or another."""


def home_of(finder: Callable[..., Any]) -> Home | None:
    """The broker whose method a partial function is; None: of a test's own making."""
    return getattr(getattr(finder, "func", None), "__self__", None)


def reduction(home: Home | None, kind: str, *settings: Any) -> Reduction:
    """As `Home._reduction`. TypeError if no broker made it."""
    if home is None:
        raise TypeError(f"this {kind} was not made by a Broker, so it cannot be pickled")
    return home._reduction(kind, *settings)


class Shown(type):
    """Leaves out of `dir` and `help` what only the gateway and Spark call."""

    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in cls._internal]
