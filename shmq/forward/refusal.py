"""Messages that the other side never takes, and what becomes of them.

A message is refused for its size or its headers alone, so another try gets the same answer and the
messages beside it are not concerned. A fault that concerns all messages (a stream that is missing,
a permission, a full disk) is never a refusal: to leave out messages because of it would empty the
channel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from shmq.errors import ShmqError
from shmq.forward.target import Away

#: The fates of a message that is refused.
STOP: Final = "stop"
DEAD: Final = "dead"
SKIP: Final = "skip"
POLICIES: Final = (STOP, DEAD, SKIP)

#: Names of messages in one line of the log.
_NAMES: Final = 100


class Refused(Away):
    """The target stored nothing of a batch, because it refuses one or several of its messages."""


@dataclass(frozen=True)
class Refusal:
    """A message that is refused."""

    name: str
    """The message's id, or its place in the source."""
    bytes: int
    """Of its body."""
    properties: int
    """Bytes of its properties, or of its headers."""
    why: str
    """The limit that it is over, as printable text."""
    of_headers: bool = False
    """Whether it would be taken without its properties or headers."""

    def __str__(self) -> str:
        more = f" and {self.properties} of properties or headers" if self.properties else ""
        return f"message {self.name}, {self.bytes} bytes{more}: {self.why}"


class Stopped(ShmqError):
    """A message was refused, and nothing was said about such messages."""

    def __init__(self, tried: str, refusal: Refusal, waits: str) -> None:
        """waits: where the message is now."""
        super().__init__(f"{tried}: refused: {refusal}")
        self.refusal, self.waits = refusal, waits


def told(refusals: Iterable[Refusal], done: str) -> list[str]:
    """Lines for the log. done: what became of the messages."""
    groups: dict[str, list[str]] = {}
    for each in refusals:
        groups.setdefault(each.why, []).append(f"{each.name} ({each.bytes} bytes)")
    return [
        f"{done}: {why}: {', '.join(names[first : first + _NAMES])}"
        for why, names in groups.items()
        for first in range(0, len(names), _NAMES)
    ]
