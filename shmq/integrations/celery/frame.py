"""kombu's messages as bytes: a line of JSON with all but the body, then the body as it is."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

from kombu.serialization import registry
from kombu.utils import json as rich_json

Payload = dict[str, Any]

_END: Final = b"\n"
#: kombu's JSON writes this for values that plain JSON does not have.
_RICH: Final = b'"__type__"'

#: Names of kombu's serializers whose bodies may run code.
_PICKLES: Final = ("pickle", "dill", "cloudpickle")

_dumps: Final = json.JSONEncoder(separators=(",", ":")).encode


def pack(payload: Payload) -> bytes:
    """The bytes of a message. Raises TypeError for headers that JSON cannot hold."""
    body = payload["body"]
    rest = {name: value for name, value in payload.items() if name != "body"}
    try:
        head = _dumps(rest)
    except TypeError:
        head = rich_json.dumps(rest)
    return b"".join(
        (head.encode(), _END, body.encode() if isinstance(body, str) else memoryview(body))
    )


def unpack(data: bytes) -> Payload:
    """The message in these bytes. Raises ValueError if they are none."""
    head, _, body = data.partition(_END)
    payload: Payload = rich_json.loads(head) if _RICH in head else json.loads(head)
    payload["body"] = body
    return payload


def unpickles(payload: Payload) -> bool:
    """Whether kombu unpickles the body, if the program accepts that."""
    kind = payload.get("content-type")
    return kind is not None and kind in {registry.name_to_type.get(name) for name in _PICKLES}


def due(payload: Payload) -> float | None:
    """When the task of a message is to begin, in seconds since 1970. None: at once."""
    eta = (payload.get("headers") or {}).get("eta")
    if not eta:
        return None
    try:
        at = eta if isinstance(eta, datetime) else datetime.fromisoformat(eta)
    except (TypeError, ValueError):
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def seconds(text: Any) -> float | None:
    """The seconds of AMQP's milliseconds (`expiration`, `x-message-ttl`). None: no limit."""
    if text is None:
        return None
    return max(float(text) / 1000, 0.001)
