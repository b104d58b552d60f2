"""The part that both directions share: to go on until `stop`, also after the other system was
away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from shmq.forward.target import Away
from shmq.peers.documents import BadAnswer

#: Seconds between two attempts to reach the other system, at first and at most.
_FIRST_PAUSE: Final = 0.1
_MOST_PAUSE: Final = 10.0


@dataclass
class Progress:
    """Counts since the start."""

    messages: int = 0
    """Stored by this process."""
    bytes: int = 0
    """Of their bodies."""
    batches: int = 0
    resumed: int = 0
    """Messages that were stored already when they came."""
    skipped: int = 0
    """Messages that were left out: without a body, which no topic of shmq takes, or refused with
    --refused=skip."""
    refused: int = 0
    """Messages that the other side, or the topic, never takes."""
    dead: int = 0
    """Of them, those that became dead letters."""
    away: int = 0
    """How often the other system was away."""
    seconds: float = 0.0
    """How long this process forwarded."""


class Again(Exception):
    """Connect to the other system again, without a pause: its limits may have changed."""


class Other(Protocol):
    """The other system."""

    def idle(self) -> None:
        """Answer what it may have asked. Called every second while nothing is sent."""

    def close(self) -> None:
        """Close the connection, if there is one."""


class Loop:
    """Moves messages until `stop`."""

    def __init__(self, other: Other) -> None:
        self._other = other
        self._stopping = threading.Event()
        self._pause = _FIRST_PAUSE
        self._began = time.monotonic()
        self._said = ""
        """The text that was said of the other system, since it was away."""
        self._say: Callable[[str], None] = lambda text: None
        self.progress = Progress()
        self.connected = False
        """Whether the other system answered last."""
        self.began_at, self.stored_at = time.time(), 0.0
        """When this began, and when it stored something last, Unix time; 0: never."""

    def stop(self) -> None:
        """Have `run` return after the present batch. A signal handler may call it."""
        self._stopping.set()

    def run(self, until_empty: bool, say: Callable[[str], None]) -> None:
        """Move messages until `stop`, or until there are none.

        say: called with one line when the other system is away and when it is back. Raises
        LeaseFenced if another forwarder of the channel began, and ShmqError for what does not end
        by itself.
        """
        self._began, self._say = time.monotonic(), say
        try:
            while True:
                try:
                    self._connect()
                    self.connected = True
                    if self._move(until_empty):
                        return
                except Again:
                    if self._stopping.is_set():
                        return
                    continue
                except (Away, BadAnswer) as exc:
                    self.connected = False
                    self.progress.away += 1
                    text = str(exc)
                    if isinstance(exc, BadAnswer):
                        text = f"{self._other}: its answer is not as it should be: {exc}"
                    if text != self._said:
                        self._said = text
                        say(f"{text}; trying again")
                if self._stopping.wait(self._pause):
                    return
                self._pause = min(2 * self._pause, _MOST_PAUSE)
        finally:
            self.progress.seconds = time.monotonic() - self._began
            self._other.close()

    def _stored(self, messages: int, size: int) -> None:
        """Count a batch."""
        self._well()
        self._pause = _FIRST_PAUSE
        self.progress.messages += messages
        self.progress.bytes += size
        self.progress.batches += 1
        self.stored_at = time.time()

    def _well(self) -> None:
        """Say that the other system is back, if it was away: it has stored something, or there is
        nothing to store. That it lets us connect says little: it may be full."""
        if self._said:
            self._said = ""
            self._say(f"{self._other} is back")

    def _connect(self) -> None:
        raise NotImplementedError

    def _move(self, until_empty: bool) -> bool:
        """Move messages until the end, which is True."""
        raise NotImplementedError
