"""Access rules of the HTTP interface: switches, tokens, and protection against web pages that use
a browser on this host to attack it.

nsqd refuses nothing. Here a request is refused in five cases:

* Its `Host` is the name of another site, on a listener that only this host reaches. A page whose
  name was made to resolve to 127.0.0.1 (DNS rebinding) must neither read nor write. Accepted are
  addresses, `localhost`, the host's own name, the broadcast address and `--http-allowed-hosts`.
  Other hosts may reach a public listener by names that are not known here, so there `Host` is
  checked only for /debug, or if `--http-allowed-hosts` is given. A browser cannot reach a Unix
  socket, so `Host` is not checked there.
* Another site's page sends it (CSRF): the request writes, configures or debugs, and its `Origin` is
  neither this server's nor in `--http-allowed-hosts`. nsqadmin, curl and NSQ's tools send no
  `Origin`.
* An option has switched it off: `--http-writes`, `--http-config`, `--http-debug`.
* Tokens are configured (`--http-token-file`, SHMQ_HTTP_TOKEN) and it carries none of them. Requests
  that write, configure or debug need one; with `--http-open-reads=false` all requests but /ping do.
* It administers (deletes, empties, pauses or configures), other hosts can reach the listener, and
  nothing says who may: no token, no access file, no client certificates.

With an access file (`--access-file`) its rules come after these; `rights` has them.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import re
import socket
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from shmq.door import target
from shmq.door.page_pass import PASS_HEADER, pass_of
from shmq.options import Options

#: The answer to a client that may not administer because nothing says who may.
_UNPROTECTED: Final = (
    "ADMINISTRATION_NEEDS_A_TOKEN: this listener is open to other hosts, so whoever deletes, "
    "empties, pauses or configures must show who he is: start the broker with --access-file or "
    "--http-token-file, or ask on a Unix socket or on loopback (--http-address)"
)

#: Headers of a proxy: the client is not the peer of the connection.
_PROXY_HEADERS: Final = ("Forwarded", "X-Forwarded-For", "X-Real-Ip", "Via")
_ANY: Final = "*"
_HIDDEN: Final = "***"
_NO_SCHEME: Final = re.compile(r"^([^:@/\s]+):[^@\s]+@")


class Action(enum.Enum):
    """The kinds of request that the rules tell apart."""

    PING = "ping"
    READ = "read"
    WRITE = "write"
    CONFIG = "config"
    DEBUG = "debug"


@dataclass(frozen=True)
class Listener:
    """The listening socket through which a request arrived."""

    secure: bool
    """Its connections use TLS."""
    local: bool
    """It is bound to a loopback address."""
    unix: bool

    @classmethod
    def of(cls, sock: socket.socket, secure: bool) -> Listener:
        """Describe a listening socket; `secure` if its connections use TLS."""
        name = sock.getsockname()
        inet = isinstance(name, tuple)
        return cls(secure, inet and _is_loopback(name[0]), not inet)


@dataclass(frozen=True)
class Refusal:
    """The answer to a request that the rules do not allow."""

    status: int
    text: str
    challenge: str = ""
    """Value of the header WWW-Authenticate; empty: no such header."""
    why: str = ""
    """The reason, for the log; empty if the refusal is not logged."""


class Access:
    """The access rules that follow from the options."""

    def __init__(self, options: Options, tokens: tuple[bytes, ...]) -> None:
        self._tokens = [hashlib.sha256(token).digest() for token in tokens]
        self._writes = options.http_writes
        self._debug = options.http_debug
        self._config = options.http_config
        self._open_reads = options.http_open_reads or bool(options.access_file)
        self._has_users = bool(options.access_file)
        self._verifies = bool(options.tls_client_auth_policy)
        self._allowed = {_host_of(host) for host in options.http_allowed_hosts} - {_ANY}
        self._any = _ANY in options.http_allowed_hosts
        name = socket.gethostname()
        mine = {"localhost", name, name.partition(".")[0], options.broadcast_address}
        self._known = {_host_of(host) for host in mine} | self._allowed

    def refusal(
        self,
        action: Action,
        key: str,
        headers: Mapping[str, str],
        peer: str,
        listener: Listener,
        administers: bool = False,
    ) -> Refusal | None:
        """Return the refusal of a request, or None if it is allowed.

        key: the name in /config/<name>, for a request that configures.
        peer: address of the client, empty on a Unix socket.
        administers: it deletes, empties, pauses or configures."""
        if action is Action.PING:
            return None
        host, origin = headers.get("Host", ""), headers.get("Origin")
        strict = listener.local or bool(self._allowed) or action is Action.DEBUG
        if host and strict and not listener.unix and not self._is_good_host(host):
            return Refusal(
                403, "HOST_NOT_ALLOWED", why=f"Host {_named(host)} (--http-allowed-hosts)"
            )
        if action is Action.READ:
            return None if self._open_reads else self._without_token(headers)
        if not self._is_good_origin(origin, host, headers):
            why = f"Origin {_named(origin or 'null')} (--http-allowed-hosts)"
            return Refusal(403, "ORIGIN_NOT_ALLOWED", why=why)
        if not self._is_on(action, key, headers, peer, listener):
            return Refusal(403, f"{action.value.upper()}_DISABLED")
        if administers and self._is_unprotected(listener):
            return Refusal(403, _UNPROTECTED)
        return self._without_token(headers)

    def _is_unprotected(self, listener: Listener) -> bool:
        """Whether other hosts reach a listener and nothing there tells its clients apart."""
        if listener.local or listener.unix or (listener.secure and self._verifies):
            return False
        return not self._tokens and not self._has_users

    def _is_on(
        self, action: Action, key: str, headers: Mapping[str, str], peer: str, listener: Listener
    ) -> bool:
        if action is Action.WRITE:
            return self._writes
        if action is Action.CONFIG:
            return self._config == "true" or (self._config == "log_level" and key == "log_level")
        if self._debug == "loopback":
            near = listener.unix or _is_loopback(peer)
            return near and not any(name in headers for name in _PROXY_HEADERS)
        return self._debug == "true"

    @property
    def has_tokens(self) -> bool:
        """Whether tokens are configured."""
        return bool(self._tokens)

    def page_pass(self, headers: Mapping[str, str]) -> str | None:
        """The pass of a browser that shows a token. It stays the same when the gateway starts
        again, and opens nothing but the page. None: it is no token."""
        digest = hashlib.sha256(_bearer(headers)).digest()
        found = [known for known in self._tokens if hmac.compare_digest(digest, known)]
        return pass_of(found[0]) if found else None

    def is_known(self, headers: Mapping[str, str]) -> bool:
        """Whether tokens are configured and a request shows that it knows one: by its header
        Authorization, or by the pass of the page."""
        return self._is_token(_bearer(headers)) or self._is_pass(_pass(headers))

    def shown(self, action: Action, headers: Mapping[str, str], of_page: bool) -> bytes:
        """The token that a request shows, right or wrong. Empty: it shows none, or its answer does
        not depend on it."""
        if not self._tokens or action is Action.PING:
            return b""
        if action is Action.READ and self._open_reads and not of_page:
            return b""
        return _bearer(headers) or (_pass(headers) if of_page else b"")

    def is_right(self, shown: bytes) -> bool:
        """Whether this is one of the tokens, or the pass of one."""
        return self._is_token(shown) or self._is_pass(shown)

    def _is_token(self, shown: bytes) -> bool:
        digest = hashlib.sha256(shown).digest()
        # all digests have the same length, so the time reveals nothing about a token
        return any(hmac.compare_digest(digest, token) for token in self._tokens)

    def _is_pass(self, shown: bytes) -> bool:
        return any(hmac.compare_digest(shown, pass_of(token).encode()) for token in self._tokens)

    def _without_token(self, headers: Mapping[str, str]) -> Refusal | None:
        if not self._tokens:
            return None
        if not _bearer(headers):
            return Refusal(401, "UNAUTHORIZED", 'Bearer realm="shmq"')
        if self._is_token(_bearer(headers)):
            return None
        return Refusal(401, "UNAUTHORIZED", 'Bearer realm="shmq", error="invalid_token"')

    def _is_good_host(self, host: str) -> bool:
        """Returns true unless another site's name may have led a browser here."""
        name = _host_of(host)
        return self._any or name in self._known or name.endswith(".localhost") or _is_address(name)

    def _is_good_origin(self, origin: str | None, host: str, headers: Mapping[str, str]) -> bool:
        if origin is None:  # an <img> or a link on another site's page sends none
            return headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        try:
            parts = urllib.parse.urlsplit(origin.lower())
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not parts.netloc:
            return False
        if _host_of(parts.netloc) in self._allowed:
            return True
        return parts.netloc == host.lower() and self._is_good_host(host)


