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
