"""What `shmq inspect` finds out about a file, and `shmq doctor` about a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 50  # damages of one kind; the rest is counted


@dataclass(frozen=True)
class Damage:
    """Something that cannot be right. offset: in the file; None where no byte is to blame."""

    offset: int | None
    text: str


@dataclass
class Table:
    """Rows beside titles; cells are what JSON gets. Text of a cell: `shown`, if it differs."""

    titles: list[str]
    rows: list[list[Any]] = field(default_factory=list)


@dataclass
class Report:
    """All of it. Values of `facts` and cells of `tables` can be JSON."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def hurt(self, offset: int | None, text: str) -> None:
        """Note a damage."""
        self.damage.append(Damage(offset, text))

    def hurt_each(self, offsets: list[int], text: Callable[[int], str]) -> None:
        """Note a damage at each offset; text: of the n-th. Beyond some they are only counted."""
        for number, offset in enumerate(offsets[:_SHOWN]):
            self.hurt(offset, text(number))
        if len(offsets) > _SHOWN:
            self.hurt(None, f"and {len(offsets) - _SHOWN} more of the same kind")


# ---- doctor ----


@dataclass(frozen=True)
class Finding:
    """One line. level: "ok", "note" (nothing to do), "problem" (then `remedy`), "error" (doctor
    could not look or mend), "fixed"."""

    check: str
    level: str
    text: str
    remedy: str = ""
    instance: str = ""
    fix: Callable[[], str] | None = None
    """Removes it, and says what; ShmqError if it came to life."""


def ok(check: str, text: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", text)


def problem(check: str, text: str, remedy: str) -> Finding:
    """Something is wrong, and this is what to do."""
    return Finding(check, "problem", text, remedy)
