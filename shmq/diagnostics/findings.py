"""Results of the diagnosis: the report on a file, and the findings about a host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SHOWN = 50  # damages of one kind that are listed; the others are counted


@dataclass(frozen=True)
class Damage:
    """Something in a file that cannot be right. offset: in the file; None if no byte is to
    blame."""

    offset: int | None
    text: str


@dataclass
class Table:
    """A table of a report. Cells are values that JSON has; a dict gives several fields."""

    titles: list[str]
    rows: list[list[Any]] = field(default_factory=list)


@dataclass
class Report:
    """Contents of a file and its damages. Values of `facts` are values that JSON has."""

    kind: str
    facts: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, Table] = field(default_factory=dict)
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def hurt(self, offset: int | None, text: str) -> None:
        """Add a damage."""
        self.damage.append(Damage(offset, text))

    def hurt_each(self, offsets: list[int], text: Callable[[int], str]) -> None:
        """Add a damage at each offset. `text(n)` describes the n-th. After 50 the rest is
        counted."""
        for number, offset in enumerate(offsets[:_SHOWN]):
            self.hurt(offset, text(number))
        if len(offsets) > _SHOWN:
            self.hurt(None, f"and {len(offsets) - _SHOWN} more of the same kind")


# ---- doctor ----


@dataclass(frozen=True)
class Finding:
    """The result of one check. level: "ok", "note" (nothing to do), "problem" (`remedy` says what
    to do), "error" (the check or the repair failed), "fixed"."""

    check: str
    level: str
    text: str
    remedy: str = ""
    instance: str = ""
    fix: Callable[[], str] | None = None
    """Removes the cause and returns a sentence on what was removed; raises ShmqError if it is in
    use by now."""


def ok(check: str, text: str) -> Finding:
    """A check that found nothing wrong."""
    return Finding(check, "ok", text)


def problem(check: str, text: str, remedy: str) -> Finding:
    """A check that found something wrong. remedy: what to do about it."""
    return Finding(check, "problem", text, remedy)
