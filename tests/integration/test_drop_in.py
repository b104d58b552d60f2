"""Programs of `multiprocessing` and `concurrent.futures` do the same on shmq as on what it
replaces.

Each program runs on both, side by side, and must print and return the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import drop_in_programs
from support.processes import WATCHDOG


def run(library: str, program: str, method: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "support.drop_in_programs", library, program, method],
        cwd=Path(drop_in_programs.__file__).parents[1],
        stdout=subprocess.PIPE,
        timeout=WATCHDOG,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(("program", "method"), list(drop_in_programs.names()))
def test_a_program_does_the_same(program: str, method: str) -> None:
    expected = run("standard", program, method)
    assert expected[0] == 0
    assert expected[1]
    assert run("shmq", program, method) == expected
