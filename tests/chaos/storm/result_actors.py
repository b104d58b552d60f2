"""Actors that use a results store: values that are set, added, waited for and taken, values that
expire, and numbers that are counted up."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import ClassVar

from chaos.storm import history
from chaos.storm.actors import Actor, Place
from chaos.storm.history import LEAST_BYTES, Access, Outcome, What, key_of, record

import shmq
from shmq.errors import Full, Gone

STORE = "kept"
VALUES, EXPIRING, NUMBERS = 10, 4, 4  # keys of each kind; a key's number says which it is
KEYS = VALUES + EXPIRING + NUMBERS
LIVES = (0.02, 0.3, 300.0)  # seconds


class Keeper(Actor):
    """Makes every call that a store has."""

    role = "results-user"
    kinds: ClassVar[dict[str, int]] = {
        "set": 30,
        "get": 20,
        "add": 10,
        "pop": 6,
        "delete": 6,
        "wait": 8,
        "count": 20,
        "expire": 10,
    }

    def __init__(self, place: Place, number: int, seed: int) -> None:
        super().__init__(place, number, seed)
        self.values = itertools.count(1)

    def work(self) -> None:
        store = self.patiently(self.open)
        kinds, weights = list(self.kinds), list(self.kinds.values())
        while not self.over:
            for kind in self.choice.choices(kinds, weights, k=20):
                getattr(self, kind)(store)
            time.sleep(0.02 * self.choice.random())

    def open(self) -> shmq.Results:
        """So small that it is full now and then."""
        assert self.broker is not None
        return self.broker.results(STORE, max_keys=KEYS - 1, max_bytes=1 << 16)

    def call(
        self,
        access: Access,
        number: int,
        call: Callable[[], int | bytes | bool | None],
        key: int = 0,
        ttl: float | None = None,
    ) -> None:
        """Log, call, log."""
        op, ns = self.log.next_op(), int((ttl or 0) * 1e9)
        self.log.write(record(What.ACCESS, op=op, flag=access, count=number, key=key, id=ns))
        outcome, found, value, good = Outcome.DONE, True, 0, True
        try:
            answer = self.core(call)
            found = answer is not None and answer is not False
            if isinstance(answer, bytes):
                value, good = history.read_body(answer)
            elif access is Access.COUNT:
                value = int(answer or 0)
        except Full:
            outcome = Outcome.REFUSED
        except Gone:
            self.done(op, Outcome.REFUSED)
            raise
        self.done(op, outcome, found, value, good)

    def done(
        self, op: int, outcome: Outcome, found: bool = False, value: int = 0, good: bool = True
    ) -> None:
        self.log.write(record(What.ACCESSED, op=op, flag=outcome, count=found, key=value, id=good))

    def value(self) -> tuple[int, bytes]:
        """One that nobody else has: its name and its bytes."""
        key = key_of(self.number, next(self.values))
        size = LEAST_BYTES + int(self.choice.expovariate(1 / 2000))
        return key, history.make_body(key, size, self.place.filler)

    def any_value(self) -> int:
        return self.choice.randrange(VALUES)

    def set(self, store: shmq.Results) -> None:
        number, (key, body) = self.any_value(), self.value()
        self.call(Access.SET, number, lambda: store.set(name_of(number), body) or True, key)

    def add(self, store: shmq.Results) -> None:
        number, (key, body) = self.any_value(), self.value()
        self.call(Access.ADD, number, lambda: store.add(name_of(number), body), key)

    def get(self, store: shmq.Results) -> None:
        number = self.choice.randrange(VALUES + EXPIRING)
        self.call(Access.GET, number, lambda: store.get(name_of(number)))

    def pop(self, store: shmq.Results) -> None:
        number = self.any_value()
        self.call(Access.POP, number, lambda: store.pop(name_of(number)))

    def delete(self, store: shmq.Results) -> None:
        number = self.any_value()
        self.call(Access.DELETE, number, lambda: store.delete(name_of(number)))

    def wait(self, store: shmq.Results) -> None:
        number, seconds = self.any_value(), self.choice.choice((0, 0.01, 0.2))
        if self.choice.random() < 0.5:
            self.call(Access.GET, number, lambda: store.wait(name_of(number), seconds))
        else:
            self.call(Access.POP, number, lambda: store.wait(name_of(number), seconds, delete=True))

    def expire(self, store: shmq.Results) -> None:
        number, (key, body) = VALUES + self.choice.randrange(EXPIRING), self.value()
        ttl = self.choice.choice(LIVES)
        self.call(
            Access.SET, number, lambda: store.set(name_of(number), body, ttl) or True, key, ttl
        )

    def count(self, store: shmq.Results) -> None:
        number, by = VALUES + EXPIRING + self.choice.randrange(NUMBERS), self.choice.randrange(1, 9)
        self.call(Access.COUNT, number, lambda: store.incr(name_of(number), by), by)


class Auditor(Keeper):
    """At the end: reads everything there is."""

    role = "results-auditor"

    def work(self) -> None:
        store = self.patiently(self.open)
        for number in range(VALUES + EXPIRING):
            self.call(Access.GET, number, lambda n=number: store.get(name_of(n)))
        for number in range(VALUES + EXPIRING, KEYS):
            self.call(Access.COUNT, number, lambda n=number: store.incr(name_of(n), 0))


def name_of(number: int) -> str:
    """A key's name."""
    return f"key {number}"
