"""The contract of the extension. The build takes the docstrings and signatures of the C code from
here (native/binding/docstrings.py), so `help()` and an editor show the same text.

The extension is thin: native/include/ says what each call of the core does, and what a death inside
it leaves. Every call first tries its locks with the GIL held. If a lock is held elsewhere, it
releases the GIL and waits in slices, so Ctrl-C and other threads keep working. A call that waits
for messages, room or the supervisor waits without the GIL, in slices of at most 250 ms.

Times are nanoseconds, except that `defer`, `delay` and `timeout` of the classes that users meet
(Producer, Consumer, Message, Batch) are seconds.
"""

import builtins
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, Self, TypeAlias, TypeVar, final, overload

import numpy.typing as npt
from typing_extensions import Buffer, CapsuleType  # type checkers know them without the package

__version__: str
LAYOUT_VERSION: int
KILLPOINTS: bool
#: {structure: {field: (numpy dtype, offset, size of one, count)}}
LAYOUT: dict[str, dict[str, tuple[str, int, int, int]]]
#: {structure: size in bytes}
SIZES: dict[str, int]
#: SHMQ_... numbers: states, table sizes, ("FREE": 0, "CLIENTS": 1024, ...); see layout_table.c
CONSTANTS: dict[str, int]
#: {status name: (number, exception name, sentence)}
STATUS: dict[str, tuple[int, str, str]]

#: (max_messages, max_bytes, message_ttl, retry_first, retry_most, max_attempts, overflow, flags,
#: dead_letter): counts, bytes, ns, and 0 or "" for none
_Settings: TypeAlias = tuple[int, int, int, int, int, int, int, int, str]
#: Anything with a contiguous buffer: bytes, bytearray, memoryview, array, mmap, numpy, Message.
_Body: TypeAlias = Buffer | npt.NDArray[Any] | Message
_Default = TypeVar("_Default")
_Key = TypeVar("_Key", bound=str | Buffer)
_Imported = TypeVar("_Imported")

def now() -> int:
    """CLOCK_MONOTONIC in ns."""

def realtime() -> int:
    """CLOCK_REALTIME in ns."""

def fork_generation() -> int:
    """A number that is one higher in every forked child."""

def name_valid(name: str, /) -> bool:
    """Returns True if this is a valid name of a topic or channel."""

def fingerprint() -> int:
    """A hash of the layout as compiled."""

def directory_bytes() -> int:
    """Size of a directory segment in bytes."""

def create_directory(
    fd: int,
    key: bytes = ...,
    /,
    *,
    msg_timeout: int,
    max_msg_timeout: int,
    max_req_timeout: int,
    max_msg_size: int,
    arena_size: int,
    node_id: int,
    mem_queue_size: int,
    in_flight_slots: int,
) -> None:
    """Size, reserve and fill a new directory segment. key: 32 bytes that nobody else can know, for
    the seals of messages on disk; without it, no message that was on disk counts as sealed. Raises
    Full if the tmpfs is full."""

def queue_bytes(*, arena_size: int, mem_queue_size: int, in_flight_slots: int) -> int:
    """Size of a queue segment in bytes."""

def decode_records(records: Any, count: int) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """Decode exactly `count` whole disk records into columns: (ids u64, timestamps i64, attempts
    i32 with this delivery, offsets i32, data). Raises LayoutMismatch if they are anything else."""

def scan_records(data: Any, max_msg_size: int, most: int = 4294967295) -> tuple[int, int, bool]:
    """Count the whole disk records in data, up to `most`: (records, bytes they take, True if the
    length of the next one is impossible)."""

def leasable_records(data: Any, max_bytes: int, at_least: bool) -> tuple[int, int, int]:
    """Count the disk records at the start of data, which are whole, that may be leased in place: up
    to the first that has a time to live of its own or was convicted, and with bodies of at most
    max_bytes. at_least: one, whatever its body has. Returns (records, bytes of their bodies, bytes
    they take)."""

def pack_properties(properties: Mapping[str, str | bytes] | None) -> bytes:
    """The block of these properties, as the core stores it; b"" for None. Raises BadArgument for a
    name, MessageTooBig if there are more than 4096 bytes, TypeError for anything else."""

def unpack_properties(block: Any) -> Mapping[str, bytes]:
    """The properties in a block, read-only. Raises LayoutMismatch if it was overwritten."""

def record_properties(records: Any, count: int) -> tuple[bytes, bytes]:
    """The properties of exactly `count` whole disk records: (offsets i32, blocks). Raises
    LayoutMismatch if they are anything else."""

def split_body(body: Any) -> tuple[bytes, bytes]:
    """Separate what a record has in its body's place: (block of properties, body)."""

def encode_slot(slot: Any, content: Any, topic: str, key: bytes | None) -> bytes:
    """The record of a message, from the bytes of its slot and those of its properties and body.
    topic, key: of its instance, for the seal of one that is sealed; key None: it loses that."""

def scan_bodies(
    data: Any, start: int, end: int, count: int, max_msg_size: int
) -> tuple[int, int, int | None]:
    """Look for `count` bodies of nsqd's MPUB (int32 BE size, then the body) in data[start:end]:
    (where the whole ones end, how many they are, the size of the next one if it is not from 1 to
    max_msg_size)."""

def has_pages(segment: Any, at: int, nbytes: int) -> bool:
    """Ensure that segment[at:at + nbytes] is backed by pages. Returns False if it is not: reading
    it would raise SIGBUS, which happens where /dev/shm is full. True for other memory."""

def reopen_store(fd: int) -> None:
    """Open the segment of a results store again that `Store.retire` closed. Raises
    LayoutMismatch."""

def killpoint(name: str | None, count: int = 1) -> None:
    """Send this process SIGKILL at the count-th passing of the point `name`; None disarms. Only in
    a killpoints build."""

@final
class Segment:
    """A mapped segment: the `obj` of the memoryview that Broker.view returns. It stays mapped as
    long as the view lives."""

