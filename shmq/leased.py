"""Leases and the messages read from them, as every client has them: in shared memory and over the
network. Nothing here needs the extension or numpy."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shmq.errors import ShmqError, Unreachable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Default number of messages, and of bytes of bodies, of one batch that is read.
READ_ROWS: Final = 16_384
READ_BYTES: Final = 4 << 20


#: Characters of a secret.
_SECRET: Final = (16, 200)


def checked_secret(secret: str) -> str:
    """The secret. Raises TypeError if it is no text, and ValueError unless it has 16 to 200
    printable characters."""
    if not isinstance(secret, str):
        raise TypeError(f"secret must be str, not {type(secret).__name__}")
    if not (_SECRET[0] <= len(secret) <= _SECRET[1] and secret.isprintable()):
        raise ValueError(
            f"secret must have {_SECRET[0]} to {_SECRET[1]} printable characters, and this one has "
            f"{len(secret)}: take `python3 -c 'import secrets; print(secrets.token_hex())'`"
        )
    return secret


def proof_of(secret: str) -> tuple[int, int]:
    """The hash that a broker keeps of the secret of a lease holder's name, 128 bits and not 0.
    Raises ValueError as `checked_secret`."""
    data = checked_secret(secret).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=16, person=b"shmq lease name").digest()
    return int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:], "little")


@dataclass(frozen=True)
class Lease:
    """A lease: messages that a holder holds under its name."""

    id: int
    """Number of the lease; rises within a channel."""
    parent: int
    """The lease that its holder named as the one before it; 0: none."""
    count: int
    """Number of its messages."""
    bytes: int
    """Bytes of their bodies."""
    parts: int
    """Number of parts. The split is stable: rereading a part yields the same rows. Within a part
    the rows in memory precede those on disk."""
    replays: int
    """How often it was asked for with `look(replay=True)`."""
    on_disk: int
    """Those of `count` that are leased where they are on disk."""


class LeasedBatch:
    """Messages read from a lease. They are copies, which stay valid after the lease has ended.
    `len(batch)` is their number; the arrays below have one element per message, `offsets` one
    more. Without numpy they are memoryviews of the same numbers."""

    __slots__ = ("_attempts", "_blocks", "_count", "_data", "_ids", "_offsets", "_timestamps")

    def __init__(
        self,
        count: int,
        ids: bytes,
        timestamps: bytes,
        attempts: bytes,
        offsets: bytes,
        data: bytes,
        blocks: tuple[bytes, bytes] | None = None,
    ) -> None:
        """blocks: offsets (int32) and bytes of the messages' properties; None: not read."""
        self._count = count
        self._blocks = blocks
        self._ids, self._timestamps, self._attempts = ids, timestamps, attempts
        self._offsets, self._data = offsets, data

    def __len__(self) -> int:
        return self._count

    @property
    def ids(self) -> npt.NDArray[np.uint64]:
        """Ids as numbers, uint64: `Message.id` is `f"{id:016x}"`."""
        found: npt.NDArray[np.uint64] = _array(self._ids, "Q", "uint64")
        return found

    @property
    def timestamps(self) -> npt.NDArray[np.int64]:
        """Publish times, int64, ns since 1970."""
        found: npt.NDArray[np.int64] = _array(self._timestamps, "q", "int64")
        return found

    @property
    def attempts(self) -> npt.NDArray[np.int32]:
        """Deliveries so far, int32; a lease counts as one, however often it is read."""
        found: npt.NDArray[np.int32] = _array(self._attempts, "i", "int32")
        return found

    @property
    def offsets(self) -> npt.NDArray[np.int32]:
        """Where the bodies begin and end, int32: body i is data[offsets[i]:offsets[i + 1]]."""
        found: npt.NDArray[np.int32] = _array(self._offsets, "i", "int32")
        return found

    @property
    def data(self) -> bytes:
        """All bodies, one after the other."""
        return self._data

    @property
    def properties(self) -> list[Mapping[str, bytes]]:
        """The properties of each message, read-only mappings of names to bytes. Raises ValueError
        if the lease was read without `properties=True`."""
        return [self._unpacked(block) for block in self.blocks()]

    @staticmethod
    def _unpacked(block: bytes) -> Mapping[str, bytes]:
        raise NotImplementedError

    @property
    def has_properties(self) -> bool:
        """Whether any of the messages has properties, for the rest of the package. False if they
        were not read."""
        return self._blocks is not None and len(self._blocks[1]) > 0

    def columns(
        self,
    ) -> tuple[bytes, bytes, bytes, bytes, bytes, tuple[bytes, bytes] | None]:
        """The bytes of the columns, for the rest of the package: ids, timestamps, attempts,
        offsets, data, and the offsets and blocks of the properties."""
        blocks = self._blocks
        return self._ids, self._timestamps, self._attempts, self._offsets, self._data, blocks

    def blocks(self) -> list[bytes]:
        """The properties of each message as the core stores them. Raises as `properties`."""
        if self._blocks is None:
            raise ValueError("the properties were not read: give read_lease properties=True")
        offsets, data = self._blocks
        ends = memoryview(offsets).cast("i").tolist()
        return [bytes(data[ends[i] : ends[i + 1]]) for i in range(self._count)]

    def bodies(self) -> list[bytes]:
        """The bodies, each as bytes."""
        ends = memoryview(self._offsets).cast("i").tolist()
        data = self.data
        return [data[ends[i] : ends[i + 1]] for i in range(self._count)]


def _array(column: bytes, letter: str, name: str) -> Any:
    try:
        import numpy as np
    except ImportError:
        return memoryview(column).cast(letter)  # type: ignore[call-overload]
    return np.frombuffer(column, name)


def keep_alive(
    touch: weakref.WeakMethod[Callable[[], None]], closed: threading.Event, period: float
) -> None:
    """Give the signs of life of a holder, in a thread of its own, until it is closed or nobody has
    it any more. period: seconds."""
    while not closed.wait(period):
        call = touch()
        if call is None:
            return
        try:
            call()
        except Unreachable:
            continue  # the ttl has the last word
        except ShmqError:  # fenced or gone: the holder's next call raises it
            return
        finally:
            del call
