"""The application of programs of Dramatiq. DIFFER_URL is its broker and its results backend."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import dramatiq
from dramatiq.middleware import CurrentMessage, GroupCallbacks, default_middleware
from dramatiq.results import Results

URL = os.environ["DIFFER_URL"]


def parts() -> tuple[Any, Any, Any]:
    """The broker's class, its results and the state of its limits."""
    if URL.startswith("shmq://"):
        from shmq.integrations.dramatiq import Broker, RateLimiterBackend, ResultBackend

        instance = URL.removeprefix("shmq://")
        return Broker, ResultBackend(instance), RateLimiterBackend(instance)
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.rate_limits.backends import RedisBackend as Limits
    from dramatiq.results.backends import RedisBackend

    url = URL.replace("redis+socket", "unix")
    return RedisBroker, RedisBackend(url=url), Limits(url=url)


kind, results, limits = parts()
middleware = [
    *(make() for make in default_middleware),
    CurrentMessage(),
    Results(backend=results, store_results=True),
    GroupCallbacks(limits),
]
if URL.startswith("shmq://"):
    broker = kind(URL.removeprefix("shmq://"), middleware=middleware, max_priority=9)
else:
    broker = kind(url=URL.replace("redis+socket", "unix"), middleware=middleware)
dramatiq.set_broker(broker)


class Odd(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


@dramatiq.actor(max_retries=0)
def echo(value: Any = None) -> Any:
    return value


@dramatiq.actor(max_retries=0, queue_name="second")
def other(value: Any = None) -> Any:
    return value


@dramatiq.actor(max_retries=0)
def add(x: Any, y: Any) -> Any:
    return x + y


@dramatiq.actor(max_retries=0)
def made(what: str, size: int = 0) -> Any:
    """A result that JSON may not know."""
    return {
        "text": lambda: "x" * size,
        "bytes": lambda: b"x",
        "set": lambda: {1},
        "tuple": lambda: (1, (2, 3)),
        "nan": lambda: float("nan"),
        "large": lambda: 2**70,
        "nested": lambda: {"a": [1, None, {"b": "ä\0"}]},
        "keys": lambda: {1: 2},
        "lambda": lambda: lambda: 1,
    }[what]()


@dramatiq.actor(max_retries=0)
def fails(what: str) -> None:
    raise {
        "ValueError": lambda: ValueError("one", 2),
        "KeyError": lambda: KeyError("key"),
        "Odd": lambda: Odd(1, 2),
        "long": lambda: ValueError("x" * 200_000),
    }[what]()


@dramatiq.actor(max_retries=3, min_backoff=1, max_backoff=10)
def flaky(path: str, failures: int) -> int:
    """Fails so many times. The file has a byte for each run."""
    with open(path, "ab") as runs:
        runs.write(b"x")
    count = os.path.getsize(path)
    if count <= failures:
        raise ValueError("again")
    return count


@dramatiq.actor(max_retries=3, throws=(KeyError,))
def throws() -> None:
    raise KeyError("thrown")


@dramatiq.actor(max_retries=2, min_backoff=1, max_backoff=5)
def retries(path: str) -> int:
    with open(path, "ab") as runs:
        runs.write(b"x")
    if os.path.getsize(path) == 1:
        raise dramatiq.errors.Retry("later", delay=10)
    return os.path.getsize(path)


@dramatiq.actor(max_retries=0, time_limit=200)
def too_long() -> None:
    while True:
        time.sleep(0.01)


@dramatiq.actor(max_retries=0)
def touch(*words: Any) -> str:
    """Make the file whose name is the last of the arguments, and note when in it."""
    part = Path(f"{words[-1]}.part")
    part.write_text(str(time.monotonic_ns()))
    part.rename(words[-1])
    return "touched"


@dramatiq.actor(max_retries=0, store_results=False)
def succeeded(message: Any, result: Any) -> None:
    _note(message, f"success {result}")


@dramatiq.actor(max_retries=0, store_results=False)
def failed(message: Any, error: Any) -> None:
    _note(message, f"failure {error['type']} {error['message'][:20]}")


def _note(message: Any, text: str) -> None:
    path = message["options"]["note"]
    part = Path(f"{path}.part")
    part.write_text(text)
    part.rename(path)


@dramatiq.actor(max_retries=0)
def looks() -> Any:
    """The parts of its message that a task sees."""
    message: Any = CurrentMessage.get_current_message()
    hidden = {"redis_message_id", "shmq_id", "message_timestamp"}
    options = {name: value for name, value in message.options.items() if name not in hidden}
    return {"queue": message.queue_name, "actor": message.actor_name, "options": sorted(options)}


@dramatiq.actor(max_retries=0)
def gate(path: str) -> str:
    while not os.path.exists(path) and os.path.exists(os.path.dirname(path)):
        time.sleep(0.005)
    return "opened"


@dramatiq.actor(max_retries=0)
def no_result() -> None:
    return None
