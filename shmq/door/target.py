"""A request's target as a log may hold it. Anybody may put a token into an address, at any place
and in any spelling, and people who may not have it read the log."""

from __future__ import annotations

import re
import urllib.parse
from typing import Final

#: Parameters whose values are shown. All others may be secrets that came to the wrong place.
_SHOWN: Final = {
    *("topic", "channel", "format", "defer", "binary", "include_clients", "include_mem"),
    *("seconds", "debug", "state", "period", "n", "since"),
}
_HIDDEN: Final = "***"
_MOST_CHARACTERS: Final = 200
#: The end of what is taken for the path: a parameter may follow, in whichever spelling.
_END: Final = re.compile(r"[?#;&=@]")


def path_of(path: str) -> str:
    """The path of a target, without what may be a parameter. path: percent-encoded or not."""
    for _ in range(3):  # `%253F` is the question mark of `%3F`
        path = urllib.parse.unquote(path, errors="replace")
    found = _END.search(path)
    shown = path if found is None else path[: found.start()] + _HIDDEN
    shown = "".join(sign if sign.isprintable() else "?" for sign in shown)
    return shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}..."


def shown(target: str) -> str:
    """A target (`/stats?topic=orders`, or a whole URL) with the values of known parameters only."""
    if "://" in target[:8]:
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, mark, query = target.partition("?")
    words = []
    for part in query.split("&") if mark else ():
        key, equals, value = part.partition("=")
        if key in _SHOWN:
            words.append(f"{key}{equals}{path_of(value)}")
        elif not words or words[-1] != _HIDDEN:
            words.append(_HIDDEN)
    return path_of(path) + mark + "&".join(words)


def kept(query: str) -> str:
    """A query without the parameters that may be secrets."""
    parts = [part.partition("=") for part in query.split("&")]
    return "&".join("".join(part) for part in parts if part[0] in _SHOWN and is_plain(part[2]))


def is_plain(path: str) -> bool:
    """Whether a path or a value has nothing that may be a parameter, and only printable signs."""
    return path_of(path) == urllib.parse.unquote(path)
