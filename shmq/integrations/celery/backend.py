"""Celery's result backend: `shmq://INSTANCE`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from celery import states
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import TimeoutError

import shmq
from shmq.errors import Gone, NotRunning
from shmq.integrations.celery import attachment
from shmq.integrations.celery.chords import Chord
from shmq.integrations.celery.inbox import is_green

STORE: Final = "celery.results"

#: The store's limits. Memory is taken as results come.
_MAX_KEYS: Final = 1 << 22
_MAX_BYTES: Final = 1 << 30
#: How long a greenlet sleeps between two looks for a result, at most.
_GREEN_PAUSE: Final = 0.01
#: How many of the results that a program waits for wake it.
_WATCHED: Final = 256
#: This follows a task's key while the task has no result.
_UNREADY: Final = b".unready"


class Backend(KeyValueStoreBackend):
    """A result backend of Celery in a results store of an instance.

    url: `shmq://INSTANCE`. Options (`result_backend_transport_options`): `store`, the name of the
    results store (`celery.results`); `max_keys` and `max_bytes`, its limits when it is made.
    """

    implements_incr = True
    supports_native_join = True
    supports_autoexpire = True
    persistent = True

    def __init__(
        self, app: Any, url: str | None = None, expires: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(app=app, url=url, expires=expires, **kwargs)
        self.expires = self.prepare_expires(expires, int)
        self._instance = attachment.instance_of(url)
        self._handle: tuple[shmq.Broker, shmq.Results] | None = None

    @property
    def client(self) -> shmq.Results:
        """The results store. Raises as `shmq.attach`."""
        if self._handle is None or self._handle[0].ended:
            options = self.app.conf.get("result_backend_transport_options") or {}
            name = options.get("store", STORE)
            limits = options.get("max_keys", _MAX_KEYS), options.get("max_bytes", _MAX_BYTES)
            broker = attachment.attach(self._instance)
            self._handle = broker, broker.results(name, *limits)
        return self._handle[1]

    def as_uri(self, include_password: bool = False) -> str:
        """The URL."""
        return self.url or f"shmq://{self._instance or ''}"

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        """Whether a call that raised this may be tried again."""
        return isinstance(exc, (Gone, NotRunning))

    # ---- keys ----

    def get(self, key: bytes) -> bytes | None:
        """The value of a key. A task that is not ready has its state under a key beside its own, so
        that its own is there when the result is."""
        client = self.client
        found = client.get(key)
        if found is None and key.startswith(self.task_keyprefix):
            return client.get(key + _UNREADY)
        return found

    def mget(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The values of keys."""
        return [self.get(key) for key in keys]

    def set(self, key: bytes, value: Any) -> None:
        """Store a value."""
        self.client.set(key, _bytes(value), self.expires or None)

    def _set_with_state(self, key: bytes, value: Any, state: str) -> None:
        if state in states.READY_STATES:
            self.set(key, value)
            self.client.delete(key + _UNREADY)
        else:
            self.set(key + _UNREADY, value)
            self.client.delete(key)

    def delete(self, key: bytes) -> None:
        """Delete a key."""
        self.client.delete(key)
        if key.startswith(self.task_keyprefix):
            self.client.delete(key + _UNREADY)

    def incr(self, key: bytes) -> int:
        """Add one to a counter. Returns the new number."""
        number = self.client.incr(key, ttl=self.chord_lifetime)
        assert number is not None  # there is no bound
        return number

    def expire(self, key: bytes, value: float | None) -> None:
        """Have a key expire in `value` seconds; 0 or None: never. A counter keeps the time that it
        was made with: to store it again would lose what another process adds meanwhile."""
        if key.startswith(self.chord_keyprefix):
            return
        current = self.client.get(key)
        if current is not None:
            self.client.set(key, current, value or None)

    # ---- chords ----

    @property
    def chord_lifetime(self) -> float | None:
        """The seconds after which a chord that is not complete is forgotten; None: never."""
        return self.chord_expires or None

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Store of how many tasks the header of a chord consists."""
        Chord(self, group_id).set_size(chord_size)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a part of a chord, and start the body after the last one."""
        if request.group:
            Chord(self, request.group).returned(request)

    # ---- waiting ----

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Any = None,
    ) -> Any:
        """Wait for a task's result. Raises celery.exceptions.TimeoutError."""
        self._ensure_not_eager()
        deadline = None if timeout is None else time.monotonic() + timeout
        while (meta := self.get_task_meta(task_id))["status"] not in states.READY_STATES:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("The operation timed out.")
            self._pause([self.get_key_for_task(task_id)], interval, deadline)
            if on_interval:
                on_interval()  # before the result is looked at: it may raise a parent's error
        return meta

    def get_many(
        self,
        task_ids: Iterable[str],
        timeout: float | None = None,
        interval: float | None = 0.5,
        no_ack: bool = True,
        on_message: Any = None,
        on_interval: Any = None,
        max_iterations: int | None = None,
        READY_STATES: Any = states.READY_STATES,
    ) -> Iterator[tuple[str, Any]]:
        """Yields (id, result) of tasks as they are ready. Raises celery.exceptions.TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left = {str(task): self.get_key_for_task(task) for task in task_ids}
        for number in itertools.count():
            for task, key in list(left.items()):
                if (value := self.client.get(key)) is not None:
                    del left[task]
                    meta = self._cache[task] = self.decode_result(value)
                    if on_message is not None:
                        on_message(meta)
                    yield task, meta
            if not left or (max_iterations and number >= max_iterations):
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"Operation timed out ({timeout})")
            if on_interval:
                on_interval()
            self._pause(list(itertools.islice(left.values(), _WATCHED)), interval or 0.5, deadline)

    def _pause(self, keys: list[bytes], interval: float, deadline: float | None) -> None:
        """Wait for a result, but not longer than `interval` and not beyond the deadline."""
        nap = interval if deadline is None else min(interval, max(deadline - time.monotonic(), 0))
        if is_green():  # a wait would stop all greenlets
            time.sleep(min(nap, _GREEN_PAUSE))
        else:
            self.client.wait_any(keys, nap)


def _bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value
