"""Requests to nsqd's authorisation servers (nsqio/nsq internal/auth)."""

from __future__ import annotations

import functools
import json
import logging
import random
import ssl
import time
import urllib.parse
from typing import Any, Final

from shmq.gateway.access import redacted
from shmq.gateway.host import Grant
from shmq.gateway.protocol import without_surrogates
from shmq.options import Options
from shmq.peers import http
from shmq.peers.documents import BadAnswer, number, parsed, table
from shmq.printing import printable

_REDIRECTS: Final = 10
_MOST_BYTES: Final = 1 << 20
#: Bounds of a reply, which is compiled and kept for each client.
_MOST_RULES: Final = 4096
_MOST_PATTERNS: Final = 16384
_LONGEST_PATTERN: Final = 4096
_LONGEST_IDENTITY: Final = 4096
#: Seconds that a grant holds at most.
_LONGEST_TTL: Final = 10 * 365 * 86400
#: How many answers a grant caches, one for each topic and channel that was asked about.
_REMEMBERED: Final = 256
#: Act -> the permission of nsqd that grants it.
_PERMISSION_OF: Final = {
    "publish": "publish",
    "stage": "publish",
    "subscribe": "subscribe",
    "lease": "subscribe",
}
_ACCEPT: Final = "application/vnd.nsq; version=1.0"

_log = logging.getLogger(__name__)


class Refused(Exception):
    """The server's reply does not authorise the client."""


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
    """The body of a server's reply. All redirects together have one deadline."""
    url = server if "://" in server else f"http://{server}/auth"
    body = None
    if options.auth_http_request_method == "post":
        body = json.dumps({name: [value] for name, value in values.items()}).encode()
    else:
        url += ("&" if "?" in url else "?") + urllib.parse.urlencode(values)
    deadline = until(options)
    for _ in range(_REDIRECTS):
        found = request(options, url, deadline, _MOST_BYTES, body)
        if found.status in (301, 302, 303, 307, 308) and "location" in found.headers:
            url = _next(url, urllib.parse.urljoin(url, found.headers["location"]))
            if found.status in (301, 302, 303):
                body = None
        elif found.status == 403 and (port := _https_port(found.body)):
            parts = urllib.parse.urlsplit(url)
            host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
            url = parts._replace(scheme="https", netloc=f"{host}:{port}").geturl()
        elif found.status == 200:
            return found.body
        elif found.status >= 500:
            raise BadAnswer(f"status {found.status}")
        else:
            raise Refused(f"status {found.status}")
    raise Refused("too many redirects")


def _next(before: str, url: str) -> str:
    """The URL of a redirect, which may carry the client's secret."""
    was, now = urllib.parse.urlsplit(before), urllib.parse.urlsplit(url)
    if was.scheme == "https" and now.scheme != "https":
        raise Refused("a redirect from https to a connection that is not encrypted")
    return url


def until(options: Options) -> float:
    """When a request that begins now must have been answered, of time.monotonic."""
    seconds = options.http_client_connect_timeout + options.http_client_request_timeout
    return time.monotonic() + seconds


def request(
    options: Options, url: str, deadline: float, most: int, body: bytes | None = None
) -> http.Answer:
    """Send one request as nsqd does. Raises OSError, BadAnswer, and ValueError if the URL is
    none."""
    headers = {"Accept": _ACCEPT}
    if body is not None:
        headers["Content-Type"] = "application/json"
    return http.ask(
        url,
        deadline,
        most=most,
        connect_by=time.monotonic() + options.http_client_connect_timeout,
        body=body,
        headers=headers,
        context=lambda: ssl.create_default_context(cafile=options.tls_root_ca_file or None),
    )


def _https_port(data: bytes) -> int:
    try:
        return number(table(parsed(data)), "https_port", most=65535)
    except BadAnswer:
        return 0


def grant_of(data: bytes, now: float) -> Grant:
    """Return the grant in a server's reply; its time to live begins at `now`.

    Raises Refused or ValueError if the reply is not valid."""
    reply = parsed(data)
    if not isinstance(reply, dict):
        raise Refused("not an object")
    ttl = reply.get("ttl", 0)
    if not isinstance(ttl, int) or isinstance(ttl, bool) or ttl <= 0:
        raise Refused(f"invalid TTL {printable(str(ttl), 40)} (must be >0)")
    ttl = min(ttl, _LONGEST_TTL)
    items = _items(reply.get("authorizations"), "authorizations")
    if len(items) > _MOST_RULES:
        raise Refused(f"{len(items)} authorizations, of at most {_MOST_RULES}")
    rules = [_rule(item) for item in items]
    if sum(1 + len(channels) for _, _, channels in rules) > _MOST_PATTERNS:
        raise Refused(f"more than {_MOST_PATTERNS} patterns")
    identity, url = reply.get("identity") or "", reply.get("identity_url") or ""
    if not isinstance(identity, str) or not isinstance(url, str):
        raise Refused("identity must be a string")
    if max(len(identity), len(url)) > _LONGEST_IDENTITY:
        raise Refused(f"an identity of more than {_LONGEST_IDENTITY} characters")

    @functools.lru_cache(_REMEMBERED)  # each command of a client repeats the same question
    def allows(act: str, topic: str, channel: str) -> bool:
        permission = _PERMISSION_OF.get(act)  # nsqd has two; the other acts are not granted
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
            raise Refused(f"unknown permission {printable(str(permission), 40)}")
    topic = _pattern(item.get("topic") or "")
    channels = _items(item.get("channels"), "channels")
    if len(channels) > _MOST_PATTERNS:
        raise Refused(f"more than {_MOST_PATTERNS} patterns")
    return set(permissions), topic, [_pattern(each) for each in channels]


def _pattern(text: Any) -> Any:
    """Compile a pattern with RE2, whose syntax Go uses. Its matching time is linear in the length
    of the text, so no pattern of a server can block the event loop on a client's topic name."""
    import re2

    if not isinstance(text, str):
        raise Refused("a pattern must be a string")
    if len(text) > _LONGEST_PATTERN:
        raise Refused(f"a pattern of more than {_LONGEST_PATTERN} characters")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as exc:
        reason = exc.args[0]
        reason = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else reason
        raise Refused(f"unable to compile a pattern: {printable(reason, 200)}") from None
