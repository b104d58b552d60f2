"""The application of programs of Celery. DIFFER_URL is its broker and its result backend."""

from __future__ import annotations

import datetime
import decimal
import os
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import celery
from celery.exceptions import Ignore, Reject
from celery.schedules import crontab

LONG = 600.0
URL = os.environ["DIFFER_URL"]

app = celery.Celery("differ.celery_app", broker=URL, backend=URL, set_as_current=True)
app.conf.update(
    accept_content=["json", "pickle", "yaml"],
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    task_routes={"differ.celery_app.routed": {"queue": "second"}},
    broker_transport_options={
        "queue_order_strategy": os.environ.get("DIFFER_ORDER", "round_robin")
    },
    result_extended=True,
    worker_hijack_root_logger=False,
    task_default_queue="celery",
    beat_schedule={"never": {"task": "none", "schedule": crontab(hour=3)}},
)


class Odd(Exception):
    """Pickle calls it with one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


class WithLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


@app.task
def add(x: Any, y: Any) -> Any:
    return x + y


@app.task
def echo(value: Any = None) -> Any:
    return value


@app.task
def total(values: Any) -> Any:
    return sum(values)


@app.task
def routed() -> str:
    return "routed"


@app.task
def touch(*words: Any) -> str:
    """Make the file whose name is the last of the arguments, and note when in it. The times of
    files are the same for milliseconds."""
    part = Path(f"{words[-1]}.part")
    part.write_text(str(time.monotonic_ns()))
    part.rename(words[-1])
    return "touched"


@app.task
def made(what: str, size: int = 0) -> Any:
    """A result that this serializer may not know."""
    return {
        "text": lambda: "x" * size,
        "bytes": lambda: b"x" * size,
        "set": lambda: {1},
        "tuple": lambda: (1, (2, 3)),
        "datetime": lambda: datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "decimal": lambda: decimal.Decimal("1.5"),
        "uuid": lambda: uuid.UUID(int=7),
        "nan": lambda: float("nan"),
        "large": lambda: 2**70,
        "nested": lambda: {"a": [1, None, {"b": "ä\0"}]},
        "keys": lambda: {1: 2},
        "lambda": lambda: lambda: 1,
        "lock": threading.Lock,
        "exception": lambda: ValueError("as a value"),
    }[what]()


@app.task
def fails(what: str) -> None:
    raise {
        "ValueError": lambda: ValueError("one", 2),
        "KeyError": lambda: KeyError("key"),
        "Odd": lambda: Odd(1, 2),
        "WithLock": lambda: WithLock("lock"),
        "bytes": lambda: ValueError(b"x", {1}),
        "long": lambda: ValueError("x" * 200_000),
        "Ignore": Ignore,
        "Reject": lambda: Reject("no", requeue=False),
        "TimeoutError": lambda: TimeoutError("of a task"),
        "local": _local,
    }[what]()


def _local() -> Exception:
    class OfAFunction(Exception):
        pass

    return OfAFunction("local")


@app.task(bind=True, max_retries=3)
def flaky(self: Any, failures: int, countdown: float, most: int | None = None) -> int:
    if self.request.retries < failures:
        raise self.retry(exc=ValueError("again"), countdown=countdown, max_retries=most)
    return int(self.request.retries)


@app.task(bind=True, autoretry_for=(ValueError,), max_retries=2, default_retry_delay=0)
def auto(self: Any, failures: int) -> int:
    if self.request.retries < failures:
        raise ValueError("again")
    return int(self.request.retries)


@app.task(bind=True)
def looks(self: Any) -> Any:
    """The parts of its request that a task sees."""
    request = self.request
    info = request.delivery_info or {}
    return {
        "redelivered": bool(info.get("redelivered")),
        "priority": info.get("priority"),
        "routing_key": info.get("routing_key"),
        "exchange": info.get("exchange"),
        "retries": request.retries,
        "group": request.group is not None,
        "parent": request.parent_id is not None,
        "root": request.root_id == request.id,
        "headers": sorted(request.headers or {}),
        "origin": bool(request.origin),
        "eta": request.eta is not None,
        "expires": request.expires is not None,
        "chord": request.chord is not None,
        "ignore_result": request.ignore_result,
        "timelimit": request.timelimit,
    }


@app.task(bind=True)
def states(self: Any, gate: str) -> str:
    self.update_state(state="HALF", meta={"done": 5})
    wait_for(gate)
    return "done"


@app.task(acks_late=True, reject_on_worker_lost=True)
def dies_once(path: str) -> str:
    if not os.path.exists(path):
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@app.task
def dies(how: str) -> None:
    if how == "_exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(LONG)


@app.task
def gate(path: str) -> str:
    wait_for(path)
    return "opened"


@app.task(soft_time_limit=0.2)
def too_long() -> None:
    time.sleep(LONG)


@app.task(time_limit=0.5)
def far_too_long() -> None:
    time.sleep(LONG)


@app.task(bind=True)
def spawns(self: Any, count: int) -> list[str]:
    return [echo.delay(each).id for each in range(count)]


@app.task(bind=True)
def replaces(self: Any, value: int) -> Any:
    raise self.replace(add.s(value, 1))


@app.task(ignore_result=True)
def ignores() -> str:
    return "ignored"


def wait_for(path: str) -> None:
    """Wait until a file is there, or its program has ended."""
    while not os.path.exists(path) and os.path.exists(os.path.dirname(path)):
        time.sleep(0.005)
