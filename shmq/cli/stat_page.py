"""The newest look of `shmq stat` as a table: in a pipe, below the one before, or on a screen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from shmq.cli.output import painted
from shmq.cli.stat_screen import Screen

#: Most of a core that the looks of --watch may take: with 10 000 channels one takes a second.
_SHARE: Final = 0.2


@dataclass(frozen=True)
class Frame:
    """Where a table goes. columns: width of the terminal; None: no limit."""

    columns: int | None
    is_full: bool
    """The whole screen is its, so that there is room for more above the table."""
    sort: str


class Look(Protocol):
    """The state that a table shows, at one moment."""

    @property
    def cost(self) -> float:
        """Seconds of the processor that the look took."""

    @property
    def status(self) -> int:
        """The exit status."""

    @property
    def keys(self) -> Sequence[str]:
        """The sort keys."""

    @property
    def is_by_row(self) -> bool:
        """Whether each item of `rows` becomes one row of the table."""

    def rows(self, sort: str) -> list[Any]:
        """Return what the table is made of, in order."""

    def above(self, frame: Frame) -> list[str]:
        """Return the lines above the table."""

    def table(self, rows: list[Any], frame: Frame) -> list[str]:
        """Return the lines of the table, the first with its titles."""


_L = TypeVar("_L", bound=Look)


def print_each(
    looks: Iterator[_L], write: Callable[[_L], None], interval: float | None, count: int | None
) -> int:
    """Write look after look, until Ctrl-C or `count` of them. interval: as of `show_all`. Returns
    the exit status."""
    look = next(looks)
    for number in itertools.count(1):
        write(look)
        if number == (count or (None if interval else 1)):
            break
        time.sleep(interval or 1.0)
        look = next(looks)
    return look.status


def show_all(looks: Iterator[Look], sort: str, interval: float | None, count: int | None) -> int:
    """Print tables, until Ctrl-C or `count` of them. interval: seconds between two looks; None:
    there is one. Returns the exit status."""
    most = count or (None if interval else 1)
    look = next(looks)
    with Screen(is_live=interval is not None) as screen:
        page = _Page(screen, sort)
        for number in itertools.count(1):
            page.show(look)
            if number == most:
                break
            pause = max(interval or 1.0, look.cost * (1 / _SHARE - 1))
            if not page.wait(time.monotonic() + pause):
                break
            look = next(looks)
    if screen.is_full and most is not None:
        screen.print(page.whole())  # so that something of it stays
    return look.status


class _Page:
    """The newest look as a table, of which a whole screen shows a part."""

    def __init__(self, screen: Screen, sort: str) -> None:
        self._screen, self._sort = screen, sort
        self._first = 0  # row at the top
        self._room = self._count = 0  # rows that there is room for; all rows
        self._look: Look | None = None

    @property
    def _frame(self) -> Frame:
        return Frame(self._screen.columns, self._screen.is_full, self._sort)

    def show(self, look: Look) -> None:
        """Show another look."""
        self._look = look
        if self._screen.is_full:
            self._draw()
        else:
            self._screen.show(self.whole())

    def whole(self) -> list[str]:
        """All lines of the look."""
        assert self._look is not None
        frame = self._frame
        return [*self._look.above(frame), *self._look.table(self._look.rows(self._sort), frame)]

    def _draw(self) -> None:
        """Fill the screen. Only the channels that are seen are made into text."""
        assert self._look is not None
        look, frame = self._look, self._frame
        above, lines = look.above(frame), look.rows(self._sort)
        self._room = max(self._screen.lines - len(above) - 2, 1)  # with titles and the last line
        if look.is_by_row:
            self._scroll(len(lines))
            title, *rows = look.table(lines[self._first : self._first + self._room], frame)
        else:
            title, *rows = look.table(lines, frame)
            self._scroll(len(rows))
            rows = rows[self._first : self._first + self._room]
        self._screen.show([*above, title, *rows, *self._foot(len(rows))])

    def _scroll(self, count: int) -> None:
        self._count = count
        self._first = max(min(self._first, count - self._room), 0)

    def _foot(self, shown: int) -> list[str]:
        """The last line: which rows these are, and the keys."""
        place = f"{self._first + 1}-{self._first + shown} of {self._count}" if self._count else ""
        if self._screen.has_keys:
            text = f"{place}  by {self._sort}: < >  scroll: ↑ ↓  end: q".strip()
        elif shown < self._count:
            text = f"{place} (--sort, --topic)"
        else:
            return []
        return [painted(text[: self._screen.columns], dim=True)]

    def wait(self, until: float) -> bool:
        """Wait, and do what is typed. until: monotonic seconds. Returns False after q."""
        while (key := self._screen.wait(until)) is not None:
            if key == "q":
                return False
            steps = {"up": -1, "down": 1, "page up": -self._room, "page down": self._room}
            steps |= {"home": -self._count, "end": self._count}
            self._first += steps.get(key, 0)
            if key in ("<", ">") and self._look is not None:
                keys = self._look.keys
                step = 1 if key == ">" else -1
                self._sort = keys[(keys.index(self._sort) + step) % len(keys)]
            if self._screen.is_full:
                self._draw()
        return True
