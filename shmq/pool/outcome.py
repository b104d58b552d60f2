"""The outcome of a task, as the value of its key in the results store.

The first byte says which of them follows:

    v  the packed value that the task returned
    e  a traceback as text (its length before it, u32), and the pickled exception
    d  pid, signal and attempts of a task whose workers died, as JSON
    c  nothing: the task was cancelled before it began
    b  why the pool is broken, as text
"""

from __future__ import annotations

import json
import pickle
import struct
import traceback
from concurrent.futures.process import BrokenProcessPool, _RemoteTraceback
from typing import Any, Final

from shmq import objects
from shmq.errors import ShmqError
from shmq.pool.worker_died import WorkerDied

CANCELLED: Final = b"c"

_VALUE: Final = b"v"
_ERROR: Final = b"e"
_DIED: Final = b"d"
_BROKEN: Final = b"b"
_LENGTH: Final = struct.Struct("<I")


# ---- in the worker ----


def value(result: object) -> bytes | objects.Packed:
    """The outcome of a task that returned `result`. Raises what pickling raises."""
    return objects.encode(result, _VALUE)


def error(raised: BaseException) -> bytes:
    """The outcome of a task that raised. An exception that cannot be pickled is replaced by the
    error that pickling it raised; the traceback keeps its text."""
    text = "".join(traceback.format_exception(raised))
    try:
        pickled = pickle.dumps(raised, pickle.HIGHEST_PROTOCOL)
    except Exception as exc:
        try:
            pickled = pickle.dumps(exc, pickle.HIGHEST_PROTOCOL)
        except Exception:
            pickled = pickle.dumps(pickle.PicklingError(f"{type(raised).__name__}: {raised!r}"))
    words = text.encode("utf-8", "replace")
    return b"".join((_ERROR, _LENGTH.pack(len(words)), words, pickled))


# ---- in the crew ----


def died(pid: int | None, signal: int | None, attempts: int) -> bytes:
    """The outcome of a task whose last worker died. signal: None if it ended in another way."""
    return _DIED + json.dumps([pid, signal, attempts]).encode()


def broken(why: str) -> bytes:
    """The outcome of every task of a pool that cannot go on."""
    return _BROKEN + why.encode("utf-8", "replace")


# ---- in the submitter ----


def read(stored: bytes) -> tuple[Any, BaseException | None]:
    """The result and the exception, one of which is None, of a task that was not cancelled. An
    object that cannot be unpickled here gives the exception of its unpickling."""
    kind = stored[:1]
    try:
        if kind == _VALUE:
            small = len(stored) < objects.LARGE
            return (objects.unpack(stored[1:]) if small else objects.unpack(stored, 1)), None
        return None, _exception(kind, stored)
    except BaseException as exc:  # an object may raise SystemExit, which must not end this thread
        return None, exc


def _exception(kind: bytes, stored: bytes) -> BaseException:
    if kind == _ERROR:
        return _raised(stored)
    if kind == _DIED:
        return WorkerDied(*json.loads(stored[1:]))
    if kind == _BROKEN:
        return BrokenProcessPool(stored[1:].decode())
    return ShmqError(f"read the outcome of a task: {stored[:20]!r} is none; was it overwritten?")


def _raised(stored: bytes) -> BaseException:
    start = 1 + _LENGTH.size
    end = start + _LENGTH.unpack_from(stored, 1)[0]
    try:
        found = pickle.loads(memoryview(stored)[end:])
    except BaseException as exc:
        found = exc
    raised = (
        found
        if isinstance(found, BaseException)
        else ShmqError(f"read the exception of a task: it was unpickled as {found!r}")
    )
    raised.__cause__ = _RemoteTraceback(stored[start:end].decode())  # type: ignore[arg-type]
    return raised
