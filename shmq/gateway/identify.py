"""IDENTIFY: from the client's document to the settings of its session. Nothing here has state."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from shmq.gateway.protocol import ProtocolError, shown
from shmq.nsqd import NSQD_VERSION
from shmq.options import Options

_DEFAULT_BUFFER: Final = 16384
_DEFAULT_DEFLATE: Final = 6

Wishes = dict[str, Any]

#: The fields that have an effect, and their types.
_TYPES: Final[dict[str, type]] = {
    "client_id": str,
    "hostname": str,
    "user_agent": str,
    "feature_negotiation": bool,
    "heartbeat_interval": int,
    "output_buffer_size": int,
    "output_buffer_timeout": int,
    "tls_v1": bool,
    "snappy": bool,
    "deflate": bool,
    "deflate_level": int,
    "sample_rate": int,
    "msg_timeout": int,
    "topology_region": str,
    "topology_zone": str,
    "leases": bool,
}

#: The field that asks for a layer.
_WISH_OF: Final = {"tls": "tls_v1", "snappy": "snappy", "deflate": "deflate"}


@dataclass(frozen=True)
class Settings:
    """The values of one client. Durations are seconds."""

    client_id: str
    hostname: str
    msg_timeout: float
    buffer_timeout: float
    """Longest time that messages wait in the output buffer; 0: no timer."""
    heartbeat: float
    """Interval of the heartbeats; 0: off."""
    user_agent: str = ""
    region: str = ""
    zone: str = ""
    sample_rate: int = 0
    buffer_size: int = _DEFAULT_BUFFER
    deflate_level: int = _DEFAULT_DEFLATE


@dataclass(frozen=True)
class _Number:
    """A number that a client may choose."""

    wish: str
    words: str
    """The name in the error message."""
    bounds: Callable[[Options], tuple[int, int]]
    """Lowest and highest value besides 0 and -1."""
    take: Callable[[int], dict[str, Any]]
    """Returns the settings that follow from a value."""
    zero: dict[str, Any]
    """The settings that follow from 0; empty: the present ones stay."""
    off: dict[str, Any] | None
    """The settings that follow from -1; None: it is not valid."""


_NUMBERS: Final = (
    _Number(
        "heartbeat_interval",
        "heartbeat interval",
        bounds=lambda options: (1000, milliseconds(options.max_heartbeat_interval)),
        take=lambda asked: {"heartbeat": asked / 1000},
        zero={},
        off={"heartbeat": 0.0},
    ),
    _Number(
        "output_buffer_timeout",
        "output buffer timeout",
        bounds=lambda options: (
            milliseconds(options.min_output_buffer_timeout),
            milliseconds(options.max_output_buffer_timeout),
        ),
        take=lambda asked: {"buffer_timeout": asked / 1000},
        zero={},
        off={"buffer_timeout": 0.0},
    ),
    _Number(
        "output_buffer_size",
        "output buffer size",
        bounds=lambda options: (64, options.max_output_buffer_size),
        take=lambda asked: {"buffer_size": asked},
        zero={},
        off={"buffer_size": 1, "buffer_timeout": 0.0},
    ),
    _Number(
        "sample_rate",
        "sample rate",
        bounds=lambda options: (0, 99),
        take=lambda asked: {"sample_rate": asked},
        zero={"sample_rate": 0},
        off=None,
    ),
    _Number(
        "msg_timeout",
        "msg timeout",
        bounds=lambda options: (1000, milliseconds(options.max_msg_timeout)),
        take=lambda asked: {"msg_timeout": asked / 1000},
        zero={},
        off=None,
    ),
)


def document(body: bytes) -> Wishes:
    """Return the fields that have an effect, decoded as Go does: names in any letter case, null is
    ignored, types must be right. Raises ProtocolError."""
    error = ProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body")
    try:
        text = body.decode("utf-8", "replace")
        decoded = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise error from None
    if decoded is None:
        return {}
    if not isinstance(decoded, dict):
        raise error
    found: Wishes = {}
    for key, value in decoded.items():
        name = key.lower()
        if name not in _TYPES or value is None:
            continue
        if type(value) is not _TYPES[name]:
            raise error
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise error
        found[name] = shown(value) if isinstance(value, str) else value
    if not -(2**31) <= found.get("sample_rate", 0) < 2**31:
        raise error
    return found


def settings(wishes: Wishes, before: Settings, options: Options) -> Settings:
    """Return the settings after an IDENTIFY. A missing field counts as 0 or empty.

    Raises ProtocolError if a number is out of its range."""
    client_id = wishes.get("client_id", "")
    level = wishes.get("deflate_level", 0)
    changes: dict[str, Any] = {
        "client_id": client_id,
        "hostname": wishes.get("hostname", "") or client_id,
        "user_agent": wishes.get("user_agent", ""),
        "region": wishes.get("topology_region", ""),
        "zone": wishes.get("topology_zone", ""),
        "deflate_level": min(level if level > 0 else _DEFAULT_DEFLATE, options.max_deflate_level),
    }
    for number in _NUMBERS:
        asked = wishes.get(number.wish, 0)
        least, most = number.bounds(options)
        if asked == 0:
            changes |= number.zero
        elif asked == -1 and number.off is not None:
            changes |= number.off
        elif least <= asked <= most:
            changes |= number.take(asked)
        else:
            raise ProtocolError("E_BAD_BODY", f"IDENTIFY {number.words} ({asked}) is invalid")
    return replace(before, **changes)


def upgrades(wishes: Wishes, has_tls: bool, options: Options, layers: list[str]) -> list[str]:
    """Return the layers to be added below the session, in this order. layers: those it has.

    Raises ProtocolError for a layer that is already in place. A second compression over the first
    would turn a few bytes into gigabytes of commands. nsqd restarts the streams, which no client
    uses."""
    offered = {"tls": has_tls, "snappy": options.snappy, "deflate": options.deflate}
    wanted = [layer for layer, has in offered.items() if has and wishes.get(_WISH_OF[layer])]
    is_compressed = "snappy" in layers or "deflate" in layers
    for layer in wanted:
        if layer in layers or (layer != "tls" and is_compressed):
            raise ProtocolError(
                "E_INVALID",
                f"cannot IDENTIFY with {_WISH_OF[layer]} in current state (already upgraded)",
            )
    if "tls" in wanted and is_compressed:
        raise ProtocolError(
            "E_INVALID", "cannot IDENTIFY with tls_v1 in current state (compressed)"
        )
    if "snappy" in wanted and "deflate" in wanted:
        raise ProtocolError(
            "E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression"
        )
    return wanted


def answer(
    agreed: Settings, wanted: list[str], auth_enabled: bool, options: Options
) -> dict[str, Any]:
    """Return the document that answers an IDENTIFY with feature negotiation."""
    return {
        "max_rdy_count": options.max_rdy_count,
        "version": NSQD_VERSION,
        "max_msg_timeout": milliseconds(options.max_msg_timeout),
        "msg_timeout": milliseconds(agreed.msg_timeout),
        "tls_v1": "tls" in wanted,
        "deflate": "deflate" in wanted,
        "deflate_level": agreed.deflate_level,
        "max_deflate_level": options.max_deflate_level,
        "snappy": "snappy" in wanted,
        "sample_rate": agreed.sample_rate,
        "auth_required": auth_enabled,
        "output_buffer_size": agreed.buffer_size,
        "output_buffer_timeout": milliseconds(agreed.buffer_timeout),
        "topology_region": options.topology_region,
        "topology_zone": options.topology_zone,
    }


def milliseconds(seconds: float) -> int:
    """Return seconds as whole milliseconds."""
    return round(seconds * 1000)


def _no_constant(name: str) -> None:
    raise ValueError(name)
