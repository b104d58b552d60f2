"""Exchanges, queues and bindings, which all processes of an instance see.

They are keys of a results store: `x/HASH` for an exchange, `q/HASH` for a queue and `b/HASH` for a
binding, with JSON as values. A process keeps a copy, and reads all of them again when the counts of
the store have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import shmq

STORE: Final = "kombu.exchanges"
_KEYS: Final = 1 << 20
_BYTES: Final = 256 << 20

#: (routing key, pattern, queue), as kombu's exchange types have them.
Row = tuple[str, str | None, str]


@dataclass(frozen=True)
class Binding:
    """A queue that gets an exchange's messages with this routing key."""

    exchange: str
    key: str
    queue: str
    arguments: dict[str, Any] | None = None

    @property
    def store_key(self) -> str:
        """Its key in the store."""
        words = json.dumps((self.exchange, self.key, self.queue))
        return f"b/{hashlib.sha256(words.encode()).hexdigest()}"


@dataclass
class Copy:
    """The content of the store at one time."""

    counts: tuple[int, ...]
    exchanges: dict[str, dict[str, Any]] = field(default_factory=dict)
    queues: dict[str, dict[str, Any]] = field(default_factory=dict)
    bindings: dict[str, dict[str, Binding]] = field(default_factory=dict)


def _hashed(kind: str, name: str) -> str:
    return f"{kind}/{hashlib.sha256(name.encode()).hexdigest()}"


def _packed(value: Any) -> bytes:
    return json.dumps(value).encode()


class Exchanges:
    """The store of one instance."""

    def __init__(self, broker: shmq.Broker) -> None:
        self._store = broker.results(STORE, _KEYS, _BYTES)
        self._copy = Copy(())

    # ---- reading ----

    def exchange(self, name: str) -> dict[str, Any] | None:
        """The settings of an exchange; None if nobody declared it."""
        return self._now().exchanges.get(name)

    def queue(self, name: str) -> dict[str, Any] | None:
        """The settings of a queue; None if nobody declared it."""
        return self._now().queues.get(name)

    def is_known(self, name: str) -> bool:
        """Whether somebody declared the queue, or bound it."""
        return self.queue(name) is not None or any(True for _ in self.bindings_of(name))

    def ephemeral_queues(self) -> list[str]:
        """The queues that go with their last consumer."""
        return [name for name, settings in self._now().queues.items() if settings["ephemeral"]]

    def names(self) -> list[str]:
        """The exchanges."""
        return list(self._now().exchanges)

    def bindings(self, exchange: str) -> list[Binding]:
        """The bindings of an exchange."""
        return list(self._now().bindings.get(exchange, {}).values())

    def bindings_of(self, queue: str) -> Iterator[Binding]:
        """Yields the bindings of a queue."""
        for bound in self._now().bindings.values():
            yield from (binding for binding in bound.values() if binding.queue == queue)

    # ---- writing ----

    def declare_exchange(self, name: str, settings: dict[str, Any]) -> None:
        """Store an exchange, unless it is there as it is."""
        if self.exchange(name) != settings:
            self._put(_hashed("x", name), [name, settings])

    def delete_exchange(self, name: str) -> None:
        """Delete an exchange and its bindings."""
        for binding in self.bindings(name):
            self.unbind(binding)
        self._store.delete(_hashed("x", name))

    def declare_queue(self, name: str, settings: dict[str, Any]) -> None:
        """Store a queue, unless it is there as it is."""
        if self.queue(name) != settings:
            self._put(_hashed("q", name), [name, settings])

    def delete_queue(self, name: str) -> None:
        """Delete a queue and its bindings."""
        for binding in list(self.bindings_of(name)):
            self.unbind(binding)
        self._store.delete(_hashed("q", name))

    def forget_queue(self, name: str, known: dict[str, Any]) -> bool:
        """Delete a queue and its bindings, unless its settings are not `known` any more: somebody
        has declared it again. Returns whether it was deleted."""
        bindings = list(self.bindings_of(name))
        if not self._store.delete(_hashed("q", name), _packed([name, known])):
            return False
        for binding in bindings:
            self.unbind(binding)
        if self.queue(name) is not None:  # declared since: it may have found the bindings there
            for binding in bindings:
                self.bind(binding)
        return True

    def bind(self, binding: Binding) -> None:
        """Store a binding, unless it is there."""
        if binding.store_key not in self._now().bindings.get(binding.exchange, {}):
            self._put(
                binding.store_key,
                [binding.exchange, binding.key, binding.queue, binding.arguments],
            )

    def unbind(self, binding: Binding) -> None:
        """Delete a binding."""
        self._store.delete(binding.store_key)

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, _packed(value))

    def _now(self) -> Copy:
        stats = self._store.stats()
        counts = (stats.stored, stats.removed, stats.expired)
        if self._copy.counts != counts:
            self._copy = self._read(counts)
        return self._copy

    def _read(self, counts: tuple[int, ...]) -> Copy:
        copy = Copy(counts)
        for key, value in self._store.items():
            words = json.loads(value)
            if key.startswith(b"x/"):
                copy.exchanges[words[0]] = words[1]
            elif key.startswith(b"q/"):
                copy.queues[words[0]] = words[1]
            else:
                binding = Binding(*words)
                copy.bindings.setdefault(binding.exchange, {})[key.decode()] = binding
        return copy
