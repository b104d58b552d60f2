"""The verdict on a stream from many instances: what was published, what was done to the instances,
and what is in the parquet files at the end.

Each number is there once, in its first attempt. These are the exceptions:

* The memory of an instance was lost. Messages that waited there are not in the files. Those leased
  there are in them lease by lease, whole or not at all. The query has said so, as DataLoss.
* The driver gave no sign of life for longer than its leases live. Messages leased then may have
  come in a later attempt, and twice if the query has said so, as LeaseLost or DataLoss.
* A driver was stopped while another one finished what the first had planned. Its tasks may have
  ended with LeaseLost when they read that, which changes nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow.parquet

#: The errors that the documentation names, in what Spark says of a query that failed.
NAMED = re.compile(
    r"^(?:[\w.]+\.)?(DataLoss|LeaseLost|LeaseFenced|MemoryLost|HostAway): (.*)", re.MULTILINE
)


@dataclass(frozen=True)
class Row:
    """A message as it is in the files."""

    id: int
    number: int
    attempts: int


@dataclass
class Loss:
    """The content of memory that was lost: numbers that waited, and those of each lease."""

    address: str
    waiting: set[int]
    leases: dict[int, set[int]]


@dataclass
class Story:
    """published: the number by the id. risked: what was leased while leases lived shortly. stalls:
    how often a driver was stopped for longer than that. seconds: how often another one went on
    instead of it."""

    published: dict[int, int] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    risked: set[int] = field(default_factory=set)
    stalls: int = 0
    seconds: int = 0


class Files:
    """The output of a query, as Spark's log of it tells: files that are not in there are of tasks
    that failed."""

    def __init__(self, directory: Path) -> None:
        self.rows: list[Row] = []
        self._log = directory / "_spark_metadata"
        self._seen: set[str] = set()

    def read(self) -> int:
        """Read what was added. Returns the number of all rows."""
        logs = {each.name for each in self._log.glob("[0-9]*")} - self._seen
        for name in sorted(logs, key=lambda name: int(name.partition(".")[0])):
            for path in _paths((self._log / name).read_text()):
                if path not in self._seen:
                    self._seen.add(path)
                    self.rows += _rows(path)
            self._seen.add(name)
        return len(self.rows)


def _paths(log: str) -> Iterator[str]:
    for line in log.splitlines()[1:]:  # the first is the version
        entry = json.loads(line)
        yield unquote(urlsplit(entry["path"]).path)


def _rows(path: str) -> Iterator[Row]:
    table = pyarrow.parquet.read_table(path, columns=["id", "body", "attempts"])
    columns = (table.column(name).to_pylist() for name in ("id", "body", "attempts"))
    for number, body, attempts in zip(*columns, strict=True):
        yield Row(number, int(body), attempts)


def judge(
    story: Story, rows: list[Row], named: list[tuple[str, str]], ended: bool = True
) -> list[str]:
    """The problems, in words. named: errors that the query has ended with, as `NAMED` finds
    them. ended: nothing more is to come."""
    problems = []
    came: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if story.published.get(row.id) != row.number:
            problems.append(f"{row} was not published")
        came[row.number].append(row)
    waited = set().union(*(loss.waiting for loss in story.losses))
    leased = set().union(*(part for loss in story.losses for part in loss.leases.values()))
    lost, told = waited | leased, Counter(name for name, _ in named)
    for number in story.published.values():
        found, risked = came[number], number in story.risked
        if ended and not found and number not in lost:
            problems.append(f"{number} did not come")
        if found and number in waited and not risked:
            problems.append(f"{number} waited in memory that was lost, and came")
        if len(found) > 1 and not (risked and told["LeaseLost"] + told["DataLoss"]):
            problems.append(f"{number} came {len(found)} times: {found}")
        late = max((row.attempts for row in found), default=1) - 1
        if late and not risked:
            problems.append(f"{number} came in attempt {late + 1}")
    if not story.losses and not story.stalls:
        problems += [
            f"{name} without a reason: {text}"
            for name, text in named
            if _grave(name) and not (story.seconds and is_of_a_task(name, text))
        ]
    return problems + (_losses(story, came, named) if ended else [])


def _losses(story: Story, came: dict[int, list[Row]], named: list[tuple[str, str]]) -> list[str]:
    problems = []
    for loss in story.losses:
        for lease, numbers in loss.leases.items():
            there = {number for number in numbers if came[number]}
            if there and there != numbers and not numbers & story.risked:
                problems.append(
                    f"lease {lease} of lost memory came in part: {len(there)} of {len(numbers)}"
                )
        said = any(name == "DataLoss" and loss.address in text for name, text in named)
        gone = [number for part in loss.leases.values() for number in part if not came[number]]
        if gone and not said:
            problems.append(
                f"{gone[:5]} were leased at {loss.address} and lost, and nobody said so"
            )
    return problems


def is_of_a_task(name: str, text: str) -> bool:
    """Whether an error is that of a task which reads a lease that somebody has ended."""
    return name == "LeaseLost" and text.startswith("read ")


def _grave(name: str) -> bool:
    return name in ("DataLoss", "LeaseLost", "MemoryLost")
