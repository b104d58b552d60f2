"""The page is shown to browsers of this host that know its token.

Any user of a host can connect to its loopback addresses, and bodies of messages are nobody else's
business. So each start has a token, which is in the address that it prints; a browser then keeps it
in a cookie that no other site can send. A Unix socket has its file's mode instead.

A page of another site whose name was made to resolve to this host (DNS rebinding) is refused by the
header `Host`. One that sends a form or a script's request here (CSRF) has no cookie, another
`Origin`, and may not set the header that a change needs.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from typing import Final

from aiohttp import web

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
_COOKIE: Final = "shmq_page"
#: No page of another site may send it without being asked for leave first.
_HEADER: Final = "X-Shmq-Page"


class Guard:
    """The rules for the requests of one listener."""

    def __init__(self, token: str | None) -> None:
        """token: None: none is needed (a Unix socket)."""
        self._token = token

    @staticmethod
    def new_token() -> str:
        """A token that nobody can guess."""
        return secrets.token_urlsafe(24)

    def refusal(self, request: web.BaseRequest) -> str | None:
        """Why a request is refused; None: it is not."""
        if self._token is None:
            return None
        if not _is_local(request.host):
            return f"the name {request.host!r} is not this host's: use a loopback address"
        given = request.cookies.get(_COOKIE, "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return "the token is missing or of an earlier start: use the address that was printed"
        return None

    def refusal_to_act(self, request: web.BaseRequest) -> str | None:
        """Why a request may change nothing; None: it may."""
        origin = request.headers.get("Origin")
        if origin is not None and origin.partition("://")[2] != request.host:
            return f"the origin {origin!r} is not this page's"
        if _HEADER not in request.headers or request.content_type != "application/json":
            return f"a change needs the header {_HEADER} and a body of JSON"
        return None

    def welcome(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to an address with the token in it: a cookie, and the same address without.
        None: this is no such request, or the token is wrong."""
        given = request.query.get("token")
        if given is None or self._token is None or not _is_local(request.host):
            return None
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        answer = web.Response(status=303, headers={"Location": request.path, **HEADERS})
        answer.set_cookie(_COOKIE, self._token, path="/page", httponly=True, samesite="Strict")
        return answer


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
