"""Tries cells and says which are wrong.

A cell is a call with something beyond a limit, by one way in. It is right if the call returns,
where it may, or raises one typed error that names the limit and says what to do, in time; if the
next call on the same handle then works; and if nothing was lost.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from support.processes import WATCHDOG

import shmq

#: The errors that a call may raise: Python's own for arguments too, but not OverflowError and the
#: like, which name nothing.
TYPED = (shmq.ShmqError, ValueError, TypeError, queue.Empty, queue.Full, TimeoutError)
UNTYPED = (UnicodeError, RecursionError)
#: These say that a number is right and something else is not: they need not name the number.
OTHER = (*(shmq.LeaseLost, shmq.NotInFlight, shmq.MessageTooBig), TimeoutError, queue.Empty)


@dataclass(frozen=True)
class Outcome:
    """How a call ended: its value, its error, or neither: it hung."""

    value: Any = None
    error: BaseException | None = None
    hung: str = ""
    """The stack of the thread that hangs."""

    def __str__(self) -> str:
        if self.hung:
            return f"no end within {WATCHDOG:g} s\n{self.hung}"
        if self.error is not None:
            return f"{type(self.error).__name__}: {self.error}"
        return f"returned {self.value!r:.100}"


def attempt(call: Callable[[], Any]) -> Outcome:
    """The outcome of a call, made in a thread of its own, which is left behind if it hangs."""
    ended: queue.SimpleQueue[Outcome] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put(Outcome(call()))
        except BaseException as exc:
            ended.put(Outcome(error=exc))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        return ended.get(timeout=WATCHDOG)
    except queue.Empty:
        frame = sys._current_frames().get(thread.ident or 0)
        return Outcome(hung="".join(traceback.format_stack(frame)[-1:]).strip())


def wrong(outcome: Outcome, says: str, may_return: bool) -> str | None:
    """Say what is wrong with an outcome; None: nothing. says: a regular expression for the name of
    the limit and the remedy, which the error must have."""
    error = outcome.error
    if outcome.hung:
        return "it hangs"
    if error is None:
        return None if may_return else "it is not refused"
    if not isinstance(error, TYPED) or isinstance(error, UNTYPED):
        return "the error has no type of its own"
    if isinstance(error, OTHER) and may_return:
        return None
    if not re.search(says, str(error), re.DOTALL):
        return f"the error does not say {says!r}"
    return None


class Sheet:
    """The cells that were tried, and those that are wrong."""

    def __init__(self) -> None:
        self.tried = 0
        self.faults: list[str] = []

    def fault(self, cell: str, what: str) -> None:
        self.faults.append(f"{cell}: {what}")

    def cell(
        self,
        name: str,
        call: Callable[[], Any],
        says: str,
        again: Callable[[], Any],
        may_return: bool = False,
    ) -> Outcome:
        """Try one. again: the next call on the same handle, with values that are right."""
        self.tried += 1
        outcome = attempt(call)
        what = wrong(outcome, says, may_return)
        if what is not None:
            self.fault(name, f"{what}: {outcome}")
        if not outcome.hung:
            after = attempt(again)
            if after.hung or after.error is not None:
                self.fault(name, f"the next call fails: {after}; this one: {outcome}")
        return outcome

    def verdict(self) -> None:
        """Fail the test if a cell is wrong."""
        if self.faults:
            head = f"{len(self.faults)} faults in {self.tried} cells"
            pytest.fail("\n".join([head, *self.faults]), pytrace=False)
