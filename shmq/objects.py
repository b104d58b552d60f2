"""Python objects as the bodies of messages, by pickle protocol 5.

A body is a head of the caller's (it may be empty) and an object. Small objects are their pickle and
nothing else. If the object has buffers of `LARGE` bytes or more (numpy arrays, Arrow tables), they
stand behind the pickle and are written once; `unpack` gives views of them:

    magic "shmO" | number of buffers u32 | bytes of the pickle u64
    for each buffer: its place after the head u64 | its bytes u64
    the pickle | zeros | the first buffer | zeros | the second ...

Each buffer begins at a multiple of 64 bytes of the body. All numbers are little-endian.

To unpack a body is to run code that its writer chose, as always with pickle. So this is the only
module that unpickles, and it is given only what is sealed: what a process has written that may
attach to the instance. Those belong to one user or group that trust each other.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np

from shmq.errors import BadObject, NotSealed

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: A buffer of at least this many bytes stands outside the pickle and is written once.
LARGE: Final = 65536

_ALIGNED: Final = 64
_MAGIC: Final = b"shmO"
_HEAD: Final = struct.Struct("<4sIQ")
_PLACE: Final = struct.Struct("<QQ")
_PROTOCOL: Final = 5
#: The first byte of every pickle of protocol 2 and later, and the last one of every pickle.
_PROTO: Final = b"\x80"
_STOP: Final = b"."
#: Unpickles a body of `Consumer.take_body`, which returns no bytes that are not sealed.
loads_sealed: Final = pickle.loads

#: Options of `Producer.publish` that a loan has as well.
_LOANED: Final = frozenset({"defer", "properties"})

#: A pickler that wrote more than this is not used again: to clear its memo would cost more.
_REUSED: Final = 4096

#: Called as `pickle.dumps` and `cloudpickle.dumps` are: (object, protocol=, buffer_callback=).
Dumps = Callable[..., bytes]


class Publisher(Protocol):
    """The methods of a Producer that `publish` needs."""

    @property
    def publish(self) -> Callable[..., str]:
        """Publish one body. Returns its id."""

    @property
    def loan(self) -> Callable[..., Any]:
        """A body that is written in place."""


class Received(Protocol):
    """The parts of a Message that `unseal` needs."""

    @property
    def sealed(self) -> bool:
        """Whether a process that may attach has put it."""

    @property
    def body(self) -> bytes:
        """Its body."""

    @property
    def view(self) -> memoryview:
        """Its body in shared memory."""

    def __len__(self) -> int:
        """Bytes of its body."""


class Packed:
    """An object as a body: its size is known, and its bytes can be written where they belong."""

    __slots__ = ("_buffers", "_pieces", "size")

    def __init__(self, head: bytes, pickled: list[Any], buffers: list[memoryview]) -> None:
        """pickled: the parts of the pickle. buffers: those outside the pickle."""
        self._pieces = [head, *pickled]
        self._buffers: list[tuple[int, memoryview]] = []
        self.size = len(head) + sum(map(len, pickled))
        """Bytes of the body."""
        if buffers:
            self._place(len(head), buffers)

    def _place(self, start: int, buffers: list[memoryview]) -> None:
        """Put the table before the pickle, and the buffers at their places behind it."""
        length = self.size - start
        at = self.size + _HEAD.size + _PLACE.size * len(buffers)
        table = [_HEAD.pack(_MAGIC, len(buffers), length)]
        for buffer in buffers:
            at += -at % _ALIGNED
            table.append(_PLACE.pack(at - start, buffer.nbytes))
            self._buffers.append((at, buffer))
            at += buffer.nbytes
        self._pieces[1:1] = table
        self.size = at

    def write(self, buffer: Buffer) -> None:
        """Write the body to the start of a buffer of at least `size` bytes. Raises ValueError if it
        is smaller or read-only."""
        out = np.frombuffer(memoryview(buffer), np.uint8)
        if len(out) < self.size:
            raise ValueError(f"write {self.size} bytes to a buffer of {len(out)}: it is too small")
        at = 0
        for piece in self._pieces:
            out[at : at + len(piece)] = np.frombuffer(piece, np.uint8) if len(piece) else 0
            at += len(piece)
        for start, large in self._buffers:
            out[at:start] = 0
            at = start + large.nbytes
            out[start:at] = np.frombuffer(large, np.uint8)

    def joined(self) -> bytes:
        """The body as bytes."""
        if not self._buffers:
            return b"".join(self._pieces)
        body = bytearray(self.size)
        self.write(body)
        return bytes(body)


# ---- to bytes ----


class _Parts(list[Any]):
    """The file of a pickler: a list of what it writes."""

    __slots__ = ()
    write = list.append


class _Reducers(dict[Any, Any]):
    """The reducers of `multiprocessing` (connections, sockets, those that other packages add) and
    of `copyreg`. It is always empty, so that one that is registered later is found too."""

    __slots__ = ()

    def __missing__(self, kind: type) -> Any:
        found = _special.get(kind) or copyreg.dispatch_table.get(kind)
        if found is None:
            raise KeyError(kind)
        return found


_special: Final[dict[Any, Any]] = cast(Any, ForkingPickler)._extra_reducers
_reducers: Final = _Reducers()

#: `dump` and `clear_memo` of a pickler, and the lists that it fills.
Pickling = tuple[Callable[[object], None], Callable[[], None], list[Any], list[memoryview]]
#: Those that no thread uses now. `pop` and `append` are atomic, so each is used by one thread, and
#: not by an object that packs another while it is pickled. `Producer.publish_object` takes from it.
spare: Final[list[Pickling]] = []


def pickling() -> Pickling:
    """A new one."""
    parts, buffers = _Parts(), cast("list[memoryview]", [])
    keep: Any = _keeper(buffers)
    pickler = pickle.Pickler(cast(Any, parts), _PROTOCOL, buffer_callback=keep)
    pickler.dispatch_table = _reducers
    return pickler.dump, pickler.clear_memo, parts, buffers


def _keeper(buffers: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """A function for a pickler that keeps large buffers in the list, and the others in the
    pickle."""

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    return in_band


def encode(obj: object, head: bytes = b"") -> bytes | Packed:
    """The body of an object as `pack` makes it, for callers that pack very often: bytes if it is
    small, or else a Packed. Raises what pickling raises."""
    try:
        ours = spare.pop()
    except IndexError:
        ours = pickling()
    dump, clear, parts, buffers = ours
    dump(obj)
    if len(parts) == 1 and not buffers:
        body: bytes = parts.pop()
        if len(body) <= _REUSED:
            clear()
            spare.append(ours)
            return head + body if head else body
        parts.append(body)
    return Packed(head, parts, buffers)


def pack(obj: object, head: bytes = b"", dumps: Dumps | None = None) -> Packed:
    """Pickle an object as a body.

    head: bytes before it, which `unpack` passes over with `offset`. dumps: None for the pickler of
    `multiprocessing`, which also knows connections and sockets; or a function that is called as
    `pickle.dumps` is, for example `cloudpickle.dumps`. Raises what pickling raises.
    """
    if dumps is None:
        body = encode(obj, head)
        return Packed(b"", [body], []) if isinstance(body, bytes) else body
    buffers: list[memoryview] = []
    pickled = dumps(obj, protocol=_PROTOCOL, buffer_callback=_keeper(buffers))
    return Packed(head, [pickled], buffers)


def publish(
    producer: Publisher, packed: Packed, timeout: float | None = None, **options: Any
) -> str:
    """Publish a packed object; a large one is written once, in shared memory. Returns the id of the
    message.

    timeout: seconds to wait for room; None: for ever. options: as of `Producer.publish`. Raises
    what `Producer.publish` raises.
    """
    if packed.size < LARGE or not options.keys() <= _LOANED:
        return producer.publish(packed.joined(), timeout=timeout, **options)
    loan = producer.loan(packed.size, timeout=timeout, zero=False, **options)
    with loan as buffer:
        packed.write(buffer)
    return str(loan.id)


# ---- from bytes ----


def unseal(
    message: Received,
    offset: int = 0,
    view: memoryview | None = None,
    *,
    writable: bool = False,
) -> Any:
    """The object in a message. offset: the length of the head. view: its body, if the message was
    finished after that was asked for. writable: as of `unpack`. Raises NotSealed, without a look at
    the body, if no process that may attach has put it; otherwise as `unpack`."""
    if not message.sealed:
        raise NotSealed(f"unpickle {message!r}: it is not sealed, so it may be anybody's")
    if view is None and len(message) < LARGE:
        return unpack(message.body[offset:])
    return unpack(message.view if view is None else view, offset, writable=writable)


def unpack_nested(pickled: Buffer, buffers: Iterable[Any]) -> Any:
    """The object in a pickle that is part of an object which is being unpacked; for reducers."""
    return pickle.loads(pickled, buffers=buffers)


def unpack_error(pickled: Buffer) -> Any:
    """The exception in an outcome whose seal was checked."""
    return pickle.loads(pickled)


def unpack(body: Buffer, offset: int = 0, *, writable: bool = False) -> Any:
    """The object in a body that `pack` made and whose seal was checked.

    body: bytes, or a `Message.view`, which stays valid after the message is finished. The large
    buffers of the object are read-only views of it, and keep it alive. offset: the length of the
    head. writable: the large buffers are copies instead, which may be changed. Raises BadObject if
    the body is not a packed object, and what the classes of the object
    raise while they are unpickled (for example ImportError).
    """
    pickled: Buffer
    if offset == 0 and type(body) is bytes and body[:1] == _PROTO and body[-1:] == _STOP:
        pickled, buffers = body, None
    else:
        pickled, buffers = _split(memoryview(body).cast("B").toreadonly()[offset:])
    given: Iterable[Any] | None = buffers
    if writable and buffers is not None:
        given = map(bytearray, buffers)
    try:
        return pickle.loads(pickled, buffers=given)
    except (pickle.UnpicklingError, EOFError) as exc:
        if exc.__traceback__ is not None and exc.__traceback__.tb_next is not None:
            raise  # a function of the object's raised it, so the pickle was read
        raise _bad(memoryview(body).nbytes, f"its pickle is broken: {exc}") from exc


def _split(payload: memoryview) -> tuple[memoryview, list[memoryview] | None]:
    """The pickle and the buffers of an object. Raises BadObject."""
    pickled, buffers = payload, None
    if bytes(payload[:4]) == _MAGIC:
        pickled, buffers = _split_large(payload)
    if bytes(pickled[:1]) != _PROTO or bytes(pickled[-1:]) != _STOP:
        raise _bad(len(payload), "it has neither the start nor the end of a pickle")
    return pickled, buffers


def _split_large(payload: memoryview) -> tuple[memoryview, list[memoryview]]:
    whole = len(payload)
    if whole < _HEAD.size:
        raise _bad(whole, "its table is cut short")
    _, count, length = _HEAD.unpack_from(payload)
    start = _HEAD.size + count * _PLACE.size
    if start + length > whole:
        raise _bad(whole, "its table or its pickle is cut short")
    buffers: list[memoryview] = []
    for at, size in _PLACE.iter_unpack(payload[_HEAD.size : start]):
        if at < start + length or at + size > whole:
            raise _bad(whole, "a buffer of it is cut short")
        buffers.append(payload[at : at + size])
    return payload[start : start + length], buffers


def _bad(length: int, why: str) -> BadObject:
    return BadObject(
        f"unpack an object from {length} bytes: they were not written by shmq.objects, or "
        f"overwritten since ({why}); read them as bytes"
    )
