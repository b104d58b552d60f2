"""Runs one group of CPython's tests, and writes one line of JSON for each test:

    START_METHOD=fork python -m cpython.run queues processes

With `--names` in place of the group it writes the names of all tests."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import unittest
from types import ModuleType
from typing import Any

#: Of the names of classes: how their processes are started is no part of a test's name.
_PREFIX = re.compile("^(WithProcesses|ProcessPool(Forkserver|Fork|Spawn))")


class Lines(unittest.TestResult):
    """Writes the outcome of each test when it is known."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def _write(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        line = {"test": name_of(test), "outcome": outcome, "text": text}
        print(json.dumps(line), file=self._file, flush=True)

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._write(test, "began")

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "passed")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addFailure(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped", reason)


def name_of(test: unittest.TestCase) -> str:
    """`TestQueue.test_put`. Where a class or a module could not be prepared: unittest's words."""
    method = getattr(test, "_testMethodName", None)
    return f"{_PREFIX.sub('', type(test).__name__)}.{method}" if method else test.id()


def tests(module: ModuleType, group: str) -> list[unittest.TestSuite]:
    """The tests of each class of a group."""
    chosen = [
        unittest.defaultTestLoader.loadTestsFromTestCase(case)
        for name, case in vars(module).items()
        if isinstance(case, type) and re.fullmatch(module.GROUPS[group], name)
    ]
    assert chosen, f"CPython has no class of tests for {group}"
    return chosen


def main() -> None:
    module_name, group = sys.argv[1:]
    module = importlib.import_module(f"cpython.{module_name}")
    if group == "--names":
        for each in module.GROUPS:
            for suite in tests(module, each):
                print(*(name_of(test) for test in suite), sep="\n")
        return
    # Some make a directory of a fixed name where they are, and other groups run at the same time.
    os.chdir(os.environ["TMPDIR"])
    # The tests write to the standard output themselves, as do the processes that they start.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    unittest.TestSuite(tests(module, group)).run(Lines(lines))


if __name__ == "__main__":
    main()