def _named(site: str) -> str:
    """A name of a site as a log may hold it: without what may be a secret before it or after."""
    return repr(target.path_of(site.rpartition("@")[2]))


def _bearer(headers: Mapping[str, str]) -> bytes:
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    return given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def _pass(headers: Mapping[str, str]) -> bytes:
    return headers.get(PASS_HEADER, "").encode("utf-8", "surrogateescape")


def redacted(text: str) -> str:
    """Return a URL or address without its secrets: the password and the values of the query."""
    if "://" not in text:
        return _NO_SCHEME.sub(rf"\1:{_HIDDEN}@", text)
    before, _, rest = text.partition("://")
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    user, at, _ = authority.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        shown = f"{name}:{_HIDDEN}" if colon else _HIDDEN  # a name without password may be a token
        rest = f"{shown}@{rest[len(user) + 1 :]}"
    path, mark, query = rest.partition("?")
    hidden = re.sub(r"=[^&]*", f"={_HIDDEN}", query) if "=" in query else query and _HIDDEN
    return f"{before}://{path}{mark}{hidden}"


def _host_of(text: str) -> str:
    """Return the host of `host:port`, in lower case, for comparison."""
    text = text.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    if text.count(":") == 1:
        text = text.partition(":")[0]
    return text.rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: Any) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
