"""This process's attachment to an instance, which its connections and result backends share."""

from __future__ import annotations

import os
import threading
from typing import Final

import shmq
from shmq._native import NotReady
from shmq.errors import Gone

_SCHEME: Final = "shmq://"

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
                raise shmq.NotRunning(str(exc)) from exc
        return broker


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