class Broker:
    """One process's attachment to a running instance.

    fd: the directory segment; it stays the caller's to close. opener(serial) returns a file
    descriptor of the queue segment `/shmq.<instance>.<serial>`; it is called without any lock held,
    and the descriptor is closed after mapping. If the segment is gone it raises FileNotFoundError,
    which becomes Gone. kind: CONSTANTS["AS_CLIENT"], ... instance: the name, for error messages.

    Raises NotRunning, TooManyClients, OtherNamespace and LayoutMismatch.
    """

    def __init__(
        self, fd: int, opener: Callable[[int], int], kind: int = 0, instance: str = ""
    ) -> None: ...
    @property
    def client(self) -> int:
        """Index of the client's entry."""

    @property
    def forked(self) -> bool:
        """True in a child that was forked after the attach."""

    @property
    def closed(self) -> bool:
        """True after detach was called."""

    @property
    def stopped(self) -> bool:
        """True if the instance was stopped in order, or is being stopped. False after detach."""

    def supervisor_alive(self) -> bool:
        """Returns True if a supervisor holds its life lock."""

    def detach(self, patience: int | None = None) -> None:
        """Give back everything that this client holds and its entry, then unmap. Idempotent.

        patience: ns to wait for locks that stopped processes hold, then Busy; None: for ever.
        Waits until no thread is in the core through this broker (at most 250 ms for one that
        sleeps). Its producers and consumers raise Gone from then on; the last of them unmaps.
        """

    def view(self, queue: int = -1) -> memoryview:
        """Read-only bytes of a queue's segment (-1: of the directory), which they keep mapped."""

    def find_topic(self, topic: str) -> tuple[int, int] | None:
        """Find a topic: (index, generation), or None if there is none."""

    def find_queue(self, topic: int, channel: str | None) -> tuple[int, int] | None:
        """Find the queue of a channel (None: of the backlog): (index, serial), or None."""

    def request(
        self, kind: int, topic: str, channel: str | None = None, timeout: int | None = None
    ) -> None:
        """Ask the supervisor to create or delete (kind: CONSTANTS["CREATE_TOPIC"], ...). timeout:
        ns to wait for its answer. Raises NotRunning, or ShmqError after the timeout."""

    def pause_topic(self, topic: int, generation: int, paused: bool) -> None:
        """Pause or unpause a topic: messages stay in its backlog."""

    def pause_channel(self, queue: int, serial: int, paused: bool) -> None:
        """Pause or unpause a channel: nothing is taken from it."""

    def configure(
        self,
        queue: int,
        serial: int,
        settings: _Settings,
        was: _Settings | None = None,
    ) -> bool:
        """Set the policies of a queue. was: those that the new ones were made from; if others hold
        by now, nothing is set, and it returns False. Raises BadArgument, BadName."""

    def configure_topic(
        self,
        topic: int,
        generation: int,
        settings: _Settings,
        was: _Settings | None = None,
    ) -> bool:
        """Set the policies of a topic's backlog and of the queues that it gets later. was: those of
        the topic. Returns and raises as `configure`."""

    def settings(self, queue: int, serial: int) -> _Settings:
        """Returns the policies of a queue."""

    def topic_settings(self, topic: int, generation: int) -> _Settings:
        """Returns the policies of the queues that a topic gets later."""

    def dead_topic(self, queue: int, serial: int) -> str:
        """Returns the name of the topic that a channel's dead letters go to. Raises BadName."""

    def dead_move(self, queue: int, serial: int, topic: int, generation: int, n: int) -> int | None:
        """Move up to n convicted messages of a queue to a topic. Returns how many, 0 if there are
        none; None if the topic needs a backlog queue first. Raises Full, Busy."""

    def empty(self, queue: int, serial: int) -> int:
        """Drop the messages of a queue, except those that are leased. Returns how many."""

    def held_finish(self, queue: int, serial: int, id: int, pid: int) -> None:
        """Finish a message in flight for its consumer. pid: only if this process holds it; 0:
        whoever does. Raises NotInFlight."""

    def held_requeue(self, queue: int, serial: int, id: int, pid: int, delay: int) -> None:
        """Requeue a message in flight for its consumer, after `delay` ns. Counts no failure. pid:
        as `held_finish`. Raises NotInFlight."""

    # leases; a lease holder is (queue, serial, index, incarnation), a lease (id, parent, count,
    # bytes, parts, replays, on_disk), a run of records on disk (from, to, bytes, count, positions
    # of its parts as bytes)
    def lease_holder_open(
        self,
        queue: int,
        serial: int,
        name: str,
        ttl: int = 0,
        grace: int = 0,
        proof: int = 0,
        proof2: int = 0,
        whose: int = 0,
        known: bool = False,
        most: int = 0,
    ) -> tuple[int, int, int, int]:
        """Become the owner of a lease holder's name. ttl, grace: ns, 0 for never. The others: see
        shmq_lease_settings."""

    def lease_holder_touch(self, holder: tuple[int, int, int, int]) -> None:
        """Give a sign of life, which begins the ttl again."""

    def lease_holder_adopt(self, holder: tuple[int, int, int, int]) -> None:
        """Become the owner in place of the process that was; a sign of life."""

    def lease_holder_close(self, holder: tuple[int, int, int, int]) -> None:
        """Leave the name without an owner; its leases wait for `grace`."""

    def lease_holder_leave(self, holder: tuple[int, int, int, int]) -> None:
        """The same, if this process is the owner."""

    def lease_take(
        self,
        holder: tuple[int, int, int, int],
        parent: int,
        n: int,
        max_bytes: int,
        parts: int,
        run: tuple[int, int, int, int, bytes] | None = None,
        most: int = 0,
    ) -> tuple[int, int, int, int, int, int, int] | None:
        """Lease up to n messages with max_bytes of bodies, split into parts, and the run on disk
        that follows them. Returns None if there is no message, if the in-flight limit is reached,
        or if the run does not begin at the read position. most: see shmq_lease_wish."""

    def lease_look(
        self, holder: tuple[int, int, int, int], id: int, replay: bool = False
    ) -> tuple[int, int, int, int, int, int, int]:
        """Returns an open lease; replay: count one more reading. Raises LeaseLost."""

    def lease_list(
        self, holder: tuple[int, int, int, int]
    ) -> list[tuple[int, int, int, int, int, int, int]]:
        """Returns the open leases of this holder in the order of their ids."""

    def lease_finish(self, holder: tuple[int, int, int, int], through: int) -> int:
        """Finish every lease up to the id `through`. Returns how many messages that were."""

    def lease_return(self, holder: tuple[int, int, int, int], id: int) -> int:
        """Return a lease to the head of its queue. Returns how many messages that were."""

    def lease_end(self, queue: int, serial: int, id: int, back: bool) -> int:
        """End any holder's lease: return it (back) or finish it. Returns how many messages."""

    def lease_wait(self, holder: tuple[int, int, int, int], deadline: int) -> bool:
        """Sleep until there may be something to lease, or until `deadline` (CLOCK_MONOTONIC ns).
        Returns False after the deadline."""

    def lease_open(self, queue: int, serial: int, id: int, part: int) -> tuple[int, ...]:
        """A cursor (queue, serial, id, part, slot, from, to, left) before a part's first message:
        how many messages are left in memory, and where the records on disk are that follow."""

    def lease_read(
        self, cursor: tuple[int, ...], rows: int, max_bytes: int
    ) -> tuple[tuple[int, ...], int, bytes, bytes, bytes, bytes, bytes]:
        """Read the next messages in memory: (cursor after them, count, ids u64, timestamps i64,
        attempts i32, offsets i32, data). Raises LeaseLost."""

    def lease_properties(self, cursor: tuple[int, ...], count: int) -> tuple[bytes, bytes]:
        """The properties of the next messages in memory: (offsets i32, count + 1 of them; blocks).
        Raises LeaseLost, and MessageTooBig if they have 2 GiB or more."""

    # ---- only the supervisor calls these ----
    def set_data_path(self, path: str) -> None:
        """Publish the absolute path of the files, for readers of leases on disk."""

    def disk_trouble(self, error: int) -> None:
        """Publish the errno with which the data path refuses to be written; 0: it does not."""

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
        in_flight_slots: int,
    ) -> None:
        """Become the supervisor, with these limits."""

    def supervisor_wait(self, deadline: int) -> int:
        """Store the heartbeat and sleep on the supervisor's doorbell, at most until `deadline`
        (CLOCK_MONOTONIC ns) or a signal. Returns the reasons for which it was rung
        (`shmq.layout.Ring`)."""

    def scan_at(self, deadline: int, due: int) -> None:
        """Announce until when the scanner sleeps (monotonic and real ns); look at the columns after
        this call."""

    def spiller_request(self, queue: int) -> None:
        """Mark a queue as needing the spiller, as a client does that has work for it."""

    def spiller_pending(self) -> list[int]:
        """Returns the queues that were marked since the last call."""

    def names_written(self, replaced: int, written: int) -> None:
        """Announce that nsqd.dat is about to be replaced: its times of modification (ns)."""

    def stopping(self) -> None:
        """Accept no attach and no request from now on."""

    def close_directory(self) -> None:
        """Mark the directory closed: every handle raises Gone from now on."""

    def next_request(self) -> tuple[int, int, str, str, int, tuple[int, int]] | None:
        """The next posted request, (ticket, kind, topic, channel, client, numbers), or None.
        numbers: max_keys and max_bytes of a results store, whose name is the topic."""

    def answer(self, ticket: int, status: int, why: str | None = None) -> None:
        """Answer a request with a status. why: for REFUSED, the reason, which the client's error
        has as far as 158 bytes go."""

    def create_topic(
        self,
        topic: str,
        clock_floor: int,
        settings: _Settings = ...,
    ) -> tuple[int, int]:
        """Enter a topic whose ids begin above clock_floor (64 ns units): (index, generation).
        settings: as of `configure_topic`."""

    def reserve_queue(self) -> tuple[int, int]:
        """Reserve a free queue index and a new serial: (index, serial)."""

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
        settings: _Settings = ...,
    ) -> None:
        """Size, reserve and fill a new queue segment. chunk: the highest number of a chunk on disk;
        chunk_depth: how many messages chunks have; settings: as of `configure`."""

    def enter_queue(self, queue: int, serial: int, topic: int, channel: str | None) -> None:
        """Enter a queue in the directory, which makes it visible; channel None: as a backlog."""

    def take_over(
        self, topic: int, channel: str, settings: _Settings = ...
    ) -> tuple[int, int] | None:
        """Turn the topic's backlog into its first channel, with these settings: (index, serial).
        Returns None if there is no backlog, or if the topic is paused or has a channel."""

    def renamed(self, queue: int, base: str) -> None:
        """Note that the files of a queue were renamed after a take-over."""

    def remove_queue(self, queue: int, serial: int, closed: bool = False) -> None:
        """Take a queue out of the directory and close its segment. closed: it is closed already, or
        cannot be mapped."""

    def erase_queue(self, queue: int, serial: int, idle: bool = False) -> bool:
        """Close a queue whose files are to be deleted. Its entry stays, so that a successor deletes
        them after a death, until `remove_queue` is called. idle: only if it has no consumer.
        Returns whether it is closed."""

    def trim(self, queue: int) -> int:
        """Give the pages after the last body in use back. Returns how many bytes that were."""

    def remove_topic(self, topic: int, generation: int) -> None:
        """Take a topic without queues out of the directory."""

    def dead_waiting(self, queue: int) -> bool:
        """Whether convicted messages waited to be moved when `expire` last looked."""

    def dead_postpone(self, queue: int, due: int, n: int) -> int:
        """Put up to n convicted messages off until `due` (Unix ns). Returns how many."""

    def expire(
        self, queue: int, limit: int = 256, now: int | None = None, realtime: int | None = None
    ) -> tuple[int, int]:
        """One bite of nsqd's scan: requeue at most `limit` messages, and return how many (timed
        out, were due). now, realtime: ns, for tests."""

    def sweep(self, queue: int) -> int:
        """Drop the messages of a queue that have expired, wherever they wait. Returns how many."""

    def stage_oldest(self, queue: int, n: int) -> int:
        """Move the oldest n READY messages to the requeue ring. Returns how many were moved."""

    def spill_begin(
        self,
        queue: int,
        n: int,
        max_bytes: int,
        source: int = 0,
    ) -> Spill | None:
        """Mark up to n messages, with at most max_bytes of records, SPILLING. source: a
        `shmq.layout.SpillSource`. Returns None if there are none, or PREPEND_FLUSH does not fit."""

    def chunk_begin(
        self, queue: int, chunk: int, from_due: int, n: int, max_bytes: int
    ) -> Spill | None:
        """Mark deferred messages that are due at from_due or later (CLOCK_REALTIME ns) SPILLING, by
        due time, for the chunk with this number. Returns None if there are none."""

    def chunk_load(self, queue: int, data: Any, dues: Any, position: int) -> int | None:
        """Load records of a chunk with their due times (int64 each); position: chunk << 24 | number
        of the first. Returns how many fitted, or None if the chunk was emptied."""

    def chunk_depth(self, queue: int, depth: int) -> None:
        """Set how many messages are in chunks, as recounted."""

    def restore(
        self, queue: int, data: Any, position: int, next_position: int
    ) -> tuple[int, int] | None:
        """Restore records that were read at `position` to memory: (messages, bytes) that fitted.
        Returns None if the read position has moved (the queue was emptied)."""

    def disk_adopt(
        self, queue: int, read_position: int, write_position: int, depth: int, chunk: int
    ) -> None:
        """Adopt files that another broker has used since, with every chunk up to `chunk`."""

    def disk_set(self, queue: int, expected: int, read_position: int, depth: int) -> bool:
        """Move the read position. Returns False if it was no longer `expected`."""

    def evict_read_ahead(self, queue: int) -> int:
        """Drop messages that were read ahead and never delivered. Returns how many."""

    def pump(self, topic: int, generation: int, n: int) -> int:
        """Move up to n messages from the backlog to the channels. Returns how many were moved, or
        -1 if a channel lacks room."""

    def adopt(self, queue: int) -> None:
        """Resolve the states that a dead supervisor left, and rebuild the queue."""

    def rebuild(self, queue: int) -> None:
        """Rebuild the derived state of a queue."""

    def audit(self, queue: int) -> bool:
        """Check the derived state of a queue and rebuild it if it does not add up. Returns whether
        it was rebuilt. Raises LayoutMismatch if it cannot be."""

    def reap_scan(
        self, ended: int = -1, every: int = 1_000_000_000, deadline: int = 0
    ) -> list[tuple[int, int, int, int, int]]:
        """Look every `every` ns for clients whose life lock is free, until there are some, the
        descriptor `ended` is readable, or it is `deadline` (CLOCK_MONOTONIC ns). Returns a list of
        (client, generation, pid, start time, program)."""

    def reap_spare(self, client: int, generation: int) -> None:
        """Keep the entry of a client whose thread ended while its process lives."""

    def reap(self, client: int, generation: int) -> int:
        """Give back everything that a dead client held. Returns how many messages."""

    # ---- results stores ----

    def find_store(self, name: str) -> tuple[int, int] | None:
        """(place, serial) of the results store of this name, or None."""

    def request_store(
        self, name: str, max_keys: int, max_bytes: int, timeout: int | None = None
    ) -> None:
        """Ask the supervisor for a results store, and wait up to `timeout` ns for its answer.

        Raises BadName, BadArgument for the limits, NotRunning, and ShmqError."""

    def reserve_store(self) -> tuple[int, int]:
        """Reserve a free place for a results store and a new serial: (place, serial)."""

    def create_store(
        self, fd: int, store: int, serial: int, name: str, max_keys: int, max_bytes: int
    ) -> None:
        """Make a results store of the empty shared memory object `fd`."""

    def enter_store(
        self, store: int, serial: int, name: str, max_keys: int, max_bytes: int
    ) -> None:
        """Enter a results store in the directory."""

    def remove_store(self, store: int, serial: int) -> None:
        """Take a results store, which was retired, out of the directory. Raises Gone."""

