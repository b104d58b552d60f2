"""Celery's result backend: `shmq://INSTANCE`."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from celery import states
from celery.backends.base import KeyValueStoreBackend
from celery.exceptions import TimeoutError

import shmq
from shmq.arguments import LONGEST
from shmq.errors import Gone, NotRunning
from shmq.integrations.celery import attachment
from shmq.integrations.celery.chords import Chord
from shmq.integrations.celery.inbox import is_green

T = TypeVar("T")

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
#: The value of a group that is too long for one value begins with this; how many pieces it has
#: follows. They are beside its key.
_PIECES: Final = b"\0pieces "


def _expires(value: Any) -> int | None:
    """The setting result_expires in seconds, 0 for never. Raises ValueError."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        if value is None or int(value) >= 0:
            return value if value is None else min(int(value), int(LONGEST))
    raise ValueError(
        f"result_expires must be None or a number of seconds, 0 or more, not {value!r:.100}"
    )


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
        self.expires = _expires(self.prepare_expires(expires))
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

    def ensure(self, call: Callable[[shmq.Results], T], deadline: float | None = None) -> T:
        """Call with the store. If the broker was stopped, the call is made again when it runs: for
        20 s, or until the deadline of time.monotonic(). Raises as the call and as `client`."""
        return attachment.ensure(self._instance, lambda: call(self.client), deadline)

    # ---- keys ----

    def get(self, key: bytes) -> bytes | None:
        """The value of a key. A task that is not ready has its state under a key beside its own, so
        that its own is there when the result is."""
        return self.ensure(lambda client: self._get(client, key))

    def _get(self, client: shmq.Results, key: bytes) -> bytes | None:
        found = client.get(key)
        if found is None and key.startswith(self.task_keyprefix):
            return client.get(key + _UNREADY)
        if found is not None and key.startswith(self.group_keyprefix):
            pieces = [client.get(piece) for piece in _pieces(key, found)]
            if pieces:
                return None if None in pieces else b"".join(filter(None, pieces))
        return found

    def mget(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """The values of keys."""
        return [self.get(key) for key in keys]

    def set(self, key: bytes, value: Any) -> None:
        """Store a value."""
        self.ensure(lambda client: client.set(key, _bytes(value), self.expires or None))

    def _set_with_state(self, key: bytes, value: Any, state: str) -> None:
        if key.startswith(self.group_keyprefix):
            self._set_group(key, _bytes(value))
        elif state in states.READY_STATES:
            if state == states.SUCCESS:
                self.set(key, value)
            else:
                self.ensure(lambda client: self._set_failure(client, key, _bytes(value)))
            self.ensure(lambda client: client.delete(key + _UNREADY))
        else:
            self.set(key + _UNREADY, value)
            # A run sends its task again before it says so, and the next may have failed by then.
            if state != states.RETRY:
                self.ensure(lambda client: self._unfinish(client, key))

    # A task may have several runs at a time: its worker died, or it was sent again by a retry. The
    # process of one of them may be stopped after Celery has seen that there is no success yet.

    def _set_failure(self, client: shmq.Results, key: bytes, value: bytes) -> None:
        """Store a failure, unless another run had success meanwhile."""
        ttl = self.expires or None
        if not client.add(key, value, ttl) and not self._is_success(client.get(key)):
            client.set(key, value, ttl)

    def _unfinish(self, client: shmq.Results, key: bytes) -> None:
        """A task begins: it has no result any more, unless that is a success, which another run had
        meanwhile."""
        found = client.get(key)
        if found is not None and not self._is_success(found):
            client.delete(key, found)

    def _is_success(self, value: bytes | None) -> bool:
        return value is not None and self.decode_result(value)["status"] == states.SUCCESS

    def _set_group(self, key: bytes, value: bytes) -> None:
        """Store a group: 56 bytes for each part, so that one of many parts needs several keys."""
        self.ensure(lambda client: client)
        assert self._handle is not None
        most = self._handle[0].limits["max_msg_size"]
        if len(value) > most:
            parts = [value[at : at + most] for at in range(0, len(value), most)]
            value = _PIECES + b"%d" % len(parts)
            for piece, part in zip(_pieces(key, value), parts, strict=True):
                self.set(piece, part)
        self.set(key, value)  # last: what it names is there

    def delete(self, key: bytes) -> None:
        """Delete a key."""
        self.ensure(lambda client: self._delete(client, key))

    def _delete(self, client: shmq.Results, key: bytes) -> None:
        more = [key + _UNREADY] if key.startswith(self.task_keyprefix) else []
        if key.startswith(self.group_keyprefix):
            more = _pieces(key, client.get(key, b""))
        for each in (key, *more):
            client.delete(each)

    def incr(self, key: bytes) -> int:
        """Add one to a counter. Returns the new number."""
        number = self.ensure(lambda client: client.incr(key, ttl=self.chord_lifetime))
        assert number is not None  # there is no bound
        return number

    def expire(self, key: bytes, value: float | None) -> None:
        """Have a key expire in `value` seconds; 0 or None: never. A counter keeps the time that it
        was made with: to store it again would lose what another process adds meanwhile."""
        if key.startswith(self.chord_keyprefix):
            return
        current = self.ensure(lambda client: client.get(key))
        if current is not None:
            self.ensure(lambda client: client.set(key, current, value or None))

    # ---- chords ----

    @property
    def chord_lifetime(self) -> float | None:
        """The seconds after which a chord that is not complete is forgotten; None: never."""
        return self.chord_expires or None

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        """Store of how many tasks the header of a chord consists."""
        self.ensure(lambda client: Chord(self, group_id).set_size(chord_size))

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        """Count a part of a chord, and start the body after the last one."""
        if request.group:
            self.ensure(lambda client: Chord(self, request.group).returned(request))

    # ---- waiting ----

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Any = None,
    ) -> Any:
        """Wait for a task's result, also over a stop and a start of the broker. Raises
        celery.exceptions.TimeoutError."""
        self._ensure_not_eager()
        deadline = None if timeout is None else time.monotonic() + timeout
        key = self.get_key_for_task(task_id)
        while True:
            self._look(key, deadline)  # what follows does not know the deadline
            meta = self.get_task_meta(task_id)
            if meta["status"] in states.READY_STATES:
                return meta
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("The operation timed out.")
            self._pause([key], interval, deadline)
            if on_interval:
                on_interval()  # before the result is looked at: it may raise a parent's error

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
                if (value := self._look(key, deadline)) is not None:
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
            with _in_time(deadline):
                self.ensure(lambda client: client.wait_any(keys, nap), deadline)

    def _look(self, key: bytes, deadline: float | None) -> bytes | None:
        with _in_time(deadline):
            return self.ensure(lambda client: client.get(key), deadline)


@contextlib.contextmanager
def _in_time(deadline: float | None) -> Iterator[None]:
    """Raise celery.exceptions.TimeoutError if there is no broker and the deadline is over."""
    try:
        yield
    except (Gone, NotRunning) as exc:
        if deadline is not None and time.monotonic() >= deadline:
            raise TimeoutError(f"The operation timed out: {exc}") from exc
        raise


def _bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _pieces(key: bytes, value: bytes) -> list[bytes]:
    """The keys of the pieces that this value of a group names."""
    if not value.startswith(_PIECES):
        return []
    return [b"%s.%d" % (key, number) for number in range(int(value[len(_PIECES) :]))]
