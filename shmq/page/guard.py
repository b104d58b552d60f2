"""The page is shown to browsers of this host that know its token.

Any user of a host can connect to its loopback addresses, and bodies of messages are nobody else's
business. So each start has a token, which is in the address that it prints, after the `#`: a
browser sends that part to no server, and names it to no other site. The page's script takes it out
of the address, shows it once (`/page/login`), and is given a *pass*, which is made of the token,
opens the page and nothing else, and is not the token. The script keeps the pass in its
`sessionStorage` and sends it in a header.

There is no cookie. A browser sends the cookies of a host to all its ports, so a server of another
user on another port would get one and could show it here. Its contents belong to one origin,
which includes the port. The page's own files have no secret in them, and need no pass.

A page of another site whose name was made to resolve to this host (DNS rebinding) is refused by the
header `Host`. One that sends a form or a script's request here (CSRF) cannot set the header. A Unix
socket has its file's mode instead of all that.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from typing import Final

from aiohttp import web

from shmq import audit
from shmq.door.brake import Brake
from shmq.door.http_server import Connection
from shmq.door.page_pass import PASS_HEADER, is_public, pass_of

#: Nothing but the page's own files runs or loads, and no other page may show it in a frame.
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MISSING: Final = "the token is missing or of an earlier start: use the address that was printed"


def shown_token(request: web.BaseRequest) -> bytes:
    """The token of the header Authorization; empty if there is none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return given.strip().encode("utf-8", "surrogateescape") if scheme.lower() == "bearer" else b""


def shown_pass(request: web.BaseRequest) -> bytes:
    """The pass of the page's header; empty if there is none."""
    return request.headers.get(PASS_HEADER, "").encode("utf-8", "surrogateescape")


class Guard:
    """The rules for the requests of one listener."""

    def __init__(self, token: str | None) -> None:
        """token: None: none is needed (a Unix socket)."""
        self._token = None if token is None else token.encode()
        self._pass = pass_of(hashlib.sha256(self._token or b"").digest())
        self._brake = Brake()

    @staticmethod
    def new_token() -> str:
        """A token that nobody can guess."""
        return secrets.token_urlsafe(24)

    async def refusal(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a request that is refused; None: it is not."""
        if self._token is None:
            return None
        if not _is_local(request.host):
            why = f"the name {request.host[:100]!r} is not this host's: use a loopback address"
            return _refused(403, why)
        if request.path == "/" or is_public(request.path):
            return None
        shown = shown_pass(request)
        right = hmac.compare_digest(shown, self._pass.encode())
        if request.path == "/page/login" or not shown:
            shown = shown_token(request)
            right = hmac.compare_digest(shown, self._token)
        if not shown:
            return _refused(403, _MISSING)
        client = request.protocol
        assert isinstance(client, Connection)
        if right and client.proven == shown:
            return None
        attempt = self._brake.attempt(client.who, shown)
        if not await attempt.turn():
            return _refused(429, "too many wrong tokens come from this address: try again later")
        if right:
            attempt.passed()
            client.proven = shown
            return None
        await attempt.failed()
        audit.note("login", result="refused", by=client.by, method=request.method)
        return _refused(403, _MISSING)

    def login(self) -> str:
        """The pass for a browser that has shown the token; empty if none is needed."""
        return "" if self._token is None else self._pass

    def refusal_to_act(self, request: web.BaseRequest) -> str | None:
        """Why a request may change nothing; None: it may."""
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return f"the origin {origin[:100]!r} is not this page's"
        if PASS_HEADER not in request.headers or request.content_type != "application/json":
            return f"a change needs the header {PASS_HEADER} and a body of JSON"
        return None


def _refused(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"shmq page: {why}\n", headers=HEADERS)


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