@final
class Spill:
    """Messages that are being written to disk: their slots are SPILLING until `end`."""

    @property
    def count(self) -> int:
        """Number of messages."""

    @property
    def bytes(self) -> int:
        """Size of all records in bytes."""

    @property
    def position(self) -> int:
        """PREPEND_FLUSH, PREPEND: disk position of the first record. CHUNK: its number."""

    @property
    def lengths(self) -> memoryview:
        """Length of each record, uint32."""

    @property
    def positions(self) -> memoryview:
        """Disk position of each record, uint64, for the caller to fill in. CHUNK: due times."""

    def encode(self) -> builtins.bytes:
        """The records, one after the other."""

    def end(self, write_position: int, ok: bool) -> bool:
        """Store the write position and free the slots, or (not ok) give them back. Returns False if
        the queue was emptied meanwhile; nothing was stored then."""

class Producer:
    """Publishes to one topic.

    on_backlog() is called, without any lock held, when the topic has neither a channel nor a
    backlog queue. on_forked() is called in a forked child and returns a new (broker, topic,
    generation).
    """

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
    def topic(self) -> str:
        """Name of the topic."""

    @property
    def closed(self) -> bool:
        """True after close was called."""

    def publish(
        self,
        body: _Body,
        defer: float | None = None,
        timeout: float | None = None,
        properties: Mapping[str, str | bytes] | None = None,
        ttl: float | None = None,
        priority: str | None = None,
    ) -> str:
        """Publish one message to every channel of the topic, or to its backlog while it has none.

        body: bytes, or any object with a contiguous buffer (bytearray, memoryview, numpy array,
        Message), of at least one byte and at most max_msg_size.
        defer: seconds before the message may be delivered, at most max_req_timeout.
        timeout: seconds to wait for room; None: for ever, 0: not at all.
        properties: values beside the body, by names of 1 to 64 of a-z 0-9 . _ -; a str is stored as
        UTF-8. Together they have at most 4096 bytes.
        ttl: seconds, more than 0, from when it may be delivered, after which it is not delivered
        any more; None: as the channels' settings say. The lower one counts.
        priority: publish to the topic TOPIC.PRIORITY instead, which is created if it is missing.

        Returns the id of the message, 16 hexadecimal digits. The call is nsqd's PUB and DPUB.

        Raises Full if there was no room in time, MessageTooBig (body or properties), BadArgument if
        the body is empty or deferred for too long or the name of a property is none, Gone if the
        topic was deleted, the instance stopped or the producer closed, NotRunning if a backlog
        queue must be made and no supervisor is running, BadName if the priority makes no name of a
        topic, TypeError or ValueError if the body has no contiguous buffer.
        """

    def seal(self) -> None:
        """Have everything that this producer publishes from now on carry the seal, and so be
        unpickled by its readers. Only what runs code of this process may be published then, never
        what came from a network. Raises Gone if it was closed."""

    def publish_object(self, picklers: list[Any], obj: object) -> Any:
        """Pickle an object with one of the spare picklers of shmq.objects and publish it, in one
        call that waits for room. Returns True; or False if there is no spare one; or, if the pickle
        is long or has buffers beside it, the pickler that has it: nothing was published then.
        Raises as `publish` does, and what pickling raises."""

    def publish_list(
        self,
        bodies: Sequence[_Body],
        defer: float | None = None,
        timeout: float | None = None,
        properties: bytes | Sequence[bytes] | None = None,
        ttl: float | None = None,
    ) -> int:
        """Publish a list of bodies, all or nothing. properties: a block for all, or one for each.
        Returns the first id as a number, or 0 if there were none; the k-th message has that id +
        1024 * k."""

    def publish_fixed(
        self,
        data: Any,
        count: int,
        width: int,
        defer: float | None = None,
        timeout: float | None = None,
        properties: bytes | Sequence[bytes] | None = None,
        ttl: float | None = None,
    ) -> int:
        """As publish_list: `count` bodies of `width` bytes each, one after the other in data."""

    def publish_arrow(
        self,
        schema: CapsuleType,
        array: CapsuleType,
        defer: float | None = None,
        timeout: float | None = None,
        properties: bytes | Sequence[bytes] | None = None,
        ttl: float | None = None,
    ) -> tuple[int, int]:
        """As publish_list: the bodies of one Arrow array, in the capsules that `__arrow_c_array__`
        returns, which are emptied. Returns (first id, number of bodies).

        Raises TypeError if the array is not of binary, string, their large or view forms or
        binary of a fixed size, and ValueError if bodies are null or the structs make no sense.
        """

    def publish_arrow_stream(
        self,
        stream: CapsuleType,
        defer: float | None = None,
        timeout: float | None = None,
        properties: bytes | Sequence[bytes] | None = None,
        ttl: float | None = None,
    ) -> tuple[int, int]:
        """As publish_arrow: the bodies of all arrays in the capsule that `__arrow_c_stream__`
        returns, which is emptied, all or none. Raises ValueError also if the stream
        fails."""

    def publish_framed(
        self,
        data: Any,
        start: int,
        count: int,
        defer: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish `count` bodies of nsqd's MPUB (int32 BE size, then the body) from data[start] on.
        Returns where they end. Raises ValueError if they are not all there."""

    def publish_run(
        self,
        data: Any,
        start: int,
        end: int,
        line: bytes,
        max_msg_size: int,
        max_body_size: int,
    ) -> tuple[int, int, int]:
        """Publish nsqd's PUB commands in data[start:end], as long as they are whole, correct and of
        one topic, or the one MPUB there, together and without waiting: (where they end, how many
        messages, how many answers). line: `MPUB <topic>\\n`. It may stop early: call it again.
        Raises as publish does; nothing was published then."""

    def publish_once(
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
        properties: bytes | Sequence[bytes] | None = None,
        ttl: float | None = None,
        whose: int = 0,
    ) -> int | None:
        """As publish_list, in Arrow's layout: body i is data[offsets[start + i]:offsets[start + i +
        1]]; wide: the offsets are int64, not int32. At most once: they are the messages `after`
        (exclusive) to `upto` of the key's epoch. Returns None if they were published before. Their
        properties and ttl are no part of the comparison. whose: see shmq_sequence."""

    def mark(self, key0: int, key1: int) -> tuple[int, int]:
        """How far publish_once got under a key: (its last epoch + 1, or 0; the last message)."""

    def loan(
        self,
        nbytes: int,
        defer: float | None = None,
        timeout: float | None = None,
        zero: bool = True,
        properties: Mapping[str, str | bytes] | None = None,
    ) -> Loan:
        """Write a body of nbytes bytes in place, in shared memory, instead of copying it there.

        nbytes: from 1 to max_msg_size.
        defer: seconds before the message may be delivered, at most max_req_timeout.
        timeout: seconds to wait for room; None: for ever, 0: not at all.
        zero: clear the buffer first; with False it has bytes of earlier messages.
        properties: as in publish.

        Returns a Loan, a context manager: `with producer.loan(n) as buffer: buffer[:] = data`
        yields a writable memoryview and publishes the message at the end of the block, or drops it
        if the block raised.

        Raises BadArgument if nbytes is 0. The block raises as publish does, when it begins and when
        it ends.
        """

    def close(self) -> None:
        """Publish no more: every later call raises Gone. May be called again."""

@final
class Loan:
    """A body that is written in place, in shared memory; made by Producer.loan.

    `with loan as buffer` yields a writable memoryview, publishes the message at the end of the
    block, and cancels it if the block raised. If a slice or an array that was made of the buffer
    outlives the block, the end raises BufferError and nothing is published.
    """

    @property
    def id(self) -> str | None:
        """Id of the message, 16 hexadecimal digits; None before it is published."""

    def truncate(self, nbytes: int) -> None:
        """Publish only the first nbytes bytes of the buffer. May be called again in the block.

        nbytes: from 1 to the size of the loan. The rest stays the message's memory until the
        message is finished. Raises BadArgument if nbytes is out of range, RuntimeError outside the
        with block.
        """

    def __enter__(self) -> memoryview:
        """Take room for the body. Returns a writable memoryview; raises as Producer.publish."""

    def __exit__(self, *exc: object) -> None:
        """Publish the message, or cancel the loan if the block raised (exc)."""

class Consumer:
    """Takes from one channel.

    msg_timeout: ns; 0: the queue's default, -1: never while the consumer lives. batch_type: the
    subclass of Batch that take_many returns. on_forked() is called in a forked child and returns a
    new (broker, queue, serial).
    """

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
    ) -> None: ...
    @property
    def topic(self) -> str:
        """Name of the topic."""

    @property
    def channel(self) -> str:
        """Name of the channel."""

    @property
    def closed(self) -> bool:
        """True after close was called."""

    @property
    def in_flight(self) -> int:
        """Number of messages that were taken and not settled yet; 0 when it is closed."""

    @property
    def session(self) -> tuple[int, int, int] | None:
        """(queue, serial, index) of its session in the queue; None when it is closed."""

    @property
    def max_in_flight(self) -> int:
        """The largest number of messages that may be in flight; 0: it takes none."""

    @overload
    def take(self, timeout: None = None) -> Message:
        """Take the next message of the channel; it is in flight until it is settled.

        timeout: seconds to wait for a message; None: for ever, 0: not at all. While max_in_flight
        messages are in flight there is nothing to take.

        Returns a Message, or None after the timeout.

        Raises Gone if the topic or channel was deleted, the instance stopped or the consumer
        closed, and ValueError if the timeout is negative.
        """

    @overload
    def take(self, timeout: float | None) -> Message | None: ...
    def take_body(self, timeout: float | None = None) -> bytes | Message | None:
        """Take the next message, copy its body and finish it, in one call, if it is sealed.

        timeout: seconds to wait for a message; None: for ever, 0: not at all.

        Returns the body; a Message that is still in flight if it is longer than 4096 bytes, or not
        sealed; None after the timeout. Raises as `take` does. If the process dies in the call, the
        message is finished or is delivered again.
        """

    def take_many(self, n: int, timeout: float | None = None) -> Any:
        """Take up to n messages in one call, as soon as there is at least one.

        n: the largest number of messages, 1 or more; more than 65536 count as that.
        timeout: seconds to wait for the first message; None: for ever, 0: not at all.

        Returns a Batch of 1 to n messages, or an empty one after the timeout.

        Raises Gone as take does, and ValueError if n is below 1 or the timeout is negative.
        """

    def redrive(self, message: Message, queue: int, serial: int) -> None:
        """Move a message in flight to this consumer to the queue of another topic's channel,
        without its failures and with the time of the call as its timestamp. queue, serial: of that
        channel. Raises NotInFlight, Full, MessageTooBig, Gone, and BadArgument if that topic is
        paused; after all but NotInFlight the message is still in flight to this consumer."""

    def limit(self, max_in_flight: int) -> None:
        """Change how many messages may be in flight from now on.

        max_in_flight: that number; 0 pauses the consumer. Messages that are in flight already stay
        so. A thread that is waiting does not see the new limit until it is woken. Raises Gone when
        the consumer is closed.
        """

    def __iter__(self) -> Iterator[Message]: ...
    def __next__(self) -> Message: ...
    @property
    def _broker(self) -> Broker:
        """The broker that it is open on now; in a forked child another one."""

    #: Called when there was nothing to take.
    _beacon: Callable[[], None] | None

    def close(self) -> None:
        """Return the messages that are not settled to the channel, and wake the waiting threads.

        They, and every later call, raise Gone; an iteration ends. May be called again.
        """

class Lanes:
    """Takes from many channels, its lanes, by a policy.

    strict: serve a level only while those before it have nothing; else by weights. weights: one for
    each level, 1 to 1000000. max_in_flight: over all lanes. batch_type: the subclass of Batch that
    take_many returns. follows: hear of topics and channels that come and go.

    A subclass has these methods, which are called without any lock held: `_gone(consumer)`, when
    the channel of a lane was deleted: it removes the lane, or raises; `_forked()`, in a forked
    child: it calls `reopen` and adds lanes; `_names()`, with follows: before the first take, and
    when topics or channels have come or gone since.
    """

    def __init__(
        self,
        broker: Broker,
        strict: bool,
        weights: Sequence[int],
        max_in_flight: int,
        batch_type: type[Batch],
        follows: bool,
    ) -> None: ...
    @property
    def closed(self) -> bool:
        """True after close was called."""

    @property
    def max_in_flight(self) -> int:
        """The largest number of messages that may be in flight, over all topics; 0: it takes
        none."""

    @property
    def consumers(self) -> list[Consumer]:
        """The consumers of its lanes, in the order in which they were added."""

    def add(self, consumer: Consumer, level: int) -> None:
        """Add a lane behind the others of its level."""

    def remove(self, consumer: Consumer) -> None:
        """Remove a lane; its consumer is to be closed afterwards."""

    @overload
    def take(self, timeout: None = None) -> Message:
        """Take the next message by the policy; it is in flight until it is settled.

        timeout: seconds to wait for a message; None: for ever, 0: not at all. While max_in_flight
        messages are in flight there is nothing to take.

        Returns a Message, whose `topic` tells where it comes from, or None after the timeout.

        Raises Gone if one of the topics or channels was deleted (those of a pattern are left out
        instead), the instance stopped or the consumer closed, and ValueError if the timeout is
        negative.
        """

    @overload
    def take(self, timeout: float | None) -> Message | None: ...
    def take_many(self, n: int, timeout: float | None = None) -> Any:
        """Take up to n messages of one topic in one call, as soon as there is at least one.

        n: the largest number of messages, 1 or more; more than 65536 count as that.
        timeout: seconds to wait for the first message; None: for ever, 0: not at all.

        Returns a Batch of 1 to n messages, or an empty one after the timeout.

        Raises Gone as take does, and ValueError if n is below 1 or the timeout is negative.
        """

    def wait(self, deadline_ns: int) -> bool:
        """Sleep until there may be something to take, or to report, for at most 1 s.

        deadline_ns: CLOCK_MONOTONIC ns; 0: only look. Returns whether there is. Take then, or call
        `pass_on`.
        """

    def wake(self) -> None:
        """End a wait, or the next one if there is none."""

    def pass_on(self) -> None:
        """Take nothing after all: wake other waiters of the channels instead."""

    def limit(self, max_in_flight: int) -> None:
        """Change the limit over all lanes."""

    def reopen(self, broker: Broker) -> bool:
        """In a forked child: drop the parent's lanes. Returns False if that was done already."""

    def __iter__(self) -> Iterator[Message]: ...
    def __next__(self) -> Message: ...
    @property
    def _broker(self) -> Broker:
        """The broker that it is open on now; in a forked child another one."""

    #: Called when there was nothing to take.
    _beacon: Callable[[], None] | None

    def close(self) -> None:
        """Return the messages that are not settled to their channels, and wake the waiting threads.

        They, and every later call, raise Gone; an iteration ends. May be called again.
        """

