"""CPython's tests of `concurrent.futures.ProcessPoolExecutor`, with `shmq.Executor` in its place.

The environment variable START_METHOD says how these tests start processes, which import this module
too."""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from support.processes import eventually, wait_ended

import shmq

GROUPS = {
    "initializer": ".*Initializer.*",
    "shutdown": ".*Shutdown.*",
    "wait": ".*Wait.*",
    "as-completed": ".*AsCompleted.*",
    "executor": ".*PoolExecutor.*",
    "deadlock": ".*Deadlock.*",
}


class Worker:
    """A worker process, with the methods of `multiprocessing.Process` that the tests call."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def join(self) -> None:
        wait_ended(self._pid)

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)


class CallQueue:
    """There is none: a task is where the workers find it when `submit` returns."""

    def join_thread(self) -> None:
        pass


class Executor(shmq.Executor):
    """With what the tests read in private attributes of CPython's executor."""

    _call_queue = CallQueue()

    @property
    def _processes(self) -> dict[int, Worker]:
        if self._crew is None:  # nothing was submitted
            return {}
        return {pid: Worker(pid) for pid in eventually(self._crew.pids)}

    @property
    def _executor_manager_thread(self) -> Any:
        return self._crew

    @property
    def _broken(self) -> str | None:
        return self._crew.broken

    @property
    def _mp_context(self) -> Any:
        return self.terms.context


def _modules() -> Iterator[ModuleType]:
    """The module of the tests, and from Python 3.12 on those of the package that it is then."""
    whole = importlib.import_module("test.test_concurrent_futures")
    yield whole
    for found in pkgutil.iter_modules(getattr(whole, "__path__", ())):
        if found.name.startswith("test_"):
            yield importlib.import_module(f"{whole.__name__}.{found.name}")


def _runs_ours(run: Any) -> Any:
    """CPython's `assert_python_ok` for programs that import the executor of the tests by name."""

    def assert_python_ok(option: str, program: str) -> Any:
        theirs, ours = "from concurrent.futures import Executor", "from shmq import Executor"
        start = f"import sys; sys.path[:0] = {sys.path!r}\n"
        return run(option, start + program.replace(theirs, ours))

    return assert_python_ok


def _install() -> None:
    replaced: Any = concurrent.futures.ProcessPoolExecutor
    for module in list(_modules()):
        if hasattr(module, "assert_python_ok"):
            module.assert_python_ok = _runs_ours(module.assert_python_ok)
        for name, case in vars(module).items():
            started = getattr(case, "ctx", None) if name.endswith("Test") else None
            if started == os.environ["START_METHOD"] and case.executor_type is replaced:
                ours = {"executor_type": Executor, "__module__": __name__}
                globals()[name] = type(name, (case,), ours)
    concurrent.futures.ProcessPoolExecutor = Executor  # type: ignore[assignment,misc]


_install()
