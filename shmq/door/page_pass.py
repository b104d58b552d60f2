"""The pass of the page: what a browser that knows a token shows instead of it."""

from __future__ import annotations

import hmac
import re
from typing import Final

#: The header that has the pass. No page of another site may send it without being asked for leave.
PASS_HEADER: Final = "X-Shmq-Page"
_FILE: Final = re.compile(r"/page/static/[A-Za-z0-9_][A-Za-z0-9_.]*")


def pass_of(digest: bytes) -> str:
    """The pass of the token with this SHA-256. It opens nothing but the page."""
    return hmac.new(digest, b"shmq page", "sha256").hexdigest()


def is_public(path: str) -> bool:
    """Whether a path of the page has nothing of the instance: the files that everybody has."""
    return path in ("/page", "/page/") or _FILE.fullmatch(path) is not None
