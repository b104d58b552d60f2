"""Requests and answers of the HTTP interface: reading parameters and bodies, and nsqd's answers."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from aiohttp import web

from shmq import _native
from shmq.door import brake
from shmq.gateway.access import Refusal
from shmq.names import valid_name

JSON: Final = "application/json; charset=utf-8"
TEXT: Final = "text/plain; charset=utf-8"
#: Time limit for the head of a request, and again for its body; the TCP protocol has the same.
REQUEST_SECONDS: Final = 60.0
#: Go's server sends a longer answer in chunks, without Content-Length.
_CHUNKED_ABOVE: Final = 2048

Params = dict[str, str]
Answer = web.StreamResponse | str | dict[str, Any] | None
Handler = Callable[[web.BaseRequest, Params], Awaitable[Answer]]
#: Path -> method -> handler.
Routes = dict[str, dict[str, Handler]]


class HttpError(Exception):
    """An error for the client: a status and nsqd's word for it."""

    def __init__(self, status: int, text: str, close: bool = False, retry: float = 0) -> None:
        """retry: seconds after which the client may ask again; 0: that is not said."""
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.close = close
        self.retry = retry


# ---- requests ----


def params_of(query: str) -> Params:
    """Parse a query as Go's url.ParseQuery; of a repeated key the first value counts.

    Raises HttpError if it cannot be parsed."""
    found: Params = {}
    for part in query.split("&"):
        if not part:
            continue
        if ";" in part or re.search(r"%(?![0-9a-fA-F]{2})", part):
            raise HttpError(400, "INVALID_REQUEST")
        key, _, value = part.partition("=")
        found.setdefault(urllib.parse.unquote_plus(key), urllib.parse.unquote_plus(value))
    return found


def topic_of(params: Params, invalid: str) -> str:
    """Return the name of the topic. Raises HttpError(400, invalid) if it is not a valid name."""
    topic = params.get("topic")
    if topic is None:
        raise HttpError(400, "MISSING_ARG_TOPIC")
    if not valid_name(topic):
        raise HttpError(400, invalid)
    return topic


def check_declared(request: web.BaseRequest, most: int, text: str) -> None:
    """Raise HttpError(413, text) if the declared size of the body exceeds `most` bytes."""
    if request.content_length is not None and request.content_length > most:
        raise HttpError(413, text, close=True)


async def read_body(request: web.BaseRequest, most: int, text: str) -> bytes:
    """Read the body of a request. Raises HttpError(413, text) if it exceeds `most` bytes."""
    check_declared(request, most, text)
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # these bytes are not the beginning of the answer
    body = bytearray()
    client: Any = request.protocol
    if not request.content.is_eof():
        client.seat.rests()  # until the client has sent it
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            async for part in request.content.iter_any():
                body += part
                if len(body) > most:
                    raise HttpError(413, text, close=True)
    except TimeoutError:
        raise HttpError(408, "REQUEST_TIMEOUT", close=True) from None
    client.seat.works()
    return bytes(body)


def count_of(body: bytes, max_msg_size: int, max_body_size: int) -> int:
    """Return the number of messages in a binary body: MPUB's format without the leading size.
    Raises HttpError if they are not all there and of a valid size."""
    count = int.from_bytes(body[:4], "big", signed=True)
    if len(body) < 4 or not 0 < count <= (max_body_size - 4) // 5:
        raise HttpError(413, "BAD_BODY")
    _, whole, _ = _native.scan_bodies(body, 4, len(body), count, max_msg_size)
    if whole < count:
        raise HttpError(413, "BAD_MESSAGE")
    return count


def binary_bodies(body: bytes, count: int) -> list[bytes]:
    """Return the messages of a binary body that `count_of` has checked."""
    messages, at = [], 4
    for _ in range(count):
        size = int.from_bytes(body[at : at + 4], "big")
        messages.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return messages


# ---- answers ----


def reply(status: int, body: str, kind: str | None, nsq: bool) -> web.Response:
    """Return an answer. kind: its content type, or None. nsq: with nsqd's own header."""
    headers = {"X-Nsq-Content-Type": "nsq; version=1.0"} if nsq else {}
    if kind is not None:
        headers["Content-Type"] = kind
    # a client's name may contain a lone surrogate
    answer = web.Response(status=status, headers=headers, body=body.encode("utf-8", "replace"))
    if kind is None:
        answer.headers.pop("Content-Type", None)
    return answer


def reply_of(answer: Answer, nsq: bool) -> web.StreamResponse:
    """Return the answer of a handler: JSON of a document, text of a string."""
    if isinstance(answer, web.StreamResponse):
        return answer
    if answer is None or answer == "":
        return reply(200, "", None, nsq)
    if isinstance(answer, dict):
        return reply(200, dump(answer), JSON, nsq)
    return reply(200, answer, TEXT, nsq)


def page(text: str, status: int = 200) -> web.Response:
    """Return a text without nsqd's header, as the pages below /debug."""
    return reply(status, text, TEXT, nsq=False)


def failure(status: int, text: str) -> web.Response:
    """Return nsqd's answer with an error."""
    return reply(status, dump({"message": text}), JSON, nsq=True)


def later(text: str) -> web.Response:
    """Return the answer to a request that may succeed in a while."""
    answer = failure(503, text)
    answer.headers["Retry-After"] = "1"
    return answer


def no_means() -> web.Response:
    """Return the answer for which the process has no descriptor, no memory, no thread, or no room
    in a file system."""
    return later("OUT_OF_RESOURCES")


def not_allowed(methods: Iterable[str]) -> web.Response:
    """Return the answer to a method that the path does not have."""
    answer = failure(405, "METHOD_NOT_ALLOWED")
    answer.headers["Allow"] = allow(methods)
    return answer


def refused(refusal: Refusal) -> web.Response:
    """Return the answer to a request that the access rules refuse."""
    answer = failure(refusal.status, refusal.text)
    if refusal.challenge:
        answer.headers["WWW-Authenticate"] = refusal.challenge
    return answer


def braked() -> web.Response:
    """Return the answer to a proof that is not looked at: too many of the address wait already."""
    answer = failure(429, "TOO_MANY_ATTEMPTS")
    answer.headers["Retry-After"] = str(round(brake.LONGEST))
    answer.force_close()
    return answer


def allow(methods: Iterable[str]) -> str:
    """Return the value of the header Allow."""
    return ", ".join(sorted([*methods, "OPTIONS"]))


def in_chunks(request: web.BaseRequest, answer: web.StreamResponse) -> None:
    """Send a long answer in chunks, as Go's server does."""
    if len(getattr(answer, "body", None) or b"") <= _CHUNKED_ABOVE:
        return
    if request.version >= (1, 1) and "Content-Length" not in answer.headers:
        answer.enable_chunked_encoding()


def dump(document: Any) -> str:
    """Return compact JSON."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)