@final
class Window:
    """The deliveries of one connection of nsqd's TCP protocol, by id, for one thread at a time.

    An id is the 16 bytes that a client sends.
    """

    def __init__(self, consumer: Consumer) -> None: ...
    def take(
        self, n: int, max_bytes: int, sample_rate: int = 0
    ) -> tuple[builtins.bytes, int] | None:
        """Take up to n messages, fewer once their bodies have max_bytes: (message frames, how
        many), or None if there is nothing to take. sample_rate: nsqd's; the messages outside the
        sample are finished, so there may be no frames. Raises Gone when the channel is deleted."""

    def finish_run(
        self, data: Any, start: int, end: int
    ) -> tuple[int, int, list[builtins.bytes] | None]:
        """Finish the messages that the FIN lines at the start of data[start:end] name: (where those
        lines end, how many were finished, the ids that were not in flight to this connection)."""

    def finish(self, id: builtins.bytes, /) -> bool:
        """Finish a message. Returns whether it was in flight to this connection."""

    def requeue(self, id: builtins.bytes, delay_ns: int) -> bool:
        """Requeue a message. Returns whether it was in flight to this connection."""

    def touch(self, id: builtins.bytes, /) -> bool:
        """Touch a message. Returns whether it was in flight to this connection."""

@final
class Intake:
    """The input of one connection of nsqd's TCP protocol, in the place of asyncio.BufferedProtocol.

    Between `begin` and `end` it publishes and answers the commands that `Producer.publish_run`
    would publish, if they are all that has arrived. Other input is the connection's.

    on_room, on_input: the connection's get_buffer and buffer_updated. on_unsent(bytes) is called
    with answers that the socket does not take now. waiter: of this process; what is published here
    does not wake its thread, and on_rung(numbers of queues) is called instead, after the answer. If
    it returns true, the thread is woken for the next 10 ms.
    """

    def __init__(
        self,
        on_room: Callable[[int], memoryview],
        on_input: Callable[[int], None],
        on_unsent: Callable[[builtins.bytes], None],
        waiter: Waiter | None = None,
        on_rung: Callable[[list[int]], bool] | None = None,
    ) -> None: ...
    def get_buffer(self, sizehint: int, /) -> memoryview:
        """Where the next input is to be written."""

    def buffer_updated(self, nbytes: int, /) -> None:
        """So many bytes of input have arrived."""

    def publishes(self, nbytes: int, /) -> bool:
        """Publish and answer so many bytes at the start of the room. Returns false if they are for
        the connection; nothing was done then."""

    def begin(
        self,
        fd: int,
        room: memoryview,
        producer: Producer,
        line: builtins.bytes,
        max_msg_size: int,
        max_body_size: int,
    ) -> None:
        """Publish from now on. fd: the socket, to which nothing else may be waiting to be written.
        room: the connection's buffer, which is empty. line: `MPUB <topic>\\n`."""

    def end(self) -> tuple[int, float]:
        """Publish no more: (messages published since `begin`, the last at: CLOCK_MONOTONIC s)."""

    def close(self) -> None:
        """Forget the connection."""

