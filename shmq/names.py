"""Names of topics, channels and instances.

Topics and channels follow nsqd's rule (`internal/protocol/names.go`): 1 to 64 bytes of
`[.a-zA-Z0-9_-]`, optionally ending in `#ephemeral`, which counts towards the 64. Instances have 1
to 64 bytes of `[A-Za-z0-9_.-]`, but do not end in a dot and digits, because `/shmq.a.5` is queue 5
of the instance `a`.
"""

from __future__ import annotations

import re

from shmq.errors import BadName

EPHEMERAL = "#ephemeral"
MAX_NAME_BYTES = 64

_NAME = re.compile(r"(?=.{1,64}\Z)[.a-zA-Z0-9_-]+(#ephemeral)?\Z")
_PATTERN = re.compile(r"(?=.{1,64}\Z)[.a-zA-Z0-9_*-]+(#ephemeral)?\Z")
_STARS = re.compile(r"(\*+)")
_INSTANCE = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_SERIAL = re.compile(r"\.[0-9]+\Z")


def valid_name(name: str) -> bool:
    """Returns True if the name is valid for a topic or channel."""
    return _NAME.match(name) is not None


def check_name(name: str, what: str) -> str:
    """Return `name`. Raises BadName if it is not valid for a topic or channel; `what` says which.
    Raises TypeError if it is no string."""
    if not isinstance(name, str):
        raise TypeError(f"{what} name must be str, not {type(name).__name__}")
    if not valid_name(name):
        raise BadName(
            f"{what} name {name!r} is not valid: use 1 to 64 of the characters . a-z A-Z 0-9 _ - "
            f"(optionally ending in {EPHEMERAL}, which counts)"
        )
    return name


def lane_name(topic: str, priority: str) -> str:
    """Return the name of the topic for messages of a priority: `TOPIC.PRIORITY`. Raises BadName if
    it is not valid, and TypeError if the priority is no string."""
    check_name(priority, "priority")
    if is_ephemeral(priority):
        raise BadName(f"priority {priority!r} must not end in {EPHEMERAL}: the topic may")
    plain = topic.removesuffix(EPHEMERAL)
    name = f"{plain}.{priority}{topic[len(plain) :]}"
    if not valid_name(name):
        raise BadName(
            f"topic name {name!r}, of priority {priority!r}, is longer than {MAX_NAME_BYTES} bytes"
        )
    return name


def is_pattern(text: str) -> bool:
    """Returns True if this is not the name of a topic, but a pattern of names."""
    return "*" in text


def check_pattern(pattern: str) -> str:
    """Return `pattern`. Raises BadName if it is not valid for names of topics."""
    if not _PATTERN.match(pattern) or "***" in pattern:
        raise BadName(
            f"pattern {pattern!r} is not valid: use 1 to 64 of the characters of a topic's name, "
            "* for any characters but a dot and ** for any characters"
        )
    return pattern


def matches(pattern: str, name: str) -> bool:
    """Returns True if the pattern matches the whole name. `*` stands for any characters but a dot,
    `**` for any characters; both may stand for none. The time it takes is bounded by the product of
    the lengths."""
    parts = _STARS.split(pattern)  # text, stars, text, ..., text
    ends = {len(parts[0])} if name.startswith(parts[0]) else set()
    for stars, text in zip(parts[1::2], parts[2::2], strict=True):
        starts: set[int] = set()
        for end in ends:
            dot = len(name) if stars == "**" else name.find(".", end)
            starts.update(range(end, (len(name) if dot < 0 else dot) + 1))
        ends = {start + len(text) for start in starts if name.startswith(text, start)}
    return len(name) in ends


def is_ephemeral(name: str) -> bool:
    """Returns True if a topic or channel of this name is ephemeral: it lives only in memory and is
    deleted after its last user."""
    return name.endswith(EPHEMERAL)


def valid_instance(name: str) -> bool:
    """Returns True if the name is valid for an instance."""
    return _INSTANCE.match(name) is not None and _SERIAL.search(name) is None


def check_instance(name: str) -> str:
    """Return `name`. Raises BadName if it is not valid for an instance, and TypeError if it is no
    string."""
    if not isinstance(name, str):
        raise TypeError(f"instance must be a name, not {name!r}")
    if not valid_instance(name):
        raise BadName(
            f"instance name {name!r} is not valid: use 1 to 64 of the characters A-Z a-z 0-9 _ . - "
            "that do not end in a dot and digits (SHMQ_INSTANCE, --instance)"
        )
    return name


def base_name(topic: str, channel: str | None = None) -> str:
    """nsqd's base name for a queue's files: `<topic>:<channel>`, or `<topic>` for a backlog."""
    return topic if channel is None else f"{topic}:{channel}"
