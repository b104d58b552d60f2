"""The structures that layout.h declares, for numpy: dtypes, numbers and the fields of state words.

Everything comes from the tables that the extension exports; nothing is written down twice. numpy
is imported by the functions that need it: a process that only publishes and takes never loads it.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from shmq import _native

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

_CONSTANTS: Final = _native.CONSTANTS


def constant(name: str) -> int:
    """A SHMQ_ number of layout.h or shmq.h, by its name there without `SHMQ_`."""
    return _CONSTANTS[name]


def number_in(segment: memoryview, structure: str, *names: str) -> int:
    """The whole number in a structure at the start of a segment, read without numpy. names: of the
    field, after those of the structures that it is in."""
    at, kind, size = 0, structure, 0
    for name in names:
        kind, offset, size, _ = _native.LAYOUT[kind][name]
        at += offset
    return int.from_bytes(segment[at : at + size], "little", signed="i" in kind)


_LOCK_HOLDER: Final = constant("LOCK_HOLDER")
_TID_MASK: Final = 0x3FFFFFFF  # the kernel's FUTEX_TID_MASK


def lock_holder(mutex: Any) -> int:
    """The id of the thread that holds a robust mutex, from its bytes; 0 if none does."""
    word = bytes(mutex)[_LOCK_HOLDER : _LOCK_HOLDER + 4]
    return int.from_bytes(word, "little") & _TID_MASK


MAGIC: Final = constant("MAGIC")
NONE: Final = constant("NONE")
FLAG_EPHEMERAL: Final = constant("FLAG_EPHEMERAL")

LAYOUT_VERSION: Final = _native.LAYOUT_VERSION
VERSION: Final = _native.__version__

#: Fingerprint of this build: segments with another one are refused.
FINGERPRINT: Final = _native.fingerprint()


class State(enum.IntEnum):
    """State of a slot: the low byte of its state word. docs/protocol.md has the table."""

    FREE = constant("FREE")
    LOANED = constant("LOANED")
    PREPARED = constant("PREPARED")
    READY = constant("READY")
    IN_FLIGHT = constant("IN_FLIGHT")
    PINNED = constant("PINNED")
    DEFERRED = constant("DEFERRED")
    REQUEUED = constant("REQUEUED")
    SPILLING = constant("SPILLING")
    RESTORED = constant("RESTORED")
    MOVING = constant("MOVING")
    LEASED = constant("LEASED")


class Role(enum.IntEnum):
    """Role of a queue: a topic's backlog or a channel."""

    BACKLOG = constant("ROLE_BACKLOG")
    CHANNEL = constant("ROLE_CHANNEL")


class ClientKind(enum.IntEnum):
    """Kind of a client: the role of an attached process."""

    CLIENT = constant("AS_CLIENT")
    SUPERVISOR = constant("AS_SUPERVISOR")
    GATEWAY = constant("AS_GATEWAY")


class ClientState(enum.IntEnum):
    """State of a client entry."""

    FREE = constant("CLIENT_FREE")
    LIVE = constant("CLIENT_LIVE")


class EntryState(enum.IntEnum):
    """State of a topic's or a queue's entry."""

    FREE = constant("ENTRY_FREE")
    LIVE = constant("ENTRY_LIVE")
    DELETING = constant("ENTRY_DELETING")
    ERASING = constant("ENTRY_ERASING")
    """Its files go, too."""


class Ready(enum.IntEnum):
    """State of a segment: being created, in use, closed for good."""

    RAW = constant("RAW_STATE")
    READY = constant("READY_STATE")
    CLOSED = constant("CLOSED_STATE")


class SpillSource(enum.IntEnum):
    """The messages that a spill writes, and where (shmq_supervisor.h has the table)."""

    READY = constant("SPILL_READY")
    ALL = constant("SPILL_ALL")
    PREPEND_FLUSH = constant("SPILL_PREPEND_FLUSH")
    PREPEND = constant("SPILL_PREPEND")
    REQUEUED = constant("SPILL_REQUEUED")
    DELIVERED = constant("SPILL_DELIVERED")


class Ring(enum.IntFlag):
    """Reasons for which the supervisor's doorbell is rung."""

    REQUEST = constant("RING_REQUEST")
    SPILLER = constant("RING_SPILLER")
    LEFT = constant("RING_LEFT")
    CHANGED = constant("RING_CHANGED")
    DEADLINE = constant("RING_DEADLINE")


class SegmentKind(enum.IntEnum):
    """Kind of a segment: the directory, a queue, a results store."""

    DIRECTORY = constant("SEGMENT_DIRECTORY")
    QUEUE = constant("SEGMENT_QUEUE")
    STORE = constant("SEGMENT_STORE")


# ---- dtypes ----

_dtypes: dict[str, np.dtype[Any]] = {}


def dtype(structure: str) -> np.dtype[Any]:
    """The numpy type of a structure of layout.h, by its name there without `shmq_` and `_desc`."""
    made = _dtypes.get(structure)
    if made is None:
        import numpy as np

        names, formats, offsets = [], [], []
        for name, (kind, offset, _size, count) in _native.LAYOUT[structure].items():
            item: Any = dtype(kind) if kind in _native.LAYOUT else np.dtype(kind)
            names.append(name)
            formats.append(item if count == 1 else (item, (count,)))
            offsets.append(offset)
        size = _native.SIZES[structure]
        made = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})
        _dtypes[structure] = made
    return made


def has_pages(segment: Any, at: int, nbytes: int) -> bool:
    """Returns True if this part of a mapped segment can be read. Pages that are missing are
    allocated if there is room."""
    return _native.has_pages(segment, at, nbytes)


def state(words: Any) -> Any:
    """The states in state words (one word or a column)."""
    import numpy as np

    return words & np.uint64(0xFF)


def owner(words: Any) -> Any:
    """The client indices in state words."""
    import numpy as np

    return (words >> np.uint64(8)) & np.uint64(0xFFFF)


def generation(words: Any) -> Any:
    """The generations in state words: how often each slot was taken."""
    import numpy as np

    return words >> np.uint64(24)


def text(raw: Any) -> str:
    """A name field as text."""
    return bytes(raw).rstrip(b"\0").decode("ascii", "replace")


def names(column: Array) -> list[str]:
    """A column of name fields as text."""
    return [text(raw) for raw in column.tolist()]
