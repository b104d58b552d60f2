"""Chords: the parts of a header are counted, and the last one starts the body.

Keys of a chord, all with the chord's time to live, beside its header under the group's key:

    chord-unlock-GROUP          how many parts have returned
    chord-unlock-GROUP.size     how many there are, tasks of groups in groups included
    chord-unlock-GROUP.TASK     this part was counted
    chord-unlock-GROUP.claim    the part that starts the body; `done` when it is started

A part that is run again after a death counts once. If the death was between count and mark, it
counts twice: so the number alone does not start the body, all parts must be ready too. The part
that starts it may die before it has: if it is run again, it goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Protocol

from celery.canvas import maybe_signature
from celery.exceptions import ChordError
from celery.result import GroupResult, allow_join_result
from celery.utils.log import get_logger

import shmq
from shmq.errors import Gone, NotRunning

_log = get_logger(__name__)

_SIZE: Final = ".size"
_CLAIM: Final = ".claim"
_DONE: Final = b"done"
#: How long a part that died may have had the claim, before another part takes it.
_CLAIM_SECONDS: Final = 10.0


class Backend(Protocol):
    """The part of the result backend that a chord uses."""

    app: Any

    @property
    def client(self) -> shmq.Results:
        """The results store."""

    @property
    def chord_lifetime(self) -> float | None:
        """The seconds after which a chord that is not complete is forgotten; None: never."""

    def get_key_for_chord(self, group_id: str, key: str = "") -> bytes:
        """The key of a chord's count; `key` follows it."""

    def chord_error_from_stack(self, callback: Any, exc: Exception) -> Any:
        """Call the errbacks of a body."""


class Chord:
    """One chord, as a part of it that has returned sees it."""

    def __init__(self, backend: Backend, group: str) -> None:
        self._backend = backend
        self._group = group

    def set_size(self, size: int) -> None:
        """Store how many parts there are. The last of them begins after this."""
        store, lifetime = self._backend.client, self._backend.chord_lifetime
        store.delete(self._key(_CLAIM))  # a frozen chord that runs again
        store.set(self._key(_SIZE), b"%d" % size, lifetime)

    def returned(self, request: Any) -> None:
        """A part has returned and its result is stored: count it, and start the body if it was the
        last one."""
        store = self._backend.client
        if store.get(self._key(_CLAIM)) == _DONE:
            return
        self._count(request.id)
        size = store.get(self._key(_SIZE))
        if size is None or int(store.get(self._key(), b"0")) < int(size):
            return
        header = GroupResult.restore(self._group, backend=self._backend)
        if header is not None and not header.ready():
            return  # a part was counted twice; the last one looks again
        if self._claims(request.id.encode()):
            self._start(request, header)

    def _count(self, task: str) -> None:
        store, lifetime = self._backend.client, self._backend.chord_lifetime
        mark = self._key(f".{task}")
        if store.get(mark) is None:
            store.incr(self._key(), ttl=lifetime)
            store.set(mark, b"", lifetime)

    def _claims(self, task: bytes) -> bool:
        store, claim = self._backend.client, self._key(_CLAIM)
        return store.add(claim, task, _CLAIM_SECONDS) or store.get(claim) == task

    def _start(self, request: Any, header: Any) -> None:
        """Send the body, or its errback the first failure of a part."""
        backend, app = self._backend, self._backend.app
        body = maybe_signature(request.chord, app=app)
        try:
            if header is None:
                raise ChordError(f"GroupResult {self._group} no longer exists")
            with allow_join_result():
                results = header.join_native(
                    timeout=app.conf.result_chord_join_timeout, propagate=True
                )
            app.amqp._retry_publish(body.delay, results)
        except (Gone, NotRunning):
            raise  # the broker was stopped: this part goes on when it is back
        except Exception as exc:
            _log.exception("chord %r: its body was not started", self._group)
            error = exc if isinstance(exc, ChordError) else ChordError(_reason(header, exc))
            error.__cause__ = exc if error is not exc else None
            backend.chord_error_from_stack(callback=body, exc=error)
        self._forget(header)

    def _forget(self, header: Any) -> None:
        store, lifetime = self._backend.client, self._backend.chord_lifetime
        store.set(self._key(_CLAIM), _DONE, lifetime)
        store.delete(self._key())
        store.delete(self._key(_SIZE))
        if header is not None:
            for task in _parts(header):
                store.delete(self._key(f".{task}"))
            header.delete()

    def _key(self, rest: str = "") -> bytes:
        key: bytes = self._backend.get_key_for_chord(self._group, rest)
        return key


def _parts(header: Any) -> Iterator[str]:
    """Yields the ids of all tasks of a header."""
    for result in header.results:
        if isinstance(result, GroupResult):
            yield from _parts(result)
        else:
            yield result.id


def _reason(header: Any, exc: Exception) -> str:
    """The text of Celery's other backends for a part that failed."""
    culprit = next(header._failed_join_report(), None) if header is not None else None
    return repr(exc) if culprit is None else f"Dependency {culprit.id} raised {exc!r}"
