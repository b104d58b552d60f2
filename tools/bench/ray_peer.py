"""Ray's queue beside shmq: an actor that holds an asyncio.Queue; each put and get is a call to it.

The cluster of one host is started with the first run and stopped at the end."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from peers import Link, Peer
from runs import MADE, ONE, ROUND_TRIPS, Lacking, Plan


def _ray(address: str | None = None, **options: Any) -> Any:
    """The module, with a cluster: a new one, or that of `address`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns of it
    import ray

    if not ray.is_initialized():
        ray.init(address, log_to_driver=False, logging_level="error", **options)
    return ray


class RayLink(Link):
    """One queue."""

    def __init__(self, address: str, capacity: int) -> None:
        from ray.util.queue import Queue

        self._address = address
        self._made = Queue(capacity, actor_options={"num_cpus": 0})  # the actor lives as long
        self._pickled = pickle.dumps(self._made)

    def __getstate__(self) -> dict[str, Any]:
        return {"_address": self._address, "_pickled": self._pickled}

    def _queue(self) -> Any:
        _ray(self._address)  # a queue is made of bytes only where there is a cluster
        return pickle.loads(self._pickled)

    def sender(self) -> Callable[[Any], Any]:
        return self._queue().put  # type: ignore[no-any-return]

    def receiver(self, timeout: float) -> Callable[[], Any]:
        get = self._queue().get
        return lambda: get(timeout=timeout)

    def remove(self) -> None:
        self._made.shutdown(force=True)


class RayQueue(Peer):
    name = "Ray queue"
    lines: ClassVar[tuple[str, ...]] = (ONE, MADE, *ROUND_TRIPS)
    note = "an actor; each call waits for its answer"
    list_note = "a list is one object"

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._address = ""

    def version(self) -> str:
        if not self._address:
            try:
                ray = _ray(include_dashboard=False, num_cpus=1, _temp_dir=str(self._scratch / "r"))
            except (RuntimeError, ValueError, ConnectionError) as exc:
                raise Lacking(f"Ray does not start: {exc}") from exc
            self._address = ray.get_runtime_context().gcs_address
        return importlib.metadata.version("ray")

    def link(self, plan: Plan) -> Link:
        return RayLink(
            self._address, plan.capacity // plan.count if plan.in_lists else plan.capacity
        )

    def close(self) -> None:
        if self._address:
            _ray().shutdown()
            self._address = ""
