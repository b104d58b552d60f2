"""Faults that the machine must find: SHMQ_LIFECYCLE_PLANT names one, and `plant` puts it in."""

from __future__ import annotations

import os
from collections.abc import Callable

PLANT = "SHMQ_LIFECYCLE_PLANT"
PLANTS: dict[str, Callable[[], None]] = {}


def plant() -> None:
    """Put in the fault that the environment names, if it names one."""
    name = os.environ.get(PLANT)
    if name:
        PLANTS[name]()
