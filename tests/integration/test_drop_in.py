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


SCRIPT = """
import multiprocessing, os, sys, time

def work(number):
    time.sleep(0.2)
    os.write(1, b"task %d ran\\n" % number)

if __name__ == "__main__":
    if sys.argv[1] == "shmq":
        from shmq import Executor
    else:
        from concurrent.futures import ProcessPoolExecutor as Executor
    pool = Executor(2, mp_context=multiprocessing.get_context(sys.argv[2]))
    futures = [pool.submit(work, number) for number in range(4)]
"""


WITHIN = """
if __name__ == "__main__":
    from multiprocessing import spawn
    real = spawn.get_preparation_data
    def without_the_script(name):
        found = real(name)
        found.pop("init_main_from_path", None)
        return found
    spawn.get_preparation_data = without_the_script
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_start_while_a_script_ends_find_it(method: str, tmp_path: Path) -> None:
    """The script loses its name between two steps of `multiprocessing`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('if __name__ == "__main__":', WITHIN, 1))
    done = subprocess.run(
        [sys.executable, script, "shmq", method],
        stdout=subprocess.PIPE,
        timeout=WATCHDOG,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [f"task {number} ran" for number in range(4)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("library", ["standard", "shmq"])
def test_a_script_that_ends_has_its_tasks_done(library: str, method: str, tmp_path: Path) -> None:
    """Workers that start after the last line of the script find its functions."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, library, method],
        stdout=subprocess.PIPE,
        timeout=WATCHDOG,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == [f"task {number} ran" for number in range(4)]
