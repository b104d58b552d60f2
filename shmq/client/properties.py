"""Properties of messages: small named values beside the body.

A producer gives them as a mapping of names to str or bytes, and a consumer reads them as a
read-only mapping of names to bytes. A name has 1 to 64 of the characters a-z 0-9 . _ -; names that
begin with `shmq-` are shmq's own. The properties of a message take at most 4096 bytes, 3 bytes for
each and its name included. docs/on-disk.md has the block into which they are packed.

The names below have a meaning that all programs share. shmq stores them like any other and acts on
none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from shmq import _native

#: Properties as a producer gives them.
Properties: TypeAlias = Mapping[str, str | bytes]

#: Messages with the same key belong together: a customer, an order.
KEY: Final = "key"
#: How long the message is of use, in seconds from its publishing, as a decimal number.
TTL: Final = "ttl"
#: Where the reply is awaited: STORE/KEY/SECONDS, as `Broker.request` writes it.
REPLY_TO: Final = "reply-to"
#: W3C Trace Context, version 00: https://www.w3.org/TR/trace-context
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
#: The media type of the body: `application/json`.
CONTENT_TYPE: Final = "content-type"

#: The most bytes that the properties of one message may take.
MOST_BYTES: Final = _native.CONSTANTS["PROPERTIES_MOST"]

_NONE: Final[Mapping[str, bytes]] = MappingProxyType({})


def pack(properties: Properties | None) -> bytes:
    """The block of these properties; b"" for None and for an empty mapping.

    Raises BadArgument for a name that is none or is reserved, MessageTooBig for more than 4096
    bytes, and TypeError for anything but a mapping of str to str or bytes.
    """
    return _native.pack_properties(properties)


def unpack(block: bytes) -> Mapping[str, bytes]:
    """The properties in a block, read-only. Raises LayoutMismatch if it was overwritten."""
    return _native.unpack_properties(block) if block else _NONE


def pack_all(
    properties: Properties | Iterable[Properties | None] | None, count: int | None
) -> bytes | list[bytes] | None:
    """The blocks for `count` messages: one for all of them if `properties` is one mapping, else one
    for each. Raises as `pack`, and ValueError if there are more or fewer than `count`; None if that
    is not known yet."""
    if properties is None:
        return None
    if isinstance(properties, Mapping):
        return pack(properties)
    each: object = properties
    if isinstance(each, str | bytes) or not isinstance(each, Iterable):
        raise TypeError(
            "properties must be one mapping for all messages, or one mapping or None for each, not "
            f"{type(each).__name__}"
        )
    blocks = [pack(one) for one in each]
    if count is not None and len(blocks) != count:
        raise ValueError(f"{len(blocks)} properties for {count} messages: give one for each")
    return blocks
