"""Pickles that leave a trace when somebody unpickles them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Trap:
    """Its pickle makes a directory when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.mkdir, (str(self._trace),)


def item(trace: Path) -> bytes:
    """A body that a queue of a version without seals would have unpickled."""
    return pickle.dumps(Trap(trace), 5)


def task(trace: Path) -> bytes:
    """A body that a worker of a version without seals would have unpickled."""
    return b"A" * 20 + item(trace)
