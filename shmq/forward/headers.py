"""Properties as headers of NATS and Kafka, and back.

In NATS a header has the property's name, and its value as it is. A value that a header of NATS
cannot hold, and a name that the server takes for its own, go into a header `shmq-property-NAME`,
with percent signs for what cannot stand there. Back, what others wrote is not trusted: it is read
up to a limit, and `reply-to`, which names a place in an instance, is no property.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Final, TypeVar

from shmq.client.properties import MOST_BYTES, REPLY_TO, pack
from shmq.errors import BadArgument, MessageTooBig
from shmq.printing import LONGEST, printable

Properties = Mapping[str, bytes]
_Raw = TypeVar("_Raw")

#: Before the name of a property whose value is written with percent signs.
_CODED: Final = "shmq-property-"
#: Headers that the server acts on, or adds.
_SERVERS: Final = "nats-"
#: A header of NATS may hold this: printable ASCII, with no space around it.
_PLAIN: Final = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
#: More bytes of headers are not looked at: properties take three times their bytes at most, and
#: the server adds some.
_MOST_HEAD: Final = 32 << 10
#: Names of headers that a text shows.
_SHOWN: Final = 80


class NoProperties(Exception):
    """Headers that cannot be properties; the text says why, in printable words."""

    def __init__(self, why: str, size: int) -> None:
        """size: bytes of the headers, as far as they were looked at."""
        super().__init__(why)
        self.size = size


def sent(properties: Properties) -> Iterable[tuple[str, bytes]]:
    """The properties that leave the instance. Where a reply is awaited is its own affair."""
    return [(name, value) for name, value in properties.items() if name != REPLY_TO]


def nats_lines(properties: Properties) -> bytes:
    """The properties as lines of a message's head in NATS."""
    lines = []
    for name, value in sent(properties):
        if _PLAIN.fullmatch(value) and not name.startswith(_SERVERS):
            lines.append(b"%b: %b\r\n" % (name.encode(), value))
        else:
            coded = urllib.parse.quote_from_bytes(value, safe="").encode()
            lines.append(b"%b%b: %b\r\n" % (_CODED.encode(), name.encode(), coded))
    return b"".join(lines)


def read(make: Callable[[_Raw], bytes], raw: Iterable[_Raw]) -> list[bytes | NoProperties] | None:
    """The properties of messages from what they have as headers; None if none has any."""
    found: list[bytes | NoProperties] = []
    for each in raw:
        try:
            found.append(make(each))
        except NoProperties as exc:
            found.append(exc)
    return found if any(found) else None


def of_nats(head: bytes) -> bytes:
    """The block of the properties in the head of a message of NATS. Raises NoProperties."""
    if not head:
        return b""
    if len(head) > _MOST_HEAD:
        raise NoProperties(f"properties have at most {MOST_BYTES} bytes", len(head))
    found = []
    for line in head.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        text, value = name.decode("latin-1").lower(), value.strip(b" \t")
        if not colon or text.startswith(_SERVERS):
            continue
        if text.startswith(_CODED):
            text, value = text.removeprefix(_CODED), urllib.parse.unquote_to_bytes(value)
        found.append((text, value))
    return packed(found)


def packed(headers: Iterable[tuple[str, bytes | None]]) -> bytes:
    """The block of the properties in headers. Raises NoProperties for a name that none has, for a
    name that comes twice, and for too many bytes."""
    found: dict[str, bytes] = {}
    size = 0
    for name, value in headers:
        name = name.lower()
        size += len(name) + len(value or b"") + 3
        if size > MOST_BYTES:
            raise NoProperties(f"properties have at most {MOST_BYTES} bytes", size)
        if name == REPLY_TO:
            continue
        if name in found:
            raise NoProperties(
                f"the header {printable(name, _SHOWN)} comes twice, and a property has one value",
                size,
            )
        found[name] = value or b""
    try:
        return pack(found)
    except (BadArgument, MessageTooBig) as exc:
        why = printable(str(exc), LONGEST)
        raise NoProperties(f"a header is no property: {why}", size) from None
