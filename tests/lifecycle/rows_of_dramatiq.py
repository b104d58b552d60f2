"""Rows of Dramatiq: a broker with a consumer, results, rate limits, a worker. The module is the
application, too."""

from __future__ import annotations

import sys

import dramatiq
from lifecycle.handles import Held, Site, handle
from lifecycle.rows_of_programs import ENDS, Program, held, worker

from shmq.integrations.dramatiq import Broker, Consumer, RateLimiterBackend, ResultBackend

DAY = 86_400_000  # ms

worker()
broker = Broker(middleware=[])
dramatiq.set_broker(broker)


@dramatiq.actor
def nap() -> None:
    """Nothing."""


def message(queue: str) -> dramatiq.Message[None]:
    return dramatiq.Message(queue, "nap", (), {}, {})


@handle(Broker, Consumer, warm=True)
def dramatiq_consumer(site: Site) -> Held:
    owner = Broker(site.instance, middleware=[], namespace="consumer")
    owner.declare_queue("q")
    if not owner.size("q"):
        owner.enqueue(message("q"))
    made = owner.consume("q", timeout=60_000)
    taken = next(made)
    assert taken is not None
    return Held(made, owner, taken)


@handle(ResultBackend, warm=True)
def dramatiq_results(site: Site) -> Held:
    made = ResultBackend(site.instance)
    made.store_result(message("q"), 1, DAY)
    return Held(made)


@handle(RateLimiterBackend, warm=True)
def dramatiq_limits(site: Site) -> Held:
    made = RateLimiterBackend(site.instance)
    made.add("key", 1, DAY)
    return Held(made)


@handle(ends=ENDS, warm=True)
def dramatiq_worker(site: Site) -> Held:
    words = [sys.executable, "-m", "dramatiq", __name__, "--processes=1", "--threads=1"]
    made = Program(words, {"SHMQ_INSTANCE": site.instance})
    made.until(lambda: "ready for action" in made.said)
    sender = Broker(site.instance, middleware=[])
    sender.enqueue(message("default"))
    made.until(lambda: not sender.size("default"))
    sender.close()
    return held(made)
