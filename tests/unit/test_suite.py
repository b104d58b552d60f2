"""A test that failed beside others runs again alone, as often as its part says, and must pass each
time. No processor is idle while there is a part that computes."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.processes import ROOT, WATCHDOG

FAILS_ONCE = """
from pathlib import Path
def test_one():
    mark = Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    assert not first
def test_two():
    pass
"""
#: It passes in one run of two.
FAILS_EVERY_OTHER_TIME = FAILS_ONCE.replace(
    "mark.touch()", "mark.touch() if first else mark.unlink()"
)
CALL = "import sys\nsubprocess.run([sys.executable, '-c', {!r}], check=True)"
FAILS = "def test_one():\n    assert False\n"


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("suite_of_tools", ROOT / "tools" / "suite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.setattr(module, "TOP", tmp_path)
    monkeypatch.setattr(module, "LOGS", tmp_path)
    monkeypatch.setattr(module, "SUSPECTS", tmp_path / "suspects.txt")
    return module


@pytest.mark.parametrize(
    ("text", "again", "failed", "passed_late"),
    [
        (FAILS_ONCE, 1, [], ["test_part.py::test_one"]),
        (FAILS_ONCE, 5, [], ["test_part.py::test_one"]),
        (FAILS_ONCE, 0, ["part"], []),
        (FAILS_EVERY_OTHER_TIME, 1, [], ["test_part.py::test_one"]),
        (FAILS_EVERY_OTHER_TIME, 5, ["part"], []),
        (FAILS, 1, ["part"], []),
        (FAILS.replace("one", "{}") * 4, 1, ["part"], []),
        ("import nowhere\n", 1, ["part"], []),
    ],
)
def test_a_failed_test_runs_again_where_that_is_allowed(
    suite: ModuleType,
    tmp_path: Path,
    text: str,
    again: int,
    failed: list[str],
    passed_late: list[str],
) -> None:
    for letter in "abcd":
        text = text.replace("{}", letter, 1)
    (tmp_path / "test_part.py").write_text(text)
    command = suite.pytest("test_part.py", workers=1)
    runs = suite.Suite()
    runs.run([suite.Part("part", "a part", [command], "wait", again=again)])
    assert (runs.failed, runs.passed_late) == (failed, passed_late)


def test_the_next_run_begins_with_what_passed_only_when_run_again(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> list[str]:
        runs = suite.Suite()
        command = suite.pytest("test_part.py", "--deselect=test_part.py::test_one", workers=1)
        runs.run([suite.Part("part", "a part", [command], "wait", again=1)])
        return list(runs.failed)

    def named() -> list[str]:
        return sorted((tmp_path / "suspects.txt").read_text().splitlines())

    (tmp_path / "test_part.py").write_text(FAILS_ONCE)
    command = suite.pytest("test_part.py", workers=1)
    suite.Suite().run([suite.Part("part", "a part", [command], "wait", again=1)])
    assert named() == ["part test_part.py::test_one"]
    with (tmp_path / "suspects.txt").open("a") as file:
        file.write("other test_other.py::test_one\npart test_gone.py::test_one\n")
        file.write("part test_part.py::test_gone\n")
    (tmp_path / "test_part.mark").unlink()
    capsys.readouterr()
    assert run() == ["part"]
    first = capsys.readouterr().out
    assert first.index("before ... FAILED: test_part.py::test_one") < first.index("a part ... ")
    assert named() == ["other test_other.py::test_one", "part test_part.py::test_one"]
    assert run() == []
    assert named() == ["other test_other.py::test_one"]


def test_two_parts_that_compute_run_beside_each_other_when_none_waits(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    met: set[str] = set()
    meeting = threading.Barrier(2)

    def run(self: object, part: Any) -> None:
        ran.append(part.name)
        if part.name in ("second", "third"):
            with contextlib.suppress(threading.BrokenBarrierError):
                meeting.wait(WATCHDOG)
                met.add(part.name)

    monkeypatch.setattr(suite.Suite, "_run_part", run)
    lanes = {"first": "wait", "second": "compute", "third": "compute", "last": "alone"}
    suite.Suite().run([suite.Part(name, name, [], lane) for name, lane in lanes.items()])
    assert met == {"second", "third"}
    assert sorted(ran) == sorted(lanes)
    assert ran[-1] == "last"


def test_no_more_than_two_parts_that_wait_run_beside_each_other(
    suite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"wait": set(), "beside": set()}
    monkeypatch.setattr(
        suite.Suite, "_run_part", lambda self, part: threads[part.lane].add(threading.get_ident())
    )
    suite.Suite().run([suite.Part(name, name, [], lane) for name in "abcdef" for lane in threads])
    assert [len(names) for names in threads.values()] == [1, 1]


def test_the_line_of_a_part_has_the_seconds_that_its_processes_took(
    suite: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    child = "import os\nwhile sum(os.times()[:2]) < 1:\n    pass\n"
    command = [sys.executable, "-c", f"import subprocess\n{CALL.format(child)}"]
    suite.Suite().run([suite.Part("part", "a part", [command])])
    found = re.fullmatch(r"a part \.\.\. \d+ s \((\d+) s\)\n", capsys.readouterr().out)
    assert found is not None
    assert int(found[1]) >= 1
