"""`Executor.map`: calls in, values out, in order."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from shmq.pool.executor import Executor
    from shmq.pool.future import Future

T = TypeVar("T")

#: Calls that are submitted together, if all are submitted at once.
_TOGETHER: Final = 32


def run(
    executor: Executor,
    function: Callable[..., T],
    calls: Iterator[tuple[Any, ...]],
    timeout: float | None,
    chunksize: int,
    buffersize: int | None,
    progress: bool,
) -> Iterator[T]:
    """Submit the calls, and return an iterator of their values. Without a `buffersize`, all are
    submitted before this returns."""
    end = None if timeout is None else time.monotonic() + timeout
    together = _TOGETHER if buffersize is None else 1
    tasks = _submitted(executor, function, calls, min(chunksize, sys.maxsize), together)
    begun = deque(itertools.islice(tasks, buffersize and min(buffersize, sys.maxsize)))
    outcomes = _outcomes(begun, tasks, end)
    if progress and sys.stderr.isatty():
        outcomes = _shown(outcomes, len(begun) if buffersize is None else None)
    return _chained(outcomes) if chunksize > 1 else outcomes


def _submitted(
    executor: Executor,
    function: Callable[..., T],
    calls: Iterator[tuple[Any, ...]],
    chunksize: int,
    together: int,
) -> Iterator[Future[Any]]:
    if chunksize > 1:
        while chunk := list(itertools.islice(calls, chunksize)):
            yield executor.submit(call_all, function, chunk)
    elif together == 1:
        for call in calls:
            yield executor.submit(function, *call)
    else:
        while batch := list(itertools.islice(calls, together)):
            yield from executor.submit_all(function, batch)


def call_all(function: Callable[..., T], chunk: list[tuple[Any, ...]]) -> list[T]:
    """A task of several calls, in the worker."""
    return [function(*call) for call in chunk]


def _outcomes(
    begun: deque[Future[Any]], tasks: Iterator[Future[Any]], end: float | None
) -> Iterator[Any]:
    """The values of the tasks, in order. Each one that is yielded lets another task begin."""
    try:
        while begun:
            left = None if end is None else max(end - time.monotonic(), 0)
            begun[0].exception(left)
            begun.extend(itertools.islice(tasks, 1))
            yield begun.popleft().result()  # a value may be large, and nothing here refers to it
    finally:
        for future in begun:
            future.cancel()


def _chained(lists: Iterator[list[T]]) -> Iterator[T]:
    for values in lists:
        values.reverse()
        while values:
            yield values.pop()


def _shown(outcomes: Iterator[Any], total: int | None) -> Iterator[Any]:
    """The same, with a bar on standard error if `rich` is installed."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return outcomes
    return iter(track(outcomes, "tasks", total, console=Console(stderr=True)))
