"""The extension's contract: what a Python reader reads instead of the C.

Thin over native/include/shmq.h, which says what each call does, what it may raise and what a death
inside leaves. Every call first only tries the locks with the GIL held; if one is held elsewhere it
releases the GIL and waits in slices, so Ctrl-C and other threads live on. Waiting for messages,
room or the supervisor happens without the GIL, in slices of at most 250 ms.

Times are nanoseconds here and seconds in the public classes built on top.
"""

import builtins
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, Self, TypeAlias, final, overload

import numpy.typing as npt
from typing_extensions import Buffer  # type checkers know it without the package

__version__: str
LAYOUT_VERSION: int
KILLPOINTS: bool
#: {structure: {field: (numpy dtype, offset, size of one, count)}}
LAYOUT: dict[str, dict[str, tuple[str, int, int, int]]]
#: {structure: size in bytes}
SIZES: dict[str, int]
#: SHMQ_... numbers: states, table sizes, ("FREE": 0, "CLIENTS": 1024, ...); see module.c
CONSTANTS: dict[str, int]
#: {status name: (number, exception name, sentence)}
STATUS: dict[str, tuple[int, str, str]]

#: Anything with a contiguous buffer: bytes, bytearray, memoryview, array, mmap, numpy, Message.
_Body: TypeAlias = Buffer | npt.NDArray[Any] | Message

class ShmqError(Exception): ...
class NotRunning(ShmqError): ...
class Full(ShmqError, queue.Full): ...
class MessageTooBig(ShmqError, ValueError): ...
class BadName(ShmqError, ValueError): ...
class BadArgument(ShmqError, ValueError): ...
class NotInFlight(ShmqError): ...
class Gone(ShmqError): ...
class LayoutMismatch(ShmqError): ...
class TooManyClients(ShmqError): ...
class LeaseLost(ShmqError): ...
class LeaseFenced(ShmqError): ...

class Busy(ShmqError):
    """A stopped process holds a lock. Internal: the supervisor's loops see to others first."""

class Forked(ShmqError):
    """The handle is the parent's. Internal: the public classes attach anew and try again."""

class NeedBacklog(ShmqError):
    """The topic has no queue to publish to yet. Internal: `on_backlog` of Producer is called."""

def now() -> int: ...
def realtime() -> int: ...
def fork_generation() -> int: ...
def name_valid(name: str) -> bool: ...
def fingerprint() -> int: ...
def directory_bytes() -> int: ...
def create_directory(
    fd: int,
    *,
    msg_timeout: int,
    max_msg_timeout: int,
    max_req_timeout: int,
    max_msg_size: int,
    arena_size: int,
    node_id: int,
    mem_queue_size: int,
    inflight_slots: int,
) -> None: ...
def queue_bytes(*, arena_size: int, mem_queue_size: int, inflight_slots: int) -> int: ...
def decode_records(records: Any, count: int) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """(ids u64, timestamps i64, attempts i32 with this delivery, offsets i32, data) of exactly so
    many whole records. ShmqError if they are not."""

def scan_records(data: Any, max_msg_size: int, most: int = 4294967295) -> tuple[int, int, bool]:
    """(whole records, bytes they take, the next one is damaged)."""

def scan_bodies(
    data: Any, start: int, end: int, count: int, max_msg_size: int
) -> tuple[int, int, int | None]:
    """Of `count` bodies (int32 BE size, then as many bytes) in data[start:end]: (where the whole
    ones end, how many they are, the size of the next one if it is not from 1 to max_msg_size)."""

def has_pages(segment: Any, at: int, nbytes: int) -> bool:
    """Whether a part of a mapped segment can be read: that it has pages, or gets them now. To read
    what has none is a SIGBUS where /dev/shm is full. True of what is no mapping."""

def killpoint(name: str | None, count: int = 1) -> None:
    """Only in a killpoints build: SIGKILL this process at the count-th passing of `name`."""

