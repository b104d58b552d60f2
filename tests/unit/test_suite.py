"""A test that failed beside others runs again alone, as often as its part says, and must pass each
time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import ROOT

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
