"""Every public method of the queues and of the executor with usual and odd arguments, on the
standard library or on shmq: `python -m support.drop_in_matrix IMPLEMENTATION GROUP`.

The cases are in `drop_in_queues` and `drop_in_executors`. Each line of the output is the name of a
case and what became of it, as JSON. Cases of a group run one after another in one process.
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import importlib
import json
import math
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from decimal import Decimal
from fractions import Fraction
from typing import Any

from support.drop_in_programs import implementation

Cases = Callable[[Any], Iterator[tuple[str, Any]]]
GROUPS: list[Cases] = []
#: Names of exceptions that programs catch; an error of another name counts as its first base here.
KNOWN = (
    queue.Empty,
    queue.Full,
    pickle.PicklingError,
    pickle.UnpicklingError,
    BrokenProcessPool,
    futures.CancelledError,
    futures.InvalidStateError,
)
LONG = 60.0


def cases(function: Cases) -> Cases:
    """Add a function that yields cases."""
    GROUPS.append(function)
    return function


def kind(error: BaseException | None) -> str:
    """How a program names the error in an `except`."""
    for base in type(error).__mro__:
        if base in KNOWN or base.__module__ == "builtins" or "drop_in" in base.__module__:
            return base.__name__
    return type(error).__name__


def tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The value or the error of a call."""
    try:
        return f"= {call(*args, **kwargs)!r}"
    except BaseException as exc:
        return kind(exc)


def eventually(condition: Callable[[], Any]) -> None:
    """Wait until a condition holds."""
    while not condition():
        time.sleep(0.001)


ODD: dict[str, Any] = {
    "none": None,
    "zero": 0,
    "zero float": 0.0,
    "negative": -1,
    "negative float": -0.5,
    "negative infinity": -math.inf,
    "true": True,
    "text": "1",
    "bytes": b"1",
    "list": [1],
    "complex": 1j,
    "fraction": Fraction(1, 1000),
    "decimal": Decimal("0.001"),
    "small": 1e-9,
    "nan": math.nan,
}
#: Timeouts that are seen to be no short ones, tried only where nothing has to be awaited.
HUGE: dict[str, Any] = {"infinity": math.inf, "float": 1e10, "float max": 1e300, "int": 1 << 70}


class Raises:
    """An object whose pickling, or unpickling, raises."""

    def __init__(self, error: BaseException, late: bool) -> None:
        self.error = error
        self.late = late

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.late:
            raise self.error
        return raise_it, (self.error,)


def raise_it(error: BaseException, *_: object) -> None:
    raise error


ERRORS = (ValueError("v"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopIteration(1))


class FromHandler(Exception):
    """Raised by the handler of a signal."""


@contextlib.contextmanager
def alarm(handler: Callable[[], Any], after: float = 0.05) -> Iterator[None]:
    """Call a function in the main thread, by a signal."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, after)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    """Run a group."""
    library, name = sys.argv[1:]
    multiprocessing.set_start_method("fork")
    importlib.import_module(f"support.drop_in_{name}")
    itself = importlib.import_module("support.drop_in_matrix")  # that which the cases know
    for each in itself.GROUPS:
        for label, found in each(implementation(library)):
            line = json.dumps([f"{each.__name__}: {label}", found], default=repr)
            os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    main()
