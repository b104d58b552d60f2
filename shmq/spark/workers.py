"""Spark's Python processes, which run the data source: they live long and each has many tasks."""

from __future__ import annotations

import gc

#: Calls that still exempt what is loaded. The first task loads modules while it runs.
_left = 2


def exempt_modules() -> None:
    """Exempt what is loaded now from garbage collection, at the first two calls in a process of
    Spark's. Spark has a process collect all garbage after each task and after each call to the data
    source: the modules alone cost 10 to 30 ms of a core."""
    global _left
    if _left:
        _left -= 1
        gc.freeze()
