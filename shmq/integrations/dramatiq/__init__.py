"""Dramatiq on shmq: broker, results and rate limiters, with the extra `dramatiq`.

    import dramatiq
    from dramatiq.results import Results
    from shmq.integrations.dramatiq import Broker, ResultBackend

    broker = Broker("jobs")                      # the instance that `shmq serve` runs
    broker.add_middleware(Results(backend=ResultBackend("jobs")))
    dramatiq.set_broker(broker)

Everything else of a program, and the command `dramatiq`, stays as it is.
"""

from __future__ import annotations

try:
    import dramatiq  # noqa: F401
except ImportError as exc:
    raise ImportError(
        "shmq.integrations.dramatiq needs Dramatiq: install shmq with the extra `dramatiq`"
    ) from exc

from shmq.integrations.dramatiq.broker import Broker
from shmq.integrations.dramatiq.consumer import Consumer
from shmq.integrations.dramatiq.limits import RateLimiterBackend
from shmq.integrations.dramatiq.results import ResultBackend

__all__ = ["Broker", "Consumer", "RateLimiterBackend", "ResultBackend"]
