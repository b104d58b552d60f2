"""The bodies of tasks and outcomes.

Lambdas and local functions, which `pickle` refuses, are pickled by cloudpickle if it is installed.
So are all calls of an interactive session: its functions have no module that a worker could import,
and a worker that was forked before knows older ones.
"""

from __future__ import annotations

import functools
import pickle
import sys
from typing import Final

from shmq import objects

#: How the message of the error begins for a local function or class, before Python 3.14.
_LOCAL: Final = ("Can't pickle local object", "Can't get local object")


def encode_call(obj: object, head: bytes) -> bytes | objects.Packed:
    """The body of a call or a result. Raises what pickling raises."""
    if interactive() and (dumps := _cloudpickle()) is not None:
        return _small(objects.pack(obj, head, dumps))
    try:
        return objects.encode(obj, head)
    except (pickle.PicklingError, AttributeError) as exc:
        return encode_refused(obj, head, exc)


def encode_refused(
    obj: object, head: bytes, exc: pickle.PicklingError | AttributeError
) -> bytes | objects.Packed:
    """The body of a call or a result that `objects.encode` refused with `exc`, which is raised if
    cloudpickle is not there, or refuses too."""
    dumps = _cloudpickle()
    if dumps is None or not _is_local(exc):
        raise exc
    try:
        return _small(objects.pack(obj, head, dumps))
    except Exception:
        raise exc from None


def encode_error(raised: BaseException) -> bytes:
    """The pickle of an exception. Raises what pickling raises. An exception of a local class, and
    one of a main module that cloudpickle took to the worker, are pickled by cloudpickle."""
    try:
        return pickle.dumps(raised, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError) as exc:
        dumps = _cloudpickle()
        if dumps is None or not _is_local(exc):
            raise
        try:
            return dumps(raised, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:
            raise exc from None


def _is_local(exc: Exception) -> bool:
    """Whether pickle refused a function or a class that it cannot find by its name."""
    return isinstance(exc, pickle.PicklingError) or str(exc).startswith(_LOCAL)


def _small(packed: objects.Packed) -> bytes | objects.Packed:
    return packed.joined() if packed.size < objects.LARGE else packed


@functools.cache
def interactive() -> bool:
    """Whether the main module is a prompt or a notebook, or comes from standard input."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file is None or file.startswith("<")


@functools.cache
def _cloudpickle() -> objects.Dumps | None:
    try:
        import cloudpickle
    except ImportError:
        return None
    dumps: objects.Dumps = cloudpickle.dumps
    return dumps
