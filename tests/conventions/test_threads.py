"""Each thread of the package ends with what it is for.

A thread whose function is a method keeps the object of that method for as long as it runs. So that
must not be an object that programs have: it would never be forgotten.
"""

from __future__ import annotations

import ast
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import ROOT, eventually

import shmq

#: Where threads are made, and what ends each of them. Add a new one with a test below, if it is of
#: an object that programs have.
THREADS = {
    "cli/forward.py:_shown": "the block that shows the progress",
    "cli/output.py:patience": "the block that may take long",
    "client/aio.py:_Keeper.enter": "a second after the last task that waits; it has no consumer",
    "client/beacon.py:Beacon.__init__": "its consumer, which it has weakly",
    "client/lease.py:LeaseHolder.__init__": "its holder, which it has weakly",
    "client/many.py:_Joiner.ask": "when all topics that were asked for are joined",
    "client/results_aio.py:_Keeper.enter": "a second after the last task that waits",
    "diagnostics/fleet.py:_ask_all": "the deadline of its request",
    "embedded.py:EmbeddedSupervisor.watch": "the supervisor, which the end of the Broker ends",
    "forward/metrics.py:served": "the process",
    "gateway/delivery_waiter.py:DeliveryWaiter.watch": "the gateway process",
    "integrations/django/crew.py:_follow": "the worker process",
    "integrations/django/files.py:tell": "the worker process",
    "pool/crew.py:Crew": "its executor's end, and that of its last worker",
    "pool/executor.py:Executor._send": "the last task that waits for room, which keeps it",
    "pool/inbox.py:_Collector": "a second after the last future that it watches",
    "pool/worker.py:_Worker.__init__": "the worker process",
    "remote/lease.py:RemoteLeaseHolder.__init__": "its holder, which it has weakly",
    "remote/subscription.py:Subscription.start": "its consumer, which it does not have",
    "spark/keeper.py:keep": "the application, or the last of the leases that it keeps",
    "spark/keeper.py:start": "the keeper, which takes the holders over",
    "spark/staging.py:_reader": "its one call",
    "spark/staging.py:commit": "its one call",
    "supervisor/loops.py:Loops.start": "the supervisor process",
    "supervisor/watchdog.py:Watchdog.stopping": "the supervisor process",
}


def _makes_thread(node: ast.AST) -> bool:
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base).endswith("Thread") for base in node.bases)
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Thread")


def _made(path: Path) -> Iterator[tuple[str, int]]:
    """Names of what makes threads in a module, with the line."""
    name = path.relative_to(ROOT / "shmq").as_posix()

    def walk(node: ast.AST, where: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            inner = f"{where}.{child.name}".lstrip(".") if named else where  # type: ignore[attr-defined]
            if _makes_thread(child):
                yield f"{name}:{inner}", child.lineno  # type: ignore[attr-defined]
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text()), "")


def test_every_thread_has_an_end() -> None:
    used = set()
    for path in sorted((ROOT / "shmq").rglob("*.py")):
        for where, line in _made(path):
            assert where in THREADS, f"{where} ({line}) makes a thread: say in THREADS what ends it"
            used.add(where)
    assert used == set(THREADS)


# ---- what programs have, and forget ----


def _fileno(broker: shmq.Broker) -> object:
    consumer = broker.consumer("t", "c")
    consumer.fileno()
    return consumer


def _fileno_of_many(broker: shmq.Broker) -> object:
    consumer = broker.consumer(["t", "u"], "c")
    consumer.fileno()
    return consumer


def _holder(broker: shmq.Broker) -> object:
    return broker.lease_holder("t", "c", "me", ttl=0.4, keepalive=True)


def _executor(broker: shmq.Broker) -> object:
    executor = shmq.Executor(1)
    assert executor.submit(pow, 2, 3).result() == 8
    return executor


def _watched_future(broker: shmq.Broker) -> object:
    executor = shmq.Executor(1)
    executor.submit(pow, 2, 3).add_done_callback(lambda _: None)
    return executor


def _durable(broker: shmq.Broker) -> object:
    executor = shmq.Executor(1, broker=broker, topic="tasks")
    assert executor.submit(pow, 2, 3).result() == 8
    return executor


def _broker(broker: shmq.Broker) -> object:
    return shmq.Broker(disk=False)


@pytest.mark.parametrize(
    "make",
    [_fileno, _fileno_of_many, _holder, _executor, _watched_future, _durable, _broker],
)
def test_what_is_forgotten_ends_its_threads(
    broker: shmq.Broker, make: Callable[[shmq.Broker], object]
) -> None:
    shmq.Queue()  # the broker of this process tree, which stays
    before = set(threading.enumerate())
    made = make(broker)
    assert set(threading.enumerate()) - before
    del made
    gc.collect()
    eventually(lambda: not set(threading.enumerate()) - before, what=str(threading.enumerate()))
