"""Faults that can be planted in a storm, to see that it finds them: the processes of the storm are
forked, so what is replaced here before the first fork is replaced in all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from chaos.storm.celery_actors import INSTALLED
from chaos.storm.errand_actors import FRAMEWORKS

from shmq.queues.item import Item

RARE = 0.02


def now_and_then(share: float = RARE) -> bool:
    """Not the same in all processes, which inherit the state of `random`."""
    return random.Random(time.monotonic_ns()).random() < share


def replaced(kind: type[Any], name: str, make: Callable[[Any], Any]) -> None:
    setattr(kind, name, make(getattr(kind, name)))


def drop_items() -> None:
    """An item of a queue that is given back is gone."""
    replaced(Item, "requeue", lambda _: lambda self: self.done())


def drop_replies() -> None:
    """A worker of Celery does not store a result, now and then."""
    from shmq.integrations.celery.backend import Backend

    def make(store: Any) -> Any:
        return lambda self, *words: None if now_and_then() else store(self, *words)

    replaced(Backend, "_set_with_state", make)


def answer_early() -> None:
    """A task of Celery is finished when a worker has got it, although it is to be finished when it
    has run."""
    from shmq.integrations.celery.deliveries import Deliveries

    def make(hold: Any) -> Any:
        def early(self: Any, tag: Any, message: Any) -> None:
            hold(self, tag, message)
            self.ack(tag)

        return early

    replaced(Deliveries, "hold", make)


def sweep_nothing() -> None:
    """Queues of replies of those who were killed stay."""
    from shmq.integrations.celery.queues import Queues

    replaced(Queues, "sweep", lambda _: lambda self: None)


def drop_tasks() -> None:
    """A task of Dramatiq is not published, now and then."""
    from shmq.integrations.link import Link

    def make(publish: Any) -> Any:
        return lambda self, *words: None if now_and_then() else publish(self, *words)

    replaced(Link, "publish", make)


def keep_places() -> None:
    """The place of a client that ends, or dies, is not given back, now and then."""
    from shmq.shm import Permits

    def make(give: Any) -> Any:
        return lambda self: None if now_and_then(0.1) else give(self)

    replaced(Permits, "give", make)
    replaced(Permits, "mend", lambda _: lambda self, free: True)


PLANTS: dict[str, tuple[Callable[[], None], str]] = {
    "drop-items": (drop_items, "errand"),
    "keep-places": (keep_places, "stuck"),
}
"""Each with the rule that finds it."""
if "dramatiq" in FRAMEWORKS:
    PLANTS["drop-tasks"] = drop_tasks, "errand"
if INSTALLED:
    PLANTS["drop-replies"] = drop_replies, "errand"
    PLANTS["answer-early"] = answer_early, "errand"
    PLANTS["sweep-nothing"] = sweep_nothing, "error"
