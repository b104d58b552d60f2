"""The reaper reads entries of clients while clients come and go."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmq import layout
from shmq.layout import ClientState
from shmq.supervisor.reaper import Reaper

GONE, LIVING = 4001, 4002  # pids


class Entry:
    """A client table of one entry. A client that has ended leaves it and another one takes it, in
    the order of stores of the core: each store before the n-th read that the test chooses."""

    def __init__(self, before: tuple[int, ...]) -> None:
        self._table = np.zeros(1, layout.dtype("client"))
        self._table["state"], self._table["generation"] = ClientState.LIVE, 7
        self._table["pid"] = GONE
        self._steps: list[tuple[str, int]] = [
            ("state", ClientState.FREE),
            ("generation", 8),
            ("pid", LIVING),
            ("state", ClientState.LIVE),
        ]
        self._before = list(before)
        self.reads = 0

    def step(self) -> None:
        while self._before and self._before[0] <= self.reads:
            del self._before[0]
            name, value = self._steps.pop(0)
            self._table[name] = value
        self.reads += 1

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.step()
            return self._table[key].copy()
        return Row(self, lambda name: self._table[key][name])


class Row:
    """One entry, read field by field."""

    def __init__(self, entry: Entry, read: Callable[[str], Any]) -> None:
        self._entry, self._read = entry, read

    def __getitem__(self, name: str) -> Any:
        self._entry.step()
        return self._read(name)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (pid, generation) of the clients that the reaper takes for ended."""
    found: list[tuple[int, int]] = []

    def look(self: Reaper, client: int, generation: int, pid: int, *rest: int) -> None:
        if pid == GONE:  # as pidfd_open says
            found.append((pid, generation))

    monkeypatch.setattr(Reaper, "_watch", look)
    return found


def test_no_client_is_taken_for_the_one_before_it(ended: list[tuple[int, int]]) -> None:
    """With every order of its reads and the two clients' stores."""
    orders = list(itertools.combinations_with_replacement(range(9), 4))
    for before in orders:
        entry = Entry(before)
        looking = SimpleNamespace(
            _directory=SimpleNamespace(clients=entry),
            _broker=SimpleNamespace(client=99),
            _watched={},
            _watch=lambda *words: Reaper._watch(looking, *words),  # type: ignore[arg-type]  # noqa: B023
        )
        Reaper._look(looking)  # type: ignore[arg-type]
        assert entry.reads <= 9, "more reads than orders were tried"
    assert {generation for _, generation in ended} <= {7}
    assert ended, "the one that has ended is found in some orders"