class Broker:
    """One process's attachment to a running instance.

    opener(serial) returns a file descriptor of the queue segment `/shmq.<instance>.<serial>`; it is
    called without any lock held, the descriptor is closed after mapping; it raises
    FileNotFoundError if the segment is gone (turned into Gone). `fd` stays the caller's to close.
    instance: the name, for messages.
    """

    def __init__(
        self, fd: int, opener: Callable[[int], int], kind: int = 0, instance: str = ""
    ) -> None: ...
    @property
    def client(self) -> int: ...
    @property
    def forked(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    @property
    def stopped(self) -> bool:
        """Was the instance stopped in order, or is it being stopped? False after detach."""

    def supervisor_alive(self) -> bool: ...
    def detach(self, patience: int = ...) -> None:
        """Give back what this client holds and its entry, unmap. Idempotent.

        patience: ns to wait behind stopped lock holders, then Busy; default for ever. Waits till no
        thread is in the core through this broker (at most 250 ms behind a sleeping
        one). Its producers and consumers raise Gone from then on; mappings go with the last.
        """

    def view(self, queue: int = -1) -> memoryview:
        """Read-only bytes of a whole segment (-1: the directory); keeps it mapped."""

    def find_topic(self, topic: str) -> tuple[int, int] | None:
        """(index, generation)"""

    def find_queue(self, topic: int, channel: str | None) -> tuple[int, int] | None:
        """(index, serial); channel None: the topic's backlog."""

    def request(
        self, kind: int, topic: str, channel: str | None = None, timeout: int | None = None
    ) -> None:
        """Ask the supervisor (CONSTANTS["CREATE_TOPIC"] ...). timeout in ns; ShmqError after it."""

    def pause_topic(self, topic: int, generation: int, paused: bool) -> None: ...
    def pause_channel(self, queue: int, serial: int, paused: bool) -> None: ...
    def empty(self, queue: int, serial: int) -> int: ...

    # leases; a lessee is (queue, serial, index, incarnation), a lease (id, parent, count, bytes,
    # parts, replays, on_disk), a run of records on disk (from, to, bytes, count, positions of its
    # parts as bytes)
    def lessee_open(
        self, queue: int, serial: int, name: str, ttl: int = 0, grace: int = 0
    ) -> tuple[int, int, int, int]:
        """Who leases under this name from now on; ttl, grace: ns, 0 never."""

    def lessee_touch(self, lessee: tuple[int, int, int, int]) -> None: ...
    def lessee_close(self, lessee: tuple[int, int, int, int]) -> None: ...
    def lease_take(
        self,
        lessee: tuple[int, int, int, int],
        parent: int,
        n: int,
        max_bytes: int,
        parts: int,
        run: tuple[int, int, int, int, bytes] | None = None,
    ) -> tuple[int, int, int, int, int, int, int] | None:
        """None: there is nothing, or as much is held as may be, or the run does not begin where
        the read position is."""

    def lease_look(
        self, lessee: tuple[int, int, int, int], id: int, replay: bool = False
    ) -> tuple[int, int, int, int, int, int, int]: ...
    def lease_list(
        self, lessee: tuple[int, int, int, int]
    ) -> list[tuple[int, int, int, int, int, int, int]]: ...
    def lease_finish(self, lessee: tuple[int, int, int, int], through: int) -> int: ...
    def lease_return(self, lessee: tuple[int, int, int, int], id: int) -> int: ...
    def lease_end(self, queue: int, serial: int, id: int, back: bool) -> int: ...
    def lease_wait(self, lessee: tuple[int, int, int, int], deadline: int) -> bool:
        """Sleep until there may be something to lease, at most to CLOCK_MONOTONIC ns."""

    def lease_open(self, queue: int, serial: int, id: int, part: int) -> tuple[int, ...]:
        """A cursor (queue, serial, id, part, slot, from, to, left): what is left in memory, and
        where the part's records on disk are, to be read behind that."""

    def lease_read(
        self, cursor: tuple[int, ...], rows: int, max_bytes: int
    ) -> tuple[tuple[int, ...], int, bytes, bytes, bytes, bytes, bytes]:
        """(cursor, count, ids u64, timestamps i64, attempts i32, offsets i32, data)."""

    # what only the supervisor calls
    def set_data_path(self, path: str) -> None:
        """Where the files are, absolute, for who reads what a lease holds on disk."""

    def disk_trouble(self, errno: int) -> None:
        """The data path refuses to be written, with this errno; 0: it does not (any more)."""

    def supervise(
        self,
        *,
        msg_timeout: int,
        max_msg_timeout: int,
        max_req_timeout: int,
        max_msg_size: int,
        arena_size: int,
        node_id: int,
        mem_queue_size: int,
        inflight_slots: int,
    ) -> None: ...
    def supervisor_wait(self, deadline: int) -> int:
        """Sleep on the supervisor's doorbell until CLOCK_MONOTONIC ns `deadline`; bits: 1 request,
        2 work for the spiller, 4 a client left, 8 names or pauses changed, 16 something times out
        or is due before `scan_at`. Stores the heartbeat."""

    def scan_at(self, deadline: int, due: int) -> None:
        """The scanner sleeps until then (monotonic and real ns). Look at the columns after it."""

    def attend(self, queue: int) -> None:
        """Have the spiller look at a queue, as a client does that has work for it."""

    def attention(self) -> list[int]:
        """The queues that the spiller was told to look at since the last call."""

    def names_written(self, replaced: int, written: int) -> None: ...
    def stopping(self) -> None: ...
    def close_directory(self) -> None: ...
    def next_request(self) -> tuple[int, int, str, str, int] | None:
        """(ticket, kind, topic, channel, client)"""

    def answer(self, ticket: int, status: int) -> None: ...
    def create_topic(self, topic: str, clock_floor: int) -> tuple[int, int]: ...
    def reserve_queue(self) -> tuple[int, int]: ...
    def create_queue(
        self,
        fd: int,
        queue: int,
        serial: int,
        topic: int,
        base: str,
        *,
        disk_read: int = 0,
        disk_write: int = 0,
        disk_depth: int = 0,
        ephemeral: bool = False,
        paused: bool = False,
        chunk: int = 0,
        chunk_depth: int = 0,
    ) -> None:
        """chunk: the highest number of a chunk that is on disk; chunk_depth: messages in all."""

    def enter_queue(self, queue: int, serial: int, topic: int, channel: str | None) -> None: ...
    def take_over(self, topic: int, channel: str) -> tuple[int, int] | None:
        """None: there is no backlog, or the topic is paused or has a channel already."""

    def renamed(self, queue: int, base: str) -> None: ...
    def remove_queue(
        self, queue: int, serial: int, closed: bool = False, idle: bool = False
    ) -> bool:
        """closed: its segment was closed by a removal that died, so it cannot be mapped."""

    def give_back(self, queue: int) -> int:
        """Give the memory behind the last body in use back; how many bytes."""

    def remove_topic(self, topic: int, generation: int) -> None: ...
    def expire(
        self, queue: int, limit: int = 256, now: int | None = None, realtime: int | None = None
    ) -> tuple[int, int]:
        """(timed out, due): one bounded bite. GIL released. now, realtime: ns, for tests."""

    def advance(self, queue: int, n: int) -> int: ...
    def spill_begin(
        self,
        queue: int,
        n: int,
        max_bytes: int,
        everything: bool = False,
        ahead: bool = False,
        returned: bool = False,
        front: bool = False,
        out: bool = False,
    ) -> Spill | None:
        """None: nothing to spill. everything: flush (also BACK and INFLIGHT). ahead: those two, to
        right in front of what is on disk; None: nothing is, or they do not fit there. returned: the
        youngest BACK that wait for others. front: the youngest BACK that do not, as with ahead.
        out: the youngest BACK that wait for others or were handed out before."""

    def chunk_begin(
        self, queue: int, chunk: int, from_due: int, n: int, max_bytes: int
    ) -> Spill | None:
        """Deferred messages that are due at from_due or later (CLOCK_REALTIME ns), by due time, to
        the chunk of this number. None: there are none."""

    def chunk_load(self, queue: int, data: Any, dues: Any, position: int) -> int | None:
        """How many of the records, with due times (int64 each), fitted; position: chunk << 24 |
        number of the first. None: emptied."""

    def chunk_depth(self, queue: int, depth: int) -> None: ...
    def restore(
        self, queue: int, data: Any, position: int, next_position: int
    ) -> tuple[int, int] | None:
        """(messages, bytes) that fitted; None: the read position has moved (emptied)."""

    def disk_adopt(
        self, queue: int, read_position: int, write_position: int, depth: int, chunk: int
    ) -> None: ...
    def disk_set(self, queue: int, expected: int, read_position: int, depth: int) -> bool: ...
    def unrestore(self, queue: int) -> int: ...
    def pump(self, topic: int, generation: int, n: int) -> int:
        """Messages moved from the backlog to the channels; -1: a channel lacks room."""

    def adopt(self, queue: int) -> None: ...
    def rebuild(self, queue: int) -> None: ...
    def audit(self, queue: int) -> bool:
        """Whether it had to be rebuilt. LayoutMismatch: it cannot be."""

    def reap_scan(
        self, ended: int = -1, every: int = 1_000_000_000, deadline: int = 0
    ) -> list[tuple[int, int, int, int, int]]:
        """(client, generation, pid, start time, program) whose life lock is free. GIL released."""

    def reap_spare(self, client: int, generation: int) -> None: ...
    def reap(self, client: int, generation: int) -> int:
        """Messages given back."""

@final
class Spill:
    """Slots marked SPILLING. lengths and positions are writable uint32/uint64 buffers; of a chunk
    positions are due times. position: ahead, of the first record; of a chunk, its number."""

    count: int
    bytes: int
    position: int
    lengths: memoryview
    positions: memoryview
    def encode(self) -> builtins.bytes: ...
    def end(self, write_position: int, ok: bool) -> bool:
        """False: emptied meanwhile, nothing was stored."""

class Producer:
    """Publishes to one topic. on_backlog() is called (no lock held) when the topic has neither a
    channel nor a backlog queue; on_forked() in a child, must return a new (broker, topic,
    generation) to go on with."""

    def __init__(
        self,
        broker: Broker,
        topic: int,
        generation: int,
        name: str,
        on_backlog: Callable[[], None],
        on_forked: Callable[[], tuple[Broker, int, int]],
    ) -> None: ...
    @property
    def topic(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def publish(self, body: _Body, defer: float | None = None, timeout: float | None = None) -> str:
        """16 hex digits. timeout: seconds to wait for room; None for ever, 0 not at all (Full)."""

    def publish_list(
        self, bodies: Sequence[_Body], defer: float | None = None, timeout: float | None = None
    ) -> int:
        """First id as a number; the k-th message has first + 1024 * k. 0: there were none."""

    def publish_fixed(
        self,
        data: Any,
        count: int,
        width: int,
        defer: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """`count` bodies of `width` bytes, one after the other in a C-contiguous buffer."""

    def publish_offsets(
        self,
        data: Any,
        offsets: Any,
        wide: bool,
        start: int,
        count: int,
        defer: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Arrow's layout: body i is data[offsets[start+i]:offsets[start+i+1]]; wide: int64."""

    def publish_framed(
        self,
        data: Any,
        start: int,
        count: int,
        defer: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """nsqd's layout: `count` times int32 BE size and a body, from data[start] on. Where they
        end. ValueError if they are not all there."""

    def publish_run(
        self,
        data: Any,
        start: int,
        end: int,
        line: bytes,
        max_msg_size: int,
        max_body_size: int,
    ) -> tuple[int, int, int]:
        """nsqd's PUB commands in data[start:end] as long as they are whole, right and all of one
        topic, or the one MPUB there, published together without waiting: (where they end, how
        many messages, how many answers). `line`: `MPUB <topic>\\n`. At most some; call it again.
        Errors as of publish_framed; then none of them is."""

    def publish_marked(
        self,
        data: Any,
        offsets: Any,
        wide: bool,
        start: int,
        count: int,
        key0: int,
        key1: int,
        epoch: int,
        after: int,
        upto: int,
        timeout: float | None = None,
    ) -> int | None:
        """As publish_offsets; these are number `after` to `upto` of the key's epoch, published
        once. None: they were published before."""

    def mark(self, key0: int, key1: int) -> tuple[int, int]:
        """(last epoch under the key + 1, or 0; how far it got)."""

    def loan(
        self,
        nbytes: int,
        defer: float | None = None,
        timeout: float | None = None,
        zero: bool = True,
    ) -> Loan: ...
    def close(self) -> None: ...

@final
class Loan:
    """Context manager: yields a writable memoryview; publishes at the end, cancels on an error.

    BufferError, and nothing published, if a slice or array made of the memoryview outlives the
    block. It is the loan itself that has the buffer, inside the block only. zero=False: the buffer
    holds what is there, of other messages.
    """

    id: str | None
    def truncate(self, nbytes: int) -> None:
        """Publish only so many bytes, from 1 to what was asked for; may be called again."""

    def __enter__(self) -> memoryview: ...
    def __exit__(self, *exc: object) -> None: ...

class Consumer:
    """batch_type: subclass of Batch that take_many returns. on_forked as Producer's, returns
    (broker, queue, serial)."""

    def __init__(
        self,
        broker: Broker,
        queue: int,
        serial: int,
        topic: str,
        channel: str,
        max_in_flight: int,
        msg_timeout: int,
        batch_type: type[Batch],
        on_forked: Callable[[], tuple[Broker, int, int]],
    ) -> None:
        """msg_timeout in ns: 0 the queue's default, -1 never while the consumer lives."""

    @property
    def topic(self) -> str: ...
    @property
    def channel(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def session(self) -> tuple[int, int, int] | None:
        """(queue, serial, index) of its session in the queue; None when it is closed."""

    @property
    def max_in_flight(self) -> int: ...
    @overload
    def take(self, timeout: None = None) -> Message: ...
    @overload
    def take(self, timeout: float | None) -> Message | None: ...
    def take_many(self, n: int, timeout: float | None = None) -> Any:
        """A batch_type with 1 to n messages, or an empty one after the timeout."""

    def limit(self, max_in_flight: int) -> None:
        """At most so many in flight from now on; 0: none. A Waiter looks again when woken."""

    def __iter__(self) -> Iterator[Message]: ...
    def __next__(self) -> Message: ...
    @property
    def _broker(self) -> Broker: ...
    def close(self) -> None: ...

@final
class Window:
    """The deliveries of one connection of nsqd's TCP protocol. One thread uses it.

    Ids are the 16 bytes that clients send; whoever settles is told whether the message was in
    flight to this connection."""

    def __init__(self, consumer: Consumer) -> None: ...
    def take(
        self, n: int, max_bytes: int, sample_rate: int = 0
    ) -> tuple[builtins.bytes, int] | None:
        """(message frames, how many), no more once their bodies have max_bytes; None: there is
        nothing to take. sample_rate: nsqd's, others are finished unseen; so the frames may be
        empty. Gone when the channel is deleted."""

    def finish_run(
        self, data: Any, start: int, end: int
    ) -> tuple[int, int, list[builtins.bytes] | None]:
        """Finish what the FIN lines at the start of data[start:end] name. (where those lines end,
        how many were finished, ids that were not in flight to this connection, in order)."""

    def finish(self, id: builtins.bytes, /) -> bool: ...
    def requeue(self, id: builtins.bytes, delay_ns: int) -> bool: ...
    def touch(self, id: builtins.bytes, /) -> bool: ...

@final
class Waiter:
    """One thread that waits for many consumers with one doorbell."""

    def __init__(self, broker: Broker) -> None: ...
    def wait(self, consumers: Sequence[Consumer], deadline_ns: int) -> list[int]:
        """Indices of the consumers that may have something to take, or are closed or gone: look.

        Sleeps at most to CLOCK_MONOTONIC ns `deadline_ns` and 1 s; one thread at a time. 0: only
        looks, any thread may. Empty when the time is over or `wake` was called. Who was told of a
        consumer and takes nothing calls `pass_on`. Gone when it or the broker is closed.
        """

    def wake(self) -> None:
        """End the wait, or the next one; many calls are as one."""

    def pass_on(self, consumer: Consumer) -> None:
        """Nobody here takes what it may have: tell the next who waits for its channel."""

    def close(self) -> None:
        """Give back its doorbell; a wait ends with Gone."""

@final
class Message:
    """One delivery. Immutable; `view` keeps the body in place while any buffer of it lives.

    A body of up to 4096 bytes is copied when it is taken; a longer one when it is first asked for,
    which raises NotInFlight if the message is no longer in flight. Exports its body as a buffer.
    With: finish(), or requeue() after an error, unless it was settled in the block.
    """

    @property
    def id(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def view(self) -> memoryview: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def attempts(self) -> int: ...
    def finish(self) -> None: ...
    def requeue(self, delay: float = 0.0) -> None: ...
    def touch(self) -> None: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
    def __reduce__(self) -> NoReturn:
        """TypeError: only the process that took it can settle it."""

class Batch:
    """Deliveries taken together; bodies copied once into one Arrow-shaped buffer.

    finish, requeue and touch act on what is not settled yet (its messages may be settled singly)
    and raise NotInFlight after all others were done. With: finish(), or requeue() after an
    error.
    """

    __slots__: ClassVar[tuple[str, ...]]
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Message]: ...
    def __getitem__(self, index: int) -> Message: ...
    def bodies(self) -> list[bytes]: ...
    def column(self, name: str) -> memoryview:
        """Read-only: "ids" u8, "timestamps" i8, "attempts" u2, "offsets" i8 (len + 1), "data"."""

    def finish(self) -> None: ...
    def requeue(self, delay: float = 0.0) -> None: ...
    def touch(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...
