"""Taskiq's own tests pass with shmq's broker and results in the place of its own in memory.

docs/taskiq.md lists those that do not, each with the reason. A test that passes and is listed there
is a failure here too."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.external_programs import missing
from support.processes import ROOT, WATCHDOG, Child

FIXTURES = Path(__file__).parent / "theirs"
PAGE = ROOT / "docs" / "taskiq.md"
ROW = re.compile(r"^\| `([\w/]+\.py::\w+)` \| (.+) \|$", re.MULTILINE)
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR) \S*?theirs/tests/([\w/]+\.py::\w+)")
FILES = (
    "test_requeue.py",
    "test_retry_task.py",
    "test_exceptions_flow.py",
    "test_kicker.py",
    "test_acks.py",
    "depends",
    "api",
    "middlewares/test_task_retry.py",
    "middlewares/test_simple_retry.py",
    "receiver",
    "cli/scheduler/test_send_with_timeout.py",
    "scheduler",
)


def deviations() -> dict[str, str]:
    """The tests that do not pass, and why."""
    _, heading, rest = PAGE.read_text().partition("\n## Taskiq's own tests\n")
    assert heading
    return dict(ROW.findall(rest.partition("\n## ")[0]))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Taskiq's tests, with brokers of ours beside them."""
    source = ROOT / "build" / "peers" / "taskiq" / "taskiq" / "tests"
    if not source.is_dir():
        missing("Taskiq's own tests", "`tools/dev test` unpacks its source package")
    folder = tmp_path / "theirs" / "tests"
    shutil.copytree(source, folder)
    for name in ("conftest.py", "utils.py"):
        shutil.copy(FIXTURES / name, folder / name)
    for each in [folder, *folder.rglob("*")]:
        if each.is_dir():
            (each / "__init__.py").touch()
    return folder


def outcomes(theirs: Path, names: list[str], *words: str) -> tuple[set[str], set[str], str]:
    """The tests that passed, those that did not, and the end of what was printed."""
    options = ["-p", "no:cacheprovider", "-p", "no:asyncio", "-o", "anyio_mode=auto", "-rA", "-q"]
    # for other styles pytest parses the source, which CPython 3.11 may refuse beside other threads
    options += ["-c", "/dev/null", "--rootdir", str(theirs.parent), "--tb", "native", *words]
    paths = [str(theirs / name) for name in names]
    child = Child([sys.executable, "-m", "pytest", *options, *paths])
    try:
        child.wait(10 * WATCHDOG)
        lines = child.lines
    finally:
        child.close()
    found = [match for line in lines if (match := OUTCOME.match(line))]
    bad = {match[2] for match in found if match[1] != "PASSED"}
    return {match[2] for match in found} - bad, bad, "\n".join(lines[-60:])


@pytest.mark.deep
def test_their_tests_pass_but_those_that_are_listed(theirs: Path) -> None:
    words = [f"--deselect=tests/{name}" for name in deviations()]
    passed, failed, text = outcomes(theirs, list(FILES), *words, "--timeout=300")
    assert passed, text
    if failed:  # they have limits of seconds in them, which a busy machine may break: once more
        _, failed, text = outcomes(theirs, sorted(failed), *words, "--timeout=300")
    assert not failed, text


@pytest.mark.deep
def test_none_of_those_that_are_listed_passes(theirs: Path) -> None:
    listed = deviations()
    passed, failed, text = outcomes(theirs, list(listed), "--timeout=60")
    assert not passed, text
    assert failed == set(listed), text
