"""Bodies of messages as text for people. Nothing is ever unpickled."""

from __future__ import annotations

import json
from typing import Any, Final

#: Bytes of a body that travel to a browser.
MOST: Final = 64 << 10
_INDENTED: Final = 4 * MOST  # characters
_ROW: Final = 16  # bytes of a line of hexadecimal


def shown(body: bytes, most: int = MOST, length: int | None = None) -> dict[str, Any]:
    """A body's `length`, and its beginning as `text` with its `kind`: "json", "text" or "hex".

    most: the bytes that are looked at. length: bytes of the body if `body` is only its beginning.
    `cut` says that there are more.
    """
    whole = len(body) if length is None else length
    head = body[:most]
    kind, text = _as_text(head, cut=whole > len(head))
    return {"length": whole, "kind": kind, "text": text, "cut": whole > len(head)}


def _as_text(head: bytes, cut: bool) -> tuple[str, str]:
    try:
        text = head.decode()
    except UnicodeDecodeError as exc:
        if not (cut and exc.start >= len(head) - 3):  # a character that was cut is no damage
            return "hex", hexadecimal(head)
        text = head[: exc.start].decode()
    if any(not (sign.isprintable() or sign in "\n\r\t") for sign in text):
        return "hex", hexadecimal(head)
    if not cut and text[:1] in ("{", "["):
        try:
            return "json", _indented(json.loads(text))
        except (ValueError, RecursionError):
            pass
    return "text", text


def _indented(value: Any) -> str:
    """Raises ValueError if that takes more than `_INDENTED`: at a great depth each number would be
    indented by kilobytes."""
    parts, size = [], 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        size += len(part)
        if size > _INDENTED:
            raise ValueError("too long")
    return "".join(parts)


def hexadecimal(body: bytes) -> str:
    """Lines of offset, 16 bytes and their printable characters, as `hexdump -C` has them."""
    lines = []
    for at in range(0, len(body), _ROW):
        row = body[at : at + _ROW]
        signs = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):{3 * _ROW - 1}}  {signs}")
    return "\n".join(lines)


#: Shown in the place of a body.
_HIDDEN: Final = "hidden: bodies are shown to those who have the token"


def without(value: Any) -> Any:
    """The same lists and objects without what messages say (bodies, properties and errors) and
    without the command lines of processes."""
    if isinstance(value, list):
        return [without(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: without(item) for key, item in value.items()}
    if "body" in found:
        found["body"] = {"length": value["body"]["length"], "kind": "hidden", "text": _HIDDEN}
        found["body"]["cut"] = False
    if "properties" in found:
        found["properties"] = {}
    hidden = {"error": None, "command": "", "program": ""}
    return found | {name: none for name, none in hidden.items() if name in found}
