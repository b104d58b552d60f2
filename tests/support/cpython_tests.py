"""CPython's own tests: of the interpreter that runs, or of Debian's packages for its version."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from support.external_programs import missing
from support.processes import ROOT

#: A folder with the package `test`: where `tools/dev test` puts Debian's.
DEBIANS = ROOT / "build" / "peers" / f"cpython-3.{sys.version_info.minor}"

_NEEDED = ("test._test_multiprocessing", "test.test_queue", "test.test_concurrent_futures")


def cpython_tests() -> list[Path]:
    """Folders that must be on the path of a Python, so that it finds the whole package `test`."""
    if all(map(_is_found, _NEEDED)):
        return []
    if (DEBIANS / "test").is_dir():
        return [DEBIANS]
    name = f"libpython3.{sys.version_info.minor}-testsuite"
    missing("CPython's package `test`", f"`tools/dev test` unpacks Debian's {name}")


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
