"""The application of these tests, as a user of Dramatiq writes one. SHMQ_INSTANCE names the
instance, RUNS the file in which tasks note that they begin."""

from __future__ import annotations

import time

import dramatiq
from dramatiq.middleware import GroupCallbacks, default_middleware
from dramatiq.rate_limits import Barrier, ConcurrentRateLimiter
from dramatiq.results import Results
from support.framework_workers import began

from shmq.integrations.dramatiq import Broker, RateLimiterBackend, ResultBackend

limits = RateLimiterBackend()
results = ResultBackend()
broker = Broker(
    middleware=[
        *(make() for make in default_middleware),
        # a test on a busy machine may look for its first result more than ten minutes later
        Results(backend=results, result_ttl=3_600_000),
        GroupCallbacks(limits),
    ],
    max_priority=9,
)
dramatiq.set_broker(broker)

mutex = ConcurrentRateLimiter(limits, "one at a time", limit=1, ttl=600_000)


@dramatiq.actor(store_results=True, max_retries=0)
def square(number: int, pause: float = 0.0) -> int:
    began("square", number)
    time.sleep(pause)
    return number * number


@dramatiq.actor(store_results=True)
def add(a: int, b: int) -> int:
    return a + b


@dramatiq.actor(store_results=True, min_backoff=20, max_backoff=200, max_retries=10)
def flaky(key: str, fails: int) -> str:
    began("flaky", key)
    if int(limits.store.incr(f"flaky {key}") or 0) <= fails:
        raise RuntimeError(f"{key} fails {fails} times")
    return key


@dramatiq.actor(max_retries=0)
def broken(key: str) -> None:
    raise ValueError(f"{key} is broken")


@dramatiq.actor(min_backoff=10, max_backoff=50, max_retries=1000)
def alone(key: str) -> None:
    """Notes its begin and its end; the rate limiter lets one run at a time."""
    with mutex.acquire():
        began("alone-begin", key)
        time.sleep(0.01)
        began("alone-end", key)


@dramatiq.actor(max_retries=0)
def meet(key: str, parties: int) -> None:
    barrier = Barrier(limits, key)
    barrier.create(parties)
    began("meet", key)
    if barrier.wait(timeout=60_000):
        began("met", key)


@dramatiq.actor(max_retries=0)
def collected(key: str) -> None:
    began("collected", key)


@dramatiq.actor(queue_name="ordered", max_retries=0)
def ordered(key: str) -> None:
    began("ordered", key)
