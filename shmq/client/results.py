"""One results store: key -> bytes in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from shmq import _native, arguments
from shmq.client.handle import Reduction, Shown, home_of, reduction

if TYPE_CHECKING:
    from typing_extensions import Buffer

Key = TypeVar("Key", bound="str | Buffer")


@dataclass(frozen=True)
class ResultsStats:
    """The counts of a results store.

    keys, bytes: what it holds; keys that have expired count until they are met or swept. bytes
    counts as `max_bytes` does: each pair takes the bytes of its key and value and 16 more, rounded
    up to 64. max_keys, max_bytes: its limits. committed: bytes of memory for keys and values that
    it has taken from the system.

    stored, removed, expired, refused: how often, since it was made, a value was stored, deleted or
    popped, removed because its time was over, and refused for want of room.
    """

    keys: int
    max_keys: int
    bytes: int
    max_bytes: int
    stored: int
    removed: int
    expired: int
    refused: int
    committed: int


class Results(_native.Store, metaclass=Shown):
    """A results store; returned by `Broker.results`. Any thread of any process may use it.

    A key is a str (stored as UTF-8) or bytes, of 1 to 255 bytes. A value is bytes or another
    buffer, at most as long as a message (`max_msg_size`); `get` returns bytes. `ttl` is the time to
    live in seconds; None means no limit. A key whose time is over is never returned.

    Each call is atomic: if the process dies in it, the key has its old value or the new one.

    `set(key, value, ttl=None)` stores a value, and wakes whoever waits for the key.
    `get(key, default=None)` returns it. `pop(key, default=None)` returns and deletes it.
    `add(key, value, ttl=None) -> bool` stores it only if the key is absent.
    `delete(key, value=None) -> bool` deletes it, with `value` only if that is its value.
    `incr(key, by=1, least=None, most=None, ttl=None, renew=False) -> int | None` adds to a number.
    `wait(key, timeout=None, delete=False) -> bytes | None` waits until the key is there, and
    `wait_any(keys, timeout=None, delete=False) -> (key, value) | None` until one of them is;
    `wait_async` and `wait_any_async` do so in asyncio. `len()`, `in` and iteration work as with a
    dict.

    Raises Full if the store has as many keys or bytes as it may, MessageTooBig, BadArgument for a
    key that is empty or too long, and Gone if the store was deleted or the broker was stopped. It
    can be pickled: the copy in another process is a handle of its own for the same store.
    """

    __slots__ = ("__dict__", "__weakref__", "_home")
    _internal = frozenset(
        {"info", "retire", "scan", "seen", "stripe", "sweep", "trim", "wait_news"}
    )

    def __init__(
        self,
        broker: _native.Broker,
        store: int,
        serial: int,
        name: str,
        on_forked: Callable[[], tuple[_native.Broker, int, int]],
    ) -> None:
        super().__init__(broker, store, serial, name, on_forked)
        self._home = home_of(on_forked)

    def __reduce__(self) -> Reduction:
        return reduction(self._home, "results", self.name)

    def __repr__(self) -> str:
        return f"<shmq.Results {self.name!r}>"

    # ---- like a dict ----

    def keys(self) -> Iterator[bytes]:
        """Yield every key, in no order. A key that is there all the time is yielded; one that comes
        or goes meanwhile may be. While the store grows, a key may be yielded twice. Raises Gone."""
        for key, _, _ in self._scan(False):
            yield key

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every (key, value), as `keys` does. Each pair is whole. Raises Gone."""
        for key, value, _ in self._scan(True):
            yield key, value

    def _scan(self, values: bool) -> Iterator[tuple[bytes, bytes, int | None]]:
        bucket: int | None = 0
        while bucket is not None:
            found, bucket = self.scan(bucket, values)
            yield from found

    def __iter__(self) -> Iterator[bytes]:
        return self.keys()

    def __contains__(self, key: str | Buffer) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        """The number of keys. Those that have expired count until they are met or swept."""
        return self.info()[0]

    def __bool__(self) -> bool:
        return True  # an empty store is a store

    def stats(self) -> ResultsStats:
        """Return its counts and limits, read without a lock. Raises Gone after the broker was
        closed."""
        return ResultsStats(*self.info())

    # ---- asyncio ----

    async def wait_async(
        self, key: str | Buffer, timeout: float | None = None, delete: bool = False
    ) -> bytes | None:
        """Like `wait`, for asyncio: other tasks run meanwhile. A task that is cancelled takes
        nothing."""
        found = await self.wait_any_async((key,), timeout, delete)
        return None if found is None else found[1]

    async def wait_any_async(
        self, keys: Sequence[Key], timeout: float | None = None, delete: bool = False
    ) -> tuple[Key, bytes] | None:
        """Like `wait_any`, for asyncio: other tasks run meanwhile."""
        from shmq.client import results_aio

        timeout = arguments.limit("timeout", timeout)
        found = self.wait_any(keys, 0, delete)
        if found is not None or timeout == 0:
            return found
        return await results_aio.wait_any(self, keys, timeout, delete)
