"""Dramatiq's own tests pass with shmq's broker and backends in the place of its own.

docs/dramatiq.md lists those that do not, each with the reason. A test that passes and is listed
there is a failure here too."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from support.external_programs import missing
from support.processes import ROOT, WATCHDOG, Child

FIXTURES = Path(__file__).parent / "theirs"
PAGE = ROOT / "docs" / "dramatiq.md"
ROW = re.compile(r"^\| `(\w+\.py::\w+)` \| (.+) \|$", re.MULTILINE)
FILES = {
    "broker": ("test_redis.py", "test_worker.py", "test_actors.py", "test_generic_actors.py"),
    "composition": ("test_composition.py", "test_callbacks.py", "test_messages.py"),
    "results": ("test_results.py",),
    "limits": (
        "test_barrier.py",
        "test_bucket_rate_limiter.py",
        "test_concurrent_rate_limiter.py",
        "test_window_rate_limiter.py",
    ),
}
ALL = {name for names in FILES.values() for name in names}
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) \S*?(\w+\.py::\w+)")


def deviations() -> dict[str, str]:
    """The tests that do not pass, and why."""
    _, heading, rest = PAGE.read_text().partition("\n## Dramatiq's own tests\n")
    assert heading
    return dict(ROW.findall(rest.partition("\n## ")[0]))


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Dramatiq's tests, with fixtures of ours beside them."""
    source = ROOT / "build" / "peers" / "dramatiq" / "dramatiq" / "tests"
    if not source.is_dir():
        missing("Dramatiq's own tests", "`tools/dev test` unpacks its source package")
    folder = tmp_path / "theirs" / "tests"
    shutil.copytree(source, folder)
    for name in ("conftest.py", "common.py"):
        shutil.copy(FIXTURES / name, folder / name)
    (folder / "__init__.py").touch()
    return folder


def outcomes(theirs: Path, files: tuple[str, ...], *words: str) -> tuple[set[str], set[str], str]:
    """The tests that passed, those that did not, and the end of what was printed."""
    options = ["-p", "no:cacheprovider", "-p", "no:asyncio", "-rA", "-q", "-c", "/dev/null"]
    # for other styles pytest parses the source, which CPython 3.11 may refuse beside other threads
    options += ["--rootdir", str(theirs.parent), "--tb", "native", *words]
    files_ = [name if "::" in name else str(theirs / name) for name in files]
    child = Child([sys.executable, "-m", "pytest", *options, *files_])
    try:
        child.wait(10 * WATCHDOG)
        lines = child.lines
    finally:
        child.close()
    found = [match for line in lines if (match := OUTCOME.match(line))]
    bad = {match[2] for match in found if match[1] != "PASSED"}
    return {match[2] for match in found} - bad, bad, "\n".join(lines[-60:])


@pytest.mark.deep
@pytest.mark.parametrize("group", FILES)
def test_their_tests_pass_but_those_that_are_listed(group: str, theirs: Path) -> None:
    words = [f"--deselect=tests/{name}" for name in deviations()]
    passed, failed, text = outcomes(theirs, FILES[group], *words, "--timeout=300")
    assert passed, text
    if failed:  # they have limits of seconds in them, which a busy machine may break: once more
        again = tuple(f"{theirs}/{name}" for name in sorted(failed))
        _, failed, text = outcomes(theirs, again, *words, "--timeout=300")
    assert not failed, text


@pytest.mark.deep
def test_none_of_those_that_are_listed_passes(theirs: Path) -> None:
    listed = deviations()
    assert all(name.split("::")[0] in ALL for name in listed)
    names = tuple(f"{theirs}/{name}" for name in listed)
    passed, failed, text = outcomes(theirs, names, "--timeout=10")
    assert not passed, text
    assert failed == set(listed), text
