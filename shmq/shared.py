"""A dictionary that one thread changes while others walk it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _collections_abc import dict_items, dict_keys, dict_values

K = TypeVar("K")
V = TypeVar("V")


class Shared(dict[K, V]):
    """A dictionary whose keys, values and items are those of a copy.

    To walk a plain one while another thread adds or removes a key raises RuntimeError. A walk of
    this one sees the keys that there were when it began. Changes need a lock of their own if more
    than one thread makes them.
    """

    def keys(self) -> dict_keys[K, V]:
        return self.copy().keys()

    def values(self) -> dict_values[K, V]:
        return self.copy().values()

    def items(self) -> dict_items[K, V]:
        return self.copy().items()