@final
class Waiter:
    """One thread that waits for many consumers with one doorbell."""

    def __init__(self, broker: Broker) -> None: ...
    def wait(self, consumers: Sequence[Consumer], deadline_ns: int) -> list[int]:
        """Sleep until a consumer may have something to take, is closed or is gone.

        consumers: consumers of one broker. deadline_ns: CLOCK_MONOTONIC ns; the call sleeps for at
        most 1 s. One thread at a time may wait. With 0 the call only looks, which any thread may
        do.

        Returns the indices of those consumers; none after the deadline or a call of `wake`. Take
        from each, or call `pass_on` for it. Raises Gone when the waiter or the broker is closed.
        """

    def wake(self) -> None:
        """End the wait, or the next one if there is none. Many calls count as one."""

    def pass_on(self, consumer: Consumer) -> None:
        """Take nothing from this consumer after all: wake the channel's next waiter instead."""

    def announce(self, consumer: Consumer, /) -> bool:
        """While a thread waits for this consumer: let it be woken for its queue again, after
        `Intake` has called on_rung for that. Returns whether there may be something to take. Any
        thread may call it."""

    def withdraw(self, consumer: Consumer, /) -> bool:
        """Undo `announce`. Returns the same."""

    def close(self) -> None:
        """Give its doorbell back; a wait ends with Gone."""

