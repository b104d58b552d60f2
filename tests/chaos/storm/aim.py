"""Death in the middle of a call: a timer of the kernel's that sends SIGKILL a moment from now.

Processes that do their work in Python spend a few hundredths of their time in the core, so a kill
from outside seldom meets one there. A process that is to die arms this timer just before a call
instead; the instant is still the kernel's, somewhere in the call or soon after it."""

from __future__ import annotations

import ctypes
import random
import signal
import struct
import time
from collections.abc import Callable
from typing import Any

_SIGEV_SIGNAL = 0
_MEANS = (2e3, 10e3, 50e3)  # ns; calls take from one to some hundred microseconds
_MEANS_SLOW = (10e3, 100e3, 1e6)  # those of a supervisor, which writes files too


class Aim:
    """This process's timer. Not shared with a forked child."""

    def __init__(self, choice: random.Random, slow: bool = False) -> None:
        self._choice, self._means = choice, _MEANS_SLOW if slow else _MEANS
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = ctypes.create_string_buffer(
            struct.pack("=qii", 0, signal.SIGKILL, _SIGEV_SIGNAL).ljust(64, b"\0"), 64
        )
        if self._libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "timer_create")

    def fire(self) -> None:
        """Die a moment from now."""
        delay = 1000 + int(self._choice.expovariate(1 / self._choice.choice(self._means)))
        spec = struct.pack("=qqqq", 0, 0, 0, delay)
        if self._libc.timer_settime(self._timer, 0, spec, None):
            raise OSError(ctypes.get_errno(), "timer_settime")


def aimed(
    kind: type[Any], methods: tuple[str, ...], doomed: Callable[[], bool], aim: Aim, passed: int
) -> type[Any]:
    """A subclass of `kind` that fires in one of these methods, when `doomed()` is true and the
    given number of calls has passed since."""
    left = [passed]

    def wrap(name: str) -> Any:
        original = getattr(kind, name)

        def method(self: Any, *args: Any, **how: Any) -> Any:
            if doomed():
                left[0] -= 1
                if left[0] == 0:
                    aim.fire()
            return original(self, *args, **how)

        return method

    return type(f"Aimed{kind.__name__}", (kind,), {name: wrap(name) for name in methods})
