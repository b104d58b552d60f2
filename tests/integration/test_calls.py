"""Calls of an Executor that the standard library's cannot take: lambdas, notebooks, arrays that are
changed in place."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import pool_tasks as tasks
from support.processes import WATCHDOG

import shmq
from shmq.pool import calls

METHODS = ("fork", "spawn", "forkserver")


@pytest.mark.parametrize("method", METHODS)
def test_lambdas_and_local_functions_travel_if_cloudpickle_is_there(
    pool: Callable[..., shmq.Executor], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.arange(100_000)

    def local(number: int) -> Any:
        return lambda: array[number]

    executor = pool(1, multiprocessing.get_context(method))
    assert executor.submit(lambda: 5).result() == 5
    assert executor.submit(local, 7).result()() == 7
    assert [found() for found in executor.map(local, range(3))] == [0, 1, 2]
    monkeypatch.setattr(calls, "_cloudpickle", lambda: None)
    for refused in (lambda: 5, local):
        with pytest.raises((pickle.PicklingError, AttributeError), match="Can't"):
            executor.submit(refused, 1).result()


NOTEBOOK = """
import multiprocessing, shmq
multiprocessing.set_start_method({method!r})
pool = shmq.Executor(1)
def f(x): return x
print(pool.submit(f, 1).result())
def f(x): return x + 10
def g(x): return f(x) + 100
class Point:
    x = 7
print(pool.submit(f, 1).result(), pool.submit(g, 1).result())
print(pool.submit(lambda: Point()).result().x)
pool.shutdown()
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_notebook_uses_what_its_last_cell_has_defined(method: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK.format(method=method)],
        stdout=subprocess.PIPE,
        timeout=WATCHDOG,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["1", "11 111", "7"]


@pytest.mark.parametrize(
    ("module", "asked"),
    [("gevent.monkey", "is_module_patched"), ("eventlet.patcher", "is_monkey_patched")],
)
def test_greenlets_are_refused(module: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched = types.ModuleType(module)
    setattr(patched, asked, lambda name: True)
    monkeypatch.setitem(sys.modules, module, patched)
    with pytest.raises(shmq.ShmqError, match="greenlets cannot wait"):
        shmq.Executor(1).submit(abs, 1)


@pytest.mark.parametrize("kind", ["Queue", "JoinableQueue", "SimpleQueue"])
def test_greenlets_run_while_a_queue_waits(
    kind: str, open_broker: Callable[..., shmq.Broker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`time.sleep` is theirs: it runs one of them, which ends the wait."""
    patched: Any = types.ModuleType("gevent.monkey")
    patched.is_module_patched = lambda name: True
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    broker = open_broker(disk=False, data_path=None)
    queue = getattr(shmq, kind)(broker=broker)
    monkeypatch.setattr(time, "sleep", lambda seconds: queue.put("of another greenlet"))
    assert queue.get() == "of another greenlet"
    if kind != "SimpleQueue":
        full = getattr(shmq, kind)(1, broker=broker)
        full.put("first")
        monkeypatch.setattr(time, "sleep", lambda seconds: full.get())
        full.put("second")
        assert full.get() == "second"
        with pytest.raises(shmq.Full):
            full.put("third") or full.put("fourth", block=False)


@pytest.mark.parametrize("method", METHODS)
def test_large_arrays_may_be_changed_if_the_pool_is_writable(
    pool: Callable[..., shmq.Executor], method: str
) -> None:
    array = np.zeros(1 << 20)
    executor = pool(1, multiprocessing.get_context(method), writable=True)
    found = executor.submit(tasks.change_in_place, array).result()
    assert found[0] == 1.0
    found += 1.0
    assert array[0] == 0.0
