"""Requests to nsqd's authorisation servers (nsqio/nsq internal/auth)."""

from __future__ import annotations

import functools
import json
import logging
import random
import ssl
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Final

from shmq.gateway.access import redacted
from shmq.gateway.host import Grant
from shmq.gateway.protocol import without_surrogates
from shmq.options import Options

if TYPE_CHECKING:
    import http.client

_REDIRECTS: Final = 10
_MOST_BYTES: Final = 1 << 20
#: How many answers a grant caches, one for each topic and channel that was asked about.
_REMEMBERED: Final = 256
_ACCEPT: Final = "application/vnd.nsq; version=1.0"

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The server's reply does not authorise the client."""


class BadAnswer(ValueError):
    """A server's answer is not HTTP."""


def query(
    options: Options, *, client: str, remote_ip: str, tls: bool, common_name: str, secret: str
) -> Grant | None:
    """Ask the servers, starting with a random one, until one returns a valid reply.

    Returns None if one refuses and none authorises. client: the client's address, for the log.
    Raises OSError if none of them gives a valid reply, which says nothing about the secret."""
    servers = list(options.auth_http_address)
    start = random.randrange(len(servers))
    values = {
        "common_name": common_name,
        "remote_ip": remote_ip,
        "secret": secret,
        "tls": "true" if tls else "false",
    }
    refused = False
    for server in servers[start:] + servers[:start]:
        try:
            return grant_of(_ask(options, server, values), time.monotonic())
        except (Refused, OSError, ValueError) as exc:
            shown = redacted(server)
            _log.error("auth: %s: %s (asked for client %s)", shown, exc, client)
            refused = refused or isinstance(exc, Refused)
    if not refused:
        raise OSError("no authorisation server gave a valid reply")
    return None


def _ask(options: Options, server: str, values: dict[str, str]) -> bytes:
    url = server if "://" in server else f"http://{server}/auth"
    body = None
    if options.auth_http_request_method == "post":
        body = json.dumps({name: [value] for name, value in values.items()}).encode()
    else:
        url += ("&" if "?" in url else "?") + urllib.parse.urlencode(values)
    for _ in range(_REDIRECTS):
        status, headers, data = request(options, url, body)
        if status in (301, 302, 303, 307, 308) and headers.get("Location"):
            url = urllib.parse.urljoin(url, headers["Location"])
            if status in (301, 302, 303):
                body = None
        elif status == 403 and (port := _https_port(data)):
            parts = urllib.parse.urlsplit(url)
            url = parts._replace(scheme="https", netloc=f"{parts.hostname}:{port}").geturl()
        elif status == 200:
            return data
        elif status >= 500:
            raise BadAnswer(f"status {status}")
        else:
            raise Refused(f"status {status}")
    raise Refused("too many redirects")


def request(
    options: Options, url: str, body: bytes | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send one request as nsqd does, with its timeouts; return status, headers and body.

    Raises OSError, BadAnswer, and ValueError if the URL is none."""
    import http.client  # slow to import

    parts = urllib.parse.urlsplit(url)
    if not parts.hostname:
        raise ValueError(f"no host in {url!r}")
    connection: http.client.HTTPConnection
    timeout = options.http_client_connect_timeout
    if parts.scheme == "https":
        context = ssl.create_default_context(cafile=options.tls_root_ca_file or None)
        connection = http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=timeout, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)
    try:
        connection.connect()
        connection.sock.settimeout(options.http_client_request_timeout)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {"Accept": _ACCEPT}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request("POST" if body is not None else "GET", target, body, headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read(_MOST_BYTES)
    except http.client.HTTPException as exc:
        raise BadAnswer(str(exc)) from exc
    finally:
        connection.close()


def _https_port(data: bytes) -> int:
    try:
        port = json.loads(data)["https_port"]
        return port if isinstance(port, int) else 0
    except (ValueError, KeyError, TypeError):
        return 0


def grant_of(data: bytes, now: float) -> Grant:
    """Return the grant in a server's reply; its time to live begins at `now`.

    Raises Refused or ValueError if the reply is not valid."""
    reply = json.loads(data)
    if not isinstance(reply, dict):
        raise Refused("not an object")
    ttl = reply.get("ttl", 0)
    if not isinstance(ttl, int) or isinstance(ttl, bool) or ttl <= 0:
        raise Refused(f"invalid TTL {ttl} (must be >0)")
    rules = [_rule(item) for item in _items(reply.get("authorizations"), "authorizations")]
    identity, url = reply.get("identity") or "", reply.get("identity_url") or ""
    if not isinstance(identity, str) or not isinstance(url, str):
        raise Refused("identity must be a string")

    @functools.lru_cache(_REMEMBERED)  # each command of a client repeats the same question
    def allows(permission: str, topic: str, channel: str) -> bool:
        return any(
            permission in permissions
            and on_topic.search(topic)
            and any(pattern.search(channel) for pattern in channels)
            for permissions, on_topic, channels in rules
        )

    identity, url = without_surrogates(identity), without_surrogates(url)
    return Grant(identity, url, len(rules), now + ttl, allows)


def _items(value: Any, name: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise Refused(f"{name} must be a list")
    return value or []


def _rule(item: Any) -> tuple[set[str], Any, list[Any]]:
    if not isinstance(item, dict):
        raise Refused("an authorisation must be an object")
    permissions = _items(item.get("permissions"), "permissions")
    for permission in permissions:
        if permission not in ("subscribe", "publish"):
            raise Refused(f"unknown permission {permission}")
    topic = _pattern(item.get("topic") or "")
    return (
        set(permissions),
        topic,
        [_pattern(each) for each in _items(item.get("channels"), "channels")],
    )


def _pattern(text: Any) -> Any:
    """Compile a pattern with RE2, whose syntax Go uses. Its matching time is linear in the length
    of the text, so no pattern of a server can block the event loop on a client's topic name."""
    import re2

    if not isinstance(text, str):
        raise Refused("a pattern must be a string")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as exc:
        reason = exc.args[0]
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else reason
        raise Refused(f"unable to compile a pattern: {reason}") from None
