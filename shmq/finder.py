"""From the names of topics and channels to the handles of the extension, which are created if they
are missing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from shmq import _native, layout, shm
from shmq.errors import Gone, NotRunning
from shmq.names import check_name
from shmq.option_types import to_ns
from shmq.procfs import Process

if TYPE_CHECKING:
    from shmq.sources import NativeSource

T = TypeVar("T")

#: How long the supervisor may take to create a topic, a channel or a results store.
REQUEST_SECONDS: Final = 10.0
#: How long to wait before looking again at a results store, topic or channel whose deletion has
#: begun.
_DELETION_SECONDS: Final = 0.005
#: How long to wait for a supervisor that the process of an embedded broker starts again.
_RESTART_SECONDS: Final = 60.0
_RESTART_PAUSE: Final = 0.01
#: The instance, or the data path, of an embedded broker that was given no name or no disk: it has
#: the number of the process that starts its supervisor again.
_EMBEDDED: Final = re.compile(r"\b(?:tree|embedded|shmq-memory)-(\d+)-[0-9a-f]+$")


class Finder:
    """The base class of Broker that finds and creates topics and channels."""

    instance: str = ""

    def native(self) -> _native.Broker:
        """The extension's handle. Raises Gone if the broker was closed or stopped."""
        raise NotImplementedError

    def _request(self, kind: str, topic: str, channel: str | None = None) -> None:
        number = layout.constant(kind)
        self._have_done(
            lambda native: native.request(number, topic, channel, to_ns(REQUEST_SECONDS))
        )

    def views(self) -> NativeSource:
        """Read-only views of the segments. Raises Gone."""
        raise NotImplementedError

    def _comes_back(self, data_path: str) -> bool:
        """Whether a process lives that starts the supervisor again whenever it ends."""
        found = _EMBEDDED.search(self.instance) or _EMBEDDED.search(data_path)
        return found is not None and Process.look(int(found[1])) is not None

    def _have_done(self, ask: Callable[[_native.Broker], object]) -> None:
        """Have the supervisor do something. If there is none, wait for one that is being started.
        Raises NotRunning, with the command that starts it."""
        deadline = None
        while True:
            try:
                ask(self.native())
                return
            except NotRunning as exc:
                deadline = deadline or time.monotonic() + _RESTART_SECONDS
                path = self.views().directory.data_path
                if time.monotonic() > deadline or not self._comes_back(path):
                    start = shm.to_start(self.instance, path)
                    raise NotRunning(f"{exc}; start one with `{start}`") from None
            time.sleep(_RESTART_PAUSE)

    def _opened(
        self,
        find: Callable[[], tuple[_native.Broker, int, int]],
        make: Callable[[_native.Broker, int, int], T],
    ) -> T:
        """Return `make(*find())`. If the topic or channel is deleted between the two, both are
        tried again, which creates it again, for as long as a request may take. An ephemeral
        channel is deleted whenever its last consumer leaves, so this happens."""
        deadline = time.monotonic() + REQUEST_SECONDS
        before = None
        while True:
            found = find()  # raises Gone if the broker was closed or stopped
            try:
                return make(*found)
            except Gone:
                if time.monotonic() > deadline:
                    raise
                if found == before:
                    # A deletion closes the memory first and clears the directory after it. Let the
                    # supervisor come to that, or its successor if it died between the two.
                    time.sleep(_DELETION_SECONDS)
                before = found

    def _topic(self, topic: str) -> tuple[_native.Broker, int, int]:
        """(attachment, index, generation) of the topic, which is created if it is missing."""
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            native = self.native()
            found = native.find_topic(topic)
            if found is not None:
                return native, *found
            if time.monotonic() > deadline:
                raise Gone(f"topic {topic!r} was deleted each time it was made; try again")
            self._request("CREATE_TOPIC", topic)

    def _queue(self, topic: str, channel: str) -> tuple[_native.Broker, int, int]:
        """(attachment, queue, serial) of the channel, which is created if it is missing."""
        deadline = time.monotonic() + REQUEST_SECONDS
        while True:
            native, index, generation = self._topic(topic)
            found = native.find_queue(index, channel)
            # It is still the same topic, so the channel is its, not that of a successor.
            if found is not None and native.find_topic(topic) == (index, generation):
                return native, *found
            if time.monotonic() > deadline:
                raise Gone(f"{topic}/{channel} was deleted each time it was made; try again")
            if found is None:
                self._request("CREATE_CHANNEL", topic, channel)

    def _joined(self, topic: str, channel: str) -> tuple[_native.Broker, int, int]:
        """As `_queue`, but a topic that was deleted stays deleted. Raises Gone then."""
        native, index, generation = self._existing_topic(topic)
        if native.find_queue(index, channel) is None:
            self._request("JOIN_CHANNEL", topic, channel)
        found = native.find_queue(index, channel)
        if found is None or native.find_topic(topic) != (index, generation):
            raise Gone(f"{topic}/{channel} was deleted while it was joined")
        return native, *found

    def _existing_topic(self, topic: str) -> tuple[_native.Broker, int, int]:
        native = self.native()
        found = native.find_topic(check_name(topic, "topic"))
        if found is None:
            raise Gone(f"there is no topic {topic!r} on instance {self.instance!r}")
        return native, *found

    def _existing_queue(self, topic: str, channel: str) -> tuple[_native.Broker, int, int]:
        native, index, _ = self._existing_topic(topic)
        found = native.find_queue(index, check_name(channel, "channel"))
        if found is None:
            raise Gone(f"there is no channel {topic}/{channel} on instance {self.instance!r}")
        return native, *found
