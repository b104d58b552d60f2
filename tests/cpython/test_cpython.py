"""CPython's own tests of its queues and its process pool pass with shmq's in their place.

docs/from-multiprocessing.md lists those that do not, each with the reason. A test that passes and
is listed there is a failure here too."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cpython_tests import cpython_tests
from support.processes import ROOT, TESTS, WATCHDOG, Child, eventually

PAGE = ROOT / "docs" / "from-multiprocessing.md"
METHODS = ("fork", "spawn", "forkserver")
EACH = [
    method if method == "fork" else pytest.param(method, marks=pytest.mark.deep)
    for method in METHODS
]
GROUPS = {
    "queues": ("queues", "queues-of-threads", "processes"),
    "futures": ("initializer", "shutdown", "wait", "as-completed", "executor", "deadlock"),
}
#: With forkserver: only the start of a worker differs from spawn, so these groups are enough.
STARTED = ("queues", "executor")
#: Most of the time goes into these.
LONG = ("shutdown", "wait", "executor", "deadlock")
CASES = [
    pytest.param(
        module,
        group,
        method,
        marks=[pytest.mark.deep] if method != "fork" or group in LONG else [],
    )
    for method in METHODS
    for module, groups in GROUPS.items()
    for group in groups
    if method != "forkserver" or group in STARTED
]
ROW = re.compile(r"^\| `(\w+\.test_\w+)` \| ([\w, ]+) \| (.+) \|$", re.MULTILINE)


def section() -> str:
    """The part of the page that has the list."""
    _, heading, rest = PAGE.read_text().partition("\n## Deviations\n")
    assert heading
    return rest.partition("\n## ")[0]


def deviations(method: str) -> dict[str, bool]:
    """The tests that do not pass with processes that are started so, and whether they never do."""
    rows = ((name, words.split(", ")) for name, words, _ in ROW.findall(section()))
    return {name: "not always" not in words for name, words in rows if {"all", method} & set(words)}


def run(method: str, *words: str, **env: str) -> Child:
    path = os.pathsep.join(map(str, (*cpython_tests(), TESTS)))
    env |= {"PYTHONPATH": path, "START_METHOD": method, "PYTHONFAULTHANDLER": "1"}
    return Child([sys.executable, "-m", "cpython.run", *words], env)


def outcomes(child: Child) -> list[dict[str, Any]]:
    """The lines of a run, once it has ended."""
    while child.process.poll() is None:
        seen = len(child.lines)
        eventually(
            lambda seen=seen: child.process.poll() is not None or len(child.lines) > seen,
            10 * WATCHDOG,
            f"there is news after {child.lines[-1:]}",
        )
    return [json.loads(line) for line in child.succeed()]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty directory in which the names of sockets stay short enough."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(("module", "group", "method"), CASES)
def test_cpython(
    module: str, group: str, method: str, short_path: Path, keep: Callable[[Any], Any]
) -> None:
    child = keep(run(method, module, group, TMPDIR=str(short_path)))
    listed, failed, passed = deviations(method), [], set()
    for one in outcomes(child):
        if one["outcome"] == "passed":
            passed.add(one["test"])
        elif one["outcome"] == "failed" and one["test"] not in listed:
            failed.append(f"{one['test']}\n{one['text']}")
    assert not failed, "\n".join([*failed, child.errors])
    assert passed, "no test has run"
    never = {name for name, is_never in listed.items() if is_never}
    assert not passed & never, "these pass, and the page says that they do not"
    assert list(short_path.iterdir()) == []
    eventually(lambda: not list(Path("/dev/shm").glob(f"shmq*-{child.pid}-*")))


@pytest.mark.parametrize("method", EACH)
def test_each_deviation_is_a_test_that_there_is(method: str, keep: Callable[[Any], Any]) -> None:
    there: set[str] = set()
    for module in GROUPS:
        there |= set(keep(run(method, module, "--names")).succeed())
    assert deviations(method).keys() <= there


def test_each_row_of_the_list_is_read() -> None:
    rows = ROW.findall(section())
    assert len(rows) == section().count("\n| `")
    for name, words, _ in rows:
        assert set(words.split(", ")) <= {"all", "not always", *METHODS}, name
