"""The outcome of a task, as the value of its key in the results store.

It begins with the seal of the pool (16 secret bytes, `shmq.seal.results_seal`), or with nothing if
the pool is private. The next byte says which of them follows:

    v  the packed value that the task returned
    e  a traceback as text (its length before it, u32), and the pickled exception
    d  pid, signal and attempts of a task whose workers died, as JSON
    t  the limit in seconds, pid and attempts of a task that ran for too long, as JSON
    c  nothing: the task was cancelled before it began
    b  why the pool is broken, as text
"""

from __future__ import annotations

import hmac
import json
import pickle
import struct
import traceback
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from typing import Any, Final

from shmq import objects
from shmq.errors import NotSealed, ShmqError
from shmq.pool.calls import encode_call, encode_error, encode_refused, interactive
from shmq.pool.task_timeout import TaskTimeout
from shmq.pool.worker_died import WorkerDied

_VALUE: Final = b"v"
_ERROR: Final = b"e"
_DIED: Final = b"d"
_LATE: Final = b"t"
_CANCELLED: Final = b"c"
_BROKEN: Final = b"b"
_LENGTH: Final = struct.Struct("<I")


class Outcomes:
    """Makes and reads the outcomes of one pool."""

    __slots__ = ("_at", "_by_cloudpickle", "_value", "_writable", "cancelled", "seal")

    def __init__(self, seal: bytes, writable: bool = False) -> None:
        """seal: the secret before each outcome; b"" for a pool whose outcomes never leave memory,
        where only those who may attach can write. writable: as of `objects.unpack`."""
        self.seal = seal
        self.cancelled = seal + _CANCELLED
        """The outcome of a task that was cancelled, and the sign that it is to be."""
        self._value = seal + _VALUE
        self._writable = writable
        self._by_cloudpickle = interactive()
        self._at = len(seal)

    # ---- in the worker ----

    def value(self, result: object) -> bytes | objects.Packed:
        """The outcome of a task that returned `result`. Raises what pickling raises."""
        if self._by_cloudpickle:
            return encode_call(result, self._value)
        try:  # the shortest way for almost all
            return objects.encode(result, self._value)
        except (pickle.PicklingError, AttributeError) as exc:
            return encode_refused(result, self._value, exc)

    def error(self, raised: BaseException) -> bytes:
        """The outcome of a task that raised. An exception that cannot be pickled is replaced by the
        error that pickling it raised; the traceback keeps its text."""
        text = "".join(traceback.format_exception(raised))
        try:
            pickled = encode_error(raised)
        except Exception as exc:
            try:
                pickled = pickle.dumps(exc, pickle.HIGHEST_PROTOCOL)
            except Exception:
                pickled = pickle.dumps(pickle.PicklingError(f"{type(raised).__name__}: {raised!r}"))
        words = text.encode("utf-8", "replace")
        return b"".join((self.seal, _ERROR, _LENGTH.pack(len(words)), words, pickled))

    # ---- in the crew ----

    def died(self, pid: int | None, signal: int | None, attempts: int) -> bytes:
        """The outcome of a task whose last worker died. signal: None if it ended in another way."""
        return self.seal + _DIED + json.dumps([pid, signal, attempts]).encode()

    def late(self, seconds: float, pid: int | None, attempts: int) -> bytes:
        """The outcome of a task whose last worker was ended because it ran for too long."""
        return self.seal + _LATE + json.dumps([seconds, pid, attempts]).encode()

    def broken(self, why: str) -> bytes:
        """The outcome of every task of a pool that cannot go on."""
        return self.seal + _BROKEN + why.encode("utf-8", "replace")

    # ---- in the submitter ----

    def is_sealed(self, stored: bytes) -> bool:
        """Whether a process that may attach has stored it."""
        return not self._at or hmac.compare_digest(stored[: self._at], self.seal)

    def read(self, stored: bytes) -> tuple[Any, BaseException | None, bool]:
        """The result, the exception, and whether the task was cancelled. An object that cannot be
        unpickled here gives the exception of its unpickling; what is not sealed gives an error, and
        is not unpickled."""
        at = self._at
        if at and not hmac.compare_digest(stored[:at], self.seal):
            return None, NotSealed(_UNSEALED), False
        kind = stored[at : at + 1]
        try:
            if kind == _VALUE:
                if len(stored) < objects.LARGE:
                    return objects.unpack(stored[at + 1 :]), None, False
                return objects.unpack(stored, at + 1, writable=self._writable), None, False
            if kind == _CANCELLED:
                return None, None, True
            return None, _exception(kind, stored[at:]), False
        except BaseException as exc:  # an object may raise SystemExit, which must not end this
            return None, exc, False


_UNSEALED: Final = (
    "read the outcome of a task: it is not sealed, so no worker of the pool has stored it (or a "
    "version of shmq without seals has), and it was not unpickled; submit the task again"
)


def _exception(kind: bytes, stored: bytes) -> BaseException:
    if kind == _ERROR:
        return _raised(stored)
    if kind == _DIED:
        return WorkerDied(*json.loads(stored[1:]))
    if kind == _LATE:
        return TaskTimeout(*json.loads(stored[1:]))
    if kind == _BROKEN:
        return BrokenProcessPool(stored[1:].decode())
    return ShmqError(f"read the outcome of a task: {stored[:20]!r} is none; was it overwritten?")


def _raised(stored: bytes) -> BaseException:
    start = 1 + _LENGTH.size
    end = start + _LENGTH.unpack_from(stored, 1)[0]
    try:
        found = objects.unpack_error(memoryview(stored)[end:])
    except BaseException as exc:
        found = exc
    raised = (
        found
        if isinstance(found, BaseException)
        else ShmqError(f"read the exception of a task: it was unpickled as {found!r}")
    )
    raised.__cause__ = _RemoteTraceback(stored[start:end].decode())  # type: ignore[arg-type]
    return raised
