"""The part of a broker's handle that asks and answers: results stores, requests and replies."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Final, TypeVar

from shmq import _native, layout
from shmq.arguments import limit, whole
from shmq.client import Producer, Results, requests
from shmq.configurable import Configurable
from shmq.errors import BadArgument, Gone
from shmq.finder import REQUEST_SECONDS
from shmq.names import check_name
from shmq.option_types import to_ns

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

#: Limits of a results store that is created without any.
RESULTS_KEYS: Final = 1_000_000
RESULTS_BYTES: Final = 64 << 20


class Answers(Configurable):
    """Results stores, requests and replies of a `Broker`."""

    def _answers_begin(self) -> None:
        self._askers: dict[str, Producer] = {}
        self._reply_stores: dict[str, Results] = {}

    # ---- what the rest of the handle has ----

    def producer(self, topic: str) -> Producer:
        """Return a producer for the topic."""
        raise NotImplementedError

    # ---- results ----

    def results(
        self,
        name: str = "results",
        max_keys: int = RESULTS_KEYS,
        max_bytes: int = RESULTS_BYTES,
    ) -> Results:
        """Return the results store of this name, which is created if it is missing: key -> bytes,
        shared by all processes of the instance.

        name: as for topics. A store whose name ends in `#ephemeral` is lost at a stop; others are
        written to the data path and read back at the next start.
        max_keys: how many keys it may have, 1 to 2^24. max_bytes: how much memory its keys and
        values may take, 65536 to 2^38. A store that exists keeps the limits it was created with.

        Raises BadName, BadArgument for the limits, NotRunning (if it must be created and no
        supervisor lives), Gone, and ShmqError if the supervisor refuses (there are 128 stores) or
        does not answer within 10 s.
        """
        check_name(name, "results store")
        for label, value, most in (
            ("max_keys", max_keys, layout.constant("STORE_KEYS_MAX")),
            ("max_bytes", max_bytes, layout.constant("ARENA_MAX")),
        ):
            if not 1 <= whole(label, value) <= most:
                raise BadArgument(f"{label} must be from 1 to {most}, not {value}")
        find = functools.partial(self._results, name, max_keys, max_bytes)
        return self._opened(
            find, lambda native, place, serial: Results(native, place, serial, name, find)
        )

    def delete_results(self, name: str) -> None:
        """Delete the results store with all its keys. Raises Gone if there is none, BadName, and
        NotRunning."""
        if self.native().find_store(check_name(name, "results store")) is None:
            raise Gone(f"there is no results store {name!r} on instance {self.instance!r}")
        self._request("DELETE_STORE", name)

    def results_names(self) -> list[str]:
        """Return the names of all results stores. Raises Gone."""
        return sorted(entry.name for entry in self.views().directory.live_stores())

    # ---- requests ----

    def request(self, topic: str, body: Buffer, timeout: float | None = None) -> bytes:
        """Publish a message that asks for a reply, and return the reply: what the consumer that got
        it gave to `Message.reply`. If the topic has several channels, the first reply counts.

        timeout: seconds to wait for room and for the reply; None: no limit. A reply that comes
        too late is dropped.

        Raises TimeoutError, what `Producer.publish` raises, and what `producer` and `results` raise
        when they create the topic and the store of the replies.
        """
        timeout = limit("timeout", timeout)
        began = time.monotonic()
        store, key = self._ask(topic, body, timeout, timeout)
        left = None if timeout is None else max(timeout - (time.monotonic() - began), 0)
        return requests.receive(store, key, topic, left)

    async def request_async(self, topic: str, body: Buffer, timeout: float | None = None) -> bytes:
        """Like `request`, for asyncio: other tasks run while it waits for the reply. It raises Full
        at once if there is no room for the message."""
        timeout = limit("timeout", timeout)
        store, key = self._ask(topic, body, timeout, 0)
        return await requests.receive_async(store, key, topic, timeout)

    def _ask(
        self, topic: str, body: Buffer, timeout: float | None, room: float | None
    ) -> tuple[Results, bytes]:
        """Publish a request. Returns the store and the key of its reply."""
        try:
            producer, store = self._asking(topic)
            return store, requests.ask(producer, store, body, timeout, room)
        except Gone:  # nothing was published
            producer, store = self._asking(topic, again=True)
            return store, requests.ask(producer, store, body, timeout, room)

    def _asking(self, topic: str, again: bool = False) -> tuple[Producer, Results]:
        """The handles for a request. again: the topic or the store was deleted; make new ones."""
        producer = self._askers.get(topic)
        if producer is None or again:
            producer = self._askers[topic] = self.producer(topic)
        return producer, self.reply_store(requests.STORE, again)

    def reply_store(self, name: str, again: bool = False) -> Results:
        """The results store of this name, kept open, for the rest of the package. again: open it
        anew."""
        store = None if again else self._reply_stores.get(name)
        if store is None:
            store = self._reply_stores[name] = self.results(name)
        return store

    def _results(self, name: str, max_keys: int, max_bytes: int) -> tuple[_native.Broker, int, int]:
        """(attachment, place, serial) of the results store, which is created if it is missing."""
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            native = self.native()
            found = native.find_store(name)
            if found is not None:
                return native, *found
            if time.monotonic() > deadline:
                raise Gone(f"results store {name!r} was deleted each time it was made; try again")
            self._have_done(
                lambda native: native.request_store(
                    name, max_keys, max_bytes, to_ns(REQUEST_SECONDS)
                )
            )
