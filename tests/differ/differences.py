"""Reads docs/differences.md, in which stands what differs on purpose from each original.

A row of a table has four cells: what the program does, what the original does, what shmq does, and
the reason. Text in backquotes in the first three is a pattern, in which `*` stands for anything.
Rows whose first cell has no backquotes are for readers alone, and say what no program can show.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "differences.md"
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """A difference that is wanted."""

    line: int
    does: tuple[str, ...]
    original: tuple[str, ...]
    shmq: tuple[str, ...]
    reason: str

    def covers(self, label: str, original: str, shmq: str) -> bool:
        """Whether this is the difference that was seen."""
        return _any(self.does, label) and _any(self.original, original) and _any(self.shmq, shmq)

    def __str__(self) -> str:
        return f"{PAGE.name}:{self.line}: {self.does[0]}"


def _any(patterns: tuple[str, ...], text: str) -> bool:
    return any(fnmatch.fnmatchcase(text, pattern.replace("[", "[[]")) for pattern in patterns)


def rows(kind: str, page: Path = PAGE) -> list[Row]:
    """The rows that a program can show, of the sections whose comment names this kind."""
    found: list[Row] = []
    section = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.startswith("#"):
            section = ""
        elif match := re.fullmatch(r"<!-- differ: (\w+) -->", line):
            section = match[1]
        elif section == kind and line.startswith("|") and not line.startswith("|--"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            if len(cells) != 4:
                raise ValueError(f"{page.name}:{number}: a row has four cells, not {len(cells)}")
            does, original, shmq = (tuple(_CODE.findall(cell)) for cell in cells[:3])
            if not does:
                continue
            if not (original and shmq and cells[3]):
                raise ValueError(f"{page.name}:{number}: a cell has no pattern, or no reason")
            found.append(Row(number, does, original, shmq, cells[3]))
    return found
