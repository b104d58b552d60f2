"""The settings of a backend: `OPTIONS` in `TASKS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

from django.conf import settings

from shmq import layout
from shmq.arguments import LONGEST
from shmq.integrations.django.home import FOLDER

#: The name of the option, here or beside BACKEND, as other backends have it.
ON_COMMIT = "ENQUEUE_ON_COMMIT"


@dataclass(frozen=True)
class _Number:
    """The bounds of an option that is a number."""

    least: float
    most: float
    is_whole: bool = True
    may_be_none: bool = False

    def fits(self, value: Any) -> bool:
        if value is None:
            return self.may_be_none
        kinds = int if self.is_whole else int | float
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and self.least <= value <= self.most
        )

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number of seconds"
        none = ", or None" if self.may_be_none else ""
        return f"{kind} from {self.least:.15g} to {self.most:.15g}{none}"


#: The options that are numbers.
NUMBERS: Final = {
    "timeout": _Number(0, LONGEST, is_whole=False),
    "result_ttl": _Number(0.001, LONGEST, is_whole=False, may_be_none=True),
    "max_results": _Number(1, layout.constant("STORE_KEYS_MAX")),
    "max_result_bytes": _Number(1, layout.constant("ARENA_MAX")),
    "max_attempts": _Number(1, 65535, may_be_none=True),
}


@dataclass(frozen=True)
class Settings:
    """The choices in OPTIONS. Times are in seconds; None means no limit."""

    instance: str | None = None
    """The instance that somebody runs; None: an embedded broker."""
    owner: str | int | None = None
    """The user who may run it, besides this one and root."""
    directory: str | Path | None = None
    """Of an embedded broker; None: `BASE_DIR/.shmq`."""
    broker: Mapping[str, Any] = field(default_factory=dict)
    """Options of an embedded broker, as of `shmq.Broker`."""
    test_instance: str | None = None
    """The instance that a run of tests uses; None: one of its own in memory."""
    timeout: float = 5.0
    """How long a call waits for a broker that is not there."""
    result_ttl: float | None = 86400.0
    """How long the result of a finished task is kept."""
    max_results: int = 1_000_000
    max_result_bytes: int = 256 << 20
    max_attempts: int | None = 5
    """How many workers may die of a task before it has failed."""
    on_commit: bool = False
    unknown: tuple[str, ...] = ()
    """Keys of OPTIONS that mean nothing."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """The settings of one backend in TASKS."""
        given = dict(params.get("OPTIONS") or {})
        on_commit = bool(given.pop(ON_COMMIT, params.get(ON_COMMIT, False)))
        known = {each.name for each in fields(cls)} - {"on_commit", "unknown"}
        chosen = {name: value for name, value in given.items() if name in known}
        base = getattr(settings, "BASE_DIR", None)
        if chosen.get("directory") is None and base is not None:
            chosen["directory"] = Path(base) / FOLDER
        unknown = tuple(sorted(map(str, set(given) - known)))
        return cls(**chosen, on_commit=on_commit, unknown=unknown)

    def faults(self) -> dict[str, str]:
        """For each option that is a number and out of its bounds what it must be."""
        return {
            name: f"must be {number}, not {getattr(self, name)!r:.100}"
            for name, number in NUMBERS.items()
            if not number.fits(getattr(self, name))
        }
