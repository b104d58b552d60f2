"""This process's attachment to an instance, which its connections and result backends share."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import shmq
from shmq.errors import Gone, NotReady, NotRunning

T = TypeVar("T")

_SCHEME: Final = "shmq://"
#: How long a call waits for a broker that was stopped, in seconds: as Celery's `retry_policy`.
PATIENCE: Final = 20.0
_PAUSE: Final = 0.05

_brokers: dict[str | None, shmq.Broker] = {}
_lock = threading.Lock()


def _forked() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have had it


os.register_at_fork(after_in_child=_forked)


def instance_of(url: str | None) -> str | None:
    """The instance that a URL names: `shmq://jobs` is `jobs`. None: SHMQ_INSTANCE says it."""
    text = (url or "").removeprefix(_SCHEME).partition("?")[0].strip("/")
    return text.partition("/")[0] or None


def attach(instance: str | None) -> shmq.Broker:
    """The attachment. A new one is made if there is none or the instance was stopped. Raises as
    `shmq.attach`."""
    with _lock:
        broker = _brokers.get(instance)
        if broker is None or _ended(broker):
            try:
                broker = _brokers[instance] = shmq.attach(instance)
            except NotReady as exc:  # its next start has just begun
                raise NotRunning(str(exc)) from exc
        return broker


def ensure(instance: str | None, call: Callable[[], T], deadline: float | None = None) -> T:
    """Call. If the broker was stopped, the call is made again when it runs: for 20 s, or until the
    deadline of time.monotonic(). A program that never had the instance does not wait, unless a
    worker's task calls: a process of its pool may call for the first time. Raises as the call."""
    known, late = is_known(instance) or is_in_a_task(), time.monotonic() + PATIENCE
    while True:
        try:
            return call()
        except (Gone, NotRunning):
            now = time.monotonic()
            if not known or now >= late or (deadline is not None and now >= deadline):
                raise
            time.sleep(_PAUSE)


def is_in_a_task() -> bool:
    """Whether a worker of Celery runs a task in this thread."""
    state = sys.modules.get("celery._state")  # who runs a task has imported it
    return state is not None and state.get_current_worker_task() is not None


def not_stopping(broker: shmq.Broker) -> None:
    """Raise NotRunning if the broker is about to stop: it takes nothing any more. Raises Gone if it
    has stopped."""
    if broker.views().directory.read("stopping"):
        raise NotRunning(f"the broker {broker.instance!r} is stopping")


def is_known(instance: str | None) -> bool:
    """Whether this process has attached to the instance: if it cannot now, the instance was
    stopped, and may be about to start."""
    return instance in _brokers


def _ended(broker: shmq.Broker) -> bool:
    try:
        return broker.closed or broker.ended
    except Gone:
        return True


def detach(instance: str | None) -> None:
    """End the attachment, if there is one. The messages of its connections go
    back to their queues."""
    with _lock:
        broker = _brokers.pop(instance, None)
    if broker is not None:
        broker.close()