class Store:
    """One results store: key -> bytes. Base class of shmq.Results.

    store, serial: from Broker.find_store. on_forked() is called in a forked child; it attaches
    there and returns (Broker, store, serial). A key is str (as UTF-8) or bytes-like, 1 to 255
    bytes.

    Raises Gone if the store was deleted, and LayoutMismatch.
    """

    def __init__(
        self,
        broker: Broker,
        store: int,
        serial: int,
        name: str,
        on_forked: Callable[[], tuple[Broker, int, int]] | None = None,
    ) -> None: ...
    @property
    def name(self) -> str:
        """Name of the store."""

    @property
    def _broker(self) -> Broker:
        """The attachment, for the package."""

    def set(self, key: str | Buffer, value: Buffer, ttl: float | None = None) -> None:
        """Store the value under the key, in place of the one it has. Threads that wait for the
        key are woken. A death in the call leaves the old value or the new one.

        ttl: seconds after which the key expires; None: never.

        Raises Full if the store has `max_keys` keys or `max_bytes` bytes, or /dev/shm is full;
        MessageTooBig if the value is longer than a message may be; BadArgument if the key has no
        byte or more than 255; ValueError for a ttl that is not above 0; and Gone.
        """

    def add(self, key: str | Buffer, value: Buffer, ttl: float | None = None) -> bool:
        """Store the value under the key if the key is absent. Returns whether it was stored: of
        several processes that add a key at a time exactly one gets True. ttl and errors: as
        `set`. Raises Full, MessageTooBig, BadArgument, ValueError and Gone."""

    @overload
    def get(self, key: str | Buffer, default: None = None) -> bytes | None:
        """Returns the value of the key; `default` if the key is absent or has expired. Raises
        BadArgument and Gone."""

    @overload
    def get(self, key: str | Buffer, default: _Default) -> bytes | _Default: ...
    @overload
    def pop(self, key: str | Buffer, default: None = None) -> bytes | None:
        """Delete the key. Returns its value; `default` if the key is absent. Of several processes
        that pop a key exactly one gets the value. If this process dies in the call, the value may
        be gone. Raises BadArgument and Gone."""

    @overload
    def pop(self, key: str | Buffer, default: _Default) -> bytes | _Default: ...
    def delete(self, key: str | Buffer, value: Buffer | None = None) -> bool:
        """Delete the key; with `value` only if that is its value. Returns whether it was deleted.
        Raises BadArgument and Gone."""

    def incr(
        self,
        key: str | Buffer,
        by: int = 1,
        least: int | None = None,
        most: int | None = None,
        ttl: float | None = None,
        renew: bool = False,
    ) -> int | None:
        """Add `by` to the number under the key. Returns the result. A key that is absent counts as
        0. The number is stored as decimal text, so `int(store.get(key))` is the number, and
        `set(key, b"5")` sets it.

        least, most: bounds of the result; None: those of a signed 64-bit number. If the result
        would be out of bounds, nothing is changed and None is returned.
        ttl: seconds after which a key that this call creates expires; a key that was there keeps
        its time, unless renew is true: then it expires `ttl` seconds after this call, if that
        changes it.

        Raises BadArgument if the value is no whole number; and what `set` raises.
        """

    def wait(
        self, key: str | Buffer, timeout: float | None = None, delete: bool = False
    ) -> bytes | None:
        """Wait until the key has a value. Returns the value; None after `timeout` seconds (None: no
        limit). delete: delete the key too, as `pop`. Raises BadArgument and Gone."""

    def wait_any(
        self, keys: Sequence[_Key], timeout: float | None = None, delete: bool = False
    ) -> tuple[_Key, bytes] | None:
        """Wait until one of the keys has a value. Returns (key, value) of the first one in the
        sequence that has one; None after `timeout` seconds (None: no limit). delete: delete that
        key too. Raises ValueError if there are no keys, BadArgument and Gone."""

    def stripe(self, key: str | Buffer) -> int:
        """The stripe of the key, from 0 to 63: `wait_news` waits for stripes."""

    def seen(self) -> list[int]:
        """How often a key of each of the 64 stripes was stored."""

    def wait_news(self, waiter: Waiter, stripes: int, seen: list[int], deadline_ns: int) -> bool:
        """Sleep until a key of one of the `stripes` (bits) is stored since `seen`, until
        `deadline_ns` (CLOCK_MONOTONIC), for 1 s, or until `waiter.wake`. Returns whether another
        look is worth it. Raises Gone."""

    def scan(
        self, bucket: int, values: bool = False, room: int = 65536
    ) -> tuple[list[tuple[bytes, Any, int | None]], int | None]:
        """Some keys from `bucket` (0 at first) on, and where to go on (None: that was all). Each is
        (key, value, ttl), or without `values` (key, length of the value, ttl); ttl: ns left, None:
        no limit. room: bytes to copy under one hold of the lock."""

    def info(self) -> tuple[int, int, int, int, int, int, int, int, int]:
        """keys, max_keys, bytes, max_bytes; since it was made: stored, removed, expired, refused;
        and the bytes of memory for keys and values that it has taken."""

    def sweep(self, limit: int = 4096) -> tuple[int, bool]:
        """Remove what has expired among the next `limit` entries: (number, whether there is more to
        look at). Raises Busy."""

    def trim(self) -> int:
        """Give memory behind the last value back to the system. Returns the bytes. Raises Busy."""

    def retire(self) -> None:
        """Close the store for everybody else; this handle may still `scan`."""

