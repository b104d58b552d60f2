"""Durations, sizes, times, names and bodies as text."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping

from shmq.printing import printable


def age(seconds: float) -> str:
    """A duration in about four characters."""
    if seconds < 0.0005:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 10:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 600:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 36000 else f"{seconds / 3600:.0f}h"


def size(nbytes: float) -> str:
    """A number of bytes with a unit that suits it."""
    unit = "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} {unit}" if unit == "bytes" or nbytes >= 100 else f"{nbytes:.1f} {unit}"


def moment(ns: int, fraction: bool = False) -> str:
    """Nanoseconds since 1970 as local time, or the bare number if it is outside the calendar."""
    try:
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns // 10**9))
    except (OverflowError, OSError, ValueError):
        return str(ns)
    return f"{text}.{ns % 10**9 // 10**6:03d}" if fraction else text


def body_field(body: bytes) -> dict[str, str]:
    """The JSON field of a body: `body` if it is UTF-8, else `body_base64`."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode("ascii")}


def property_fields(properties: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    """The JSON fields of a message's properties: `properties` has those that are UTF-8,
    `properties_base64` the others. A field without any is left out."""
    fields: dict[str, dict[str, str]] = {}
    for name, value in properties.items():
        try:
            fields.setdefault("properties", {})[name] = value.decode()
        except UnicodeDecodeError:
            text = base64.b64encode(value).decode("ascii")
            fields.setdefault("properties_base64", {})[name] = text
    return {field: values for field, values in fields.items() if values}


def property_list(properties: Mapping[str, bytes]) -> str:
    """Properties for a terminal: `name=value name=value`."""
    return " ".join(
        f"{name}={printable(value.decode('utf-8', 'backslashreplace'))}"
        for name, value in properties.items()
    )
