"""Requests and replies: a message that says where its reply goes, and the reply in a results store.

`ask` publishes a body with the property `reply-to`, `STORE/KEY/SECONDS/`; `receive` waits for the
key. `reply` stores the reply under the key for so many seconds. A request that times out deletes
the key; a reply that comes later expires by itself. The store is ephemeral: a stop of the broker
drops replies that nobody has taken.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, Final

from shmq.client.properties import REPLY_TO
from shmq.errors import BadArgument, Gone

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shmq._native import Message
    from shmq.client.consumer import Consumer
    from shmq.client.producer import Producer
    from shmq.client.results import Results

#: The store of all replies of an instance.
STORE: Final = "replies#ephemeral"
_PLACE: Final = re.compile(rb"([^/]+)/([^/]+)/([0-9.]+)")
_GRACE: Final = 60.0  # seconds that a reply outlives its request
_FOR_LONG: Final = 3600.0  # seconds that the reply to a request without a time limit is kept


def question(timeout: float | None) -> tuple[dict[str, str | bytes], bytes]:
    """The properties of a message that asks for a reply, and the key of the reply. timeout: of the
    request, in seconds."""
    key = _own + b"%012x" % next(_numbers)
    seconds = _FOR_LONG if timeout is None else timeout + _GRACE
    return {REPLY_TO: b"%s/%s/%.3f" % (STORE.encode(), key, seconds)}, key


#: Keys of this process are this random part and a number.
_own = os.urandom(16).hex().encode()
_numbers = itertools.count()


def _in_child() -> None:
    global _own
    _own = os.urandom(16).hex().encode()


os.register_at_fork(after_in_child=_in_child)


def ask(
    producer: Producer, store: Results, body: Buffer, timeout: float | None, room: float | None
) -> bytes:
    """Publish the body, and return the key of its reply. room: seconds to wait for room. Raises
    what `publish` raises, and Gone if the store was deleted; nothing was published then."""
    properties, key = question(timeout)
    store.get(key)  # raises Gone before anything is published
    producer.publish(body, timeout=room, properties=properties)
    return key


def receive(store: Results, key: bytes, topic: str, left: float | None) -> bytes:
    """Wait `left` seconds for the reply. Raises TimeoutError."""
    reply = None
    try:
        reply = store.wait(key, left, delete=True)
    finally:
        if reply is None:
            store.delete(key)
    return _in_time(reply, topic)


async def receive_async(store: Results, key: bytes, topic: str, left: float | None) -> bytes:
    """Like `receive`, for asyncio."""
    reply = None
    try:
        reply = await store.wait_async(key, left, delete=True)
    finally:
        if reply is None:
            store.delete(key)
    return _in_time(reply, topic)


def _in_time(reply: bytes | None, topic: str) -> bytes:
    if reply is None:
        raise TimeoutError(
            f"request to {topic!r}: no reply in time; the message may still be handled, and its "
            "reply is dropped then"
        )
    return reply


def reply(consumer: Consumer, message: Message, body: Buffer) -> None:
    """Store the reply to the message; `Message.reply` calls this."""
    where = _PLACE.fullmatch(message.properties.get(REPLY_TO, b""))
    if where is None:
        raise BadArgument(
            f"reply to message {message.id}: it was not published by `Broker.request`, so nobody "
            "waits for a reply"
        )
    name, key, seconds = where.groups()
    home = consumer._home
    if home is None:
        raise TypeError("this consumer was not made by a Broker, so it cannot reply")
    try:
        home.reply_store(name.decode()).set(key, body, float(seconds))
    except Gone:  # somebody has deleted the store since
        home.reply_store(name.decode(), again=True).set(key, body, float(seconds))