@final
class Message:
    """One delivery; made by Consumer.take and Batch. It does not change.

    Settle it once, with finish or requeue; until then it is in flight, and it is delivered again
    after its timeout. `with message` finishes it at the end of the block, or requeues it if the
    block raised, unless it was settled in the block. len() is the length of the body in bytes, and
    a Message can be used as a buffer of its body.

    A body of up to 4096 bytes is copied when it is taken. A longer one is copied when it is first
    asked for, which raises NotInFlight if the message is no longer in flight.
    """

    @property
    def id(self) -> str:
        """Id of the message, 16 hexadecimal digits."""

    @property
    def body(self) -> bytes:
        """The body as bytes. Raises NotInFlight if a long one was first asked for too late."""

    @property
    def view(self) -> memoryview:
        """The body in shared memory, read-only; it stays in place as long as the view lives."""

    @property
    def timestamp(self) -> int:
        """Time of publishing, CLOCK_REALTIME in ns."""

    @property
    def attempts(self) -> int:
        """Number of deliveries so far, this one included."""

    @property
    def properties(self) -> Mapping[str, bytes]:
        """The values beside the body, by name; read-only, and empty for most messages. Raises
        LayoutMismatch if something has overwritten them."""

    @property
    def sealed(self) -> bool:
        """Whether a pool or a queue of this instance put it, in a process that may attach. Only
        such a body may be unpickled."""

    @property
    def topic(self) -> str:
        """Name of the topic it was taken from."""

    def finish(self) -> None:
        """Finish the message: it is never delivered again on this channel. nsqd's FIN.

        Raises NotInFlight if it timed out, was settled before or was dropped by emptying the
        channel, or if its consumer was closed.
        """

    def requeue(self, delay: float | None = None, failed: bool = True) -> None:
        """Give the message back to its channel, to be delivered again. nsqd's REQ.

        delay: seconds before it may be delivered; more than max_req_timeout counts as that. None:
        the channel's retry_delay if the message failed, else 0. failed: whether this counts as a
        failure; after max_attempts failures the message goes to the channel's dead topic instead.
        Raises NotInFlight as finish does, and ValueError if delay is negative.
        """

    def reject(self, error: str | None = None) -> None:
        """Give the message up: it goes to the channel's dead topic and is not delivered again.

        error: what went wrong; the first 1024 bytes of it are kept with the message. Raises
        NotInFlight as finish does, BadName if the dead topic's name would be too long (choose one
        with the setting dead_letter), and BadArgument for a message that is a dead letter already.
        """

    def touch(self) -> None:
        """Begin the message's timeout again, to have more time. nsqd's TOUCH.

        The new deadline is the consumer's message timeout from now, and at most max_msg_timeout
        after the delivery. Raises NotInFlight as finish does.
        """

    def reply(self, body: Buffer) -> None:
        """Give the reply to a message that `Broker.request` published. It finishes nothing: finish
        the message too. If it is delivered again, the last reply before the requester looks counts.

        body: the reply, bytes or another buffer. Raises BadArgument if nobody asked for a reply,
        and what `Results.set` raises.
        """

    def __len__(self) -> int: ...
    def __enter__(self) -> Self:
        """Returns the message."""

    def __exit__(self, *exc: object) -> None:
        """Finish the message, or requeue it if the block raised (exc)."""

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: only the process that took a message can settle it."""

class Batch:
    """Deliveries taken together, whose bodies were copied once into one block in Arrow's layout.

    finish, requeue and touch act on the messages that are not settled yet; each may also be settled
    singly. `with batch` finishes those at the end of the block, or requeues them if it raised.
    """

    __slots__: ClassVar[tuple[str, ...]]
    @property
    def topic(self) -> str | None:
        """Name of the topic they were taken from; all messages of a batch come from one. None of an
        empty batch."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Message]: ...
    def __getitem__(self, index: int) -> Message: ...
    def bodies(self) -> list[bytes]:
        """Returns the bodies as a list of bytes, in the order of delivery. They are copies of the
        batch's own, so this works after the messages were settled too."""

    def blocks(self) -> list[bytes]:
        """Returns the properties of each message as a block, in the order of delivery. That of a
        message without any is empty."""

    def column(self, name: str, /) -> memoryview:
        """Returns one field of all messages as a read-only memoryview; the bodies are not copied.

        name: "ids" (uint64, one for each message), "timestamps" (int64, CLOCK_REALTIME ns),
        "attempts" (uint16), "offsets" (int64, len + 1 of them) or "data" (bytes): body i is
        data[offsets[i]:offsets[i + 1]]. Raises ValueError if there is no such column.
        """

    def __arrow_c_array__(
        self, requested_schema: CapsuleType | None = None
    ) -> tuple[CapsuleType, CapsuleType]:
        """Returns the batch through Arrow's C data interface: the capsules of a schema and of a
        struct array with the columns id (uint64), timestamp (timestamp[ns, UTC]), attempts
        (uint16) and body (large_binary), without nulls. The bodies are not copied again, and stay
        valid after the messages were settled and the broker was closed.

        requested_schema: taken no notice of, as the protocol allows; cast the columns.
        """

    def __arrow_c_stream__(self, requested_schema: CapsuleType | None = None) -> CapsuleType:
        """Returns the same as the capsule of a stream of one array."""

    def import_arrow(
        self, importer: Callable[[int, object], _Imported], schema: object
    ) -> _Imported:
        """Returns what `importer` makes of the same array, without capsules and without a schema to
        read.

        importer: called with the address of a struct ArrowArray, which it may move elsewhere, and
        with `schema`; the struct is gone when it returns. schema: its own form of the schema of
        `__arrow_c_array__`. Raises what it raises.
        """

    def finish(self) -> None:
        """Finish all messages that are not settled yet, in one call.

        Raises NotInFlight if some of them timed out or were settled elsewhere; the others are
        finished all the same.
        """

    def requeue(self, delay: float | None = None, failed: bool = True) -> None:
        """Give all messages that are not settled yet back to the channel.

        delay, failed: as of Message.requeue. Raises NotInFlight if some were no longer in flight,
        after the others were requeued, and ValueError if delay is negative.
        """

    def reject(self, error: str | None = None) -> None:
        """Give all messages that are not settled yet up, as Message.reject does.

        error: what went wrong, kept with each of them. Raises NotInFlight if some were no longer in
        flight, after the others were rejected, and otherwise as Message.reject.
        """

    def touch(self) -> None:
        """Begin the timeout of all messages that are not settled yet again.

        Raises NotInFlight if some were no longer in flight, after the others were touched.
        """

    def __enter__(self) -> Self:
        """Returns the batch."""

    def __exit__(self, *exc: object) -> None:
        """Finish what is not settled, or requeue it if the block raised (exc)."""
