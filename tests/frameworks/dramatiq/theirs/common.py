"""The names that Dramatiq's tests import from a module that its source package leaves out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest


@contextlib.contextmanager
def worker(*args: Any, **kwargs: Any) -> Iterator[dramatiq.Worker]:
    """A worker that runs in the block."""
    made = dramatiq.Worker(*args, **kwargs)
    made.start()
    try:
        yield made
    finally:
        made.stop()


def _here(test: Any) -> Any:
    return test


skip_in_ci = skip_on_windows = skip_on_pypy = _here
skip_unless_rabbit_mq = skip_unless_redis = pytest.mark.skip(reason="needs another broker")
RABBITMQ_CREDENTIALS = None
