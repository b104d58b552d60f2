"""Programs of `multiprocessing` and `concurrent.futures` do the same on shmq as on what it
replaces.

Each program runs on both, side by side, and must print and return the same.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

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


#: Cases of `drop_in_matrix` in which shmq is to do something else than the standard library: a
#: pattern of their names, what shmq does, and why. docs/from-multiprocessing.md has them too.
ANYTHING = object()
WANTED: list[tuple[str, Any, str]] = [
    (
        r"timeouts_of_(get|put): .*(get|put)\(False, (text|bytes|list|complex|decimal)\).*",
        ANYTHING,
        "a timeout that is not used is not looked at",
    ),
    (r"timeouts_of_get: .*get\(('|\[\]|None).*", "Empty", "`block` is any truth value"),
    (
        r"timeouts_of_get: .*get\(True, .*\) of an item",
        "= 'item'",
        "a timeout is looked at where the call has to wait",
    ),
    (r"timeouts_of_get: .*left after get\(True, .*\)", True, "the same"),
    (
        r"mapped: timeout (infinity|float|float max|int)",
        "= ['a']",
        "a timeout may be of any length",
    ),
    (r"timeouts_of_get: .*get\(timeout=decimal\)", "Empty", "any real number is a timeout"),
    (
        r"mapped: timeout decimal(, of nothing)?",
        ANYTHING,
        "the same",
    ),
    (r"mapped: timeout complex, of nothing", "TypeError", "a wrong timeout is refused at once"),
    (r"mapped: timeout nan, of nothing", "ValueError", "the same"),
    (r"timeouts_of_put: .*put\(timeout=nan\)", "ValueError", "NaN is no number of seconds"),
    (r"timeouts_of_put: (Joinable)?Queue after put\(timeout=nan\)", 0, "the same"),
    (r"futures_of_tasks: pending.*\(nan\)", "ValueError", "the same"),
    (r"futures_of_tasks: pending.*\(fraction\)", "TimeoutError", "any real number is a timeout"),
    (r"closed_queues: .*join_thread before close", "= None", "there is no thread"),
    (r"closed_queues: closed (Joinable)?Queue.empty\(\)", "OSError", "as of Python 3.12.6"),
    (
        r"arguments_of_an_executor: max_workers (zero float|negative float|negative infinity)",
        "TypeError",
        "a number that is not whole is of the wrong type, whatever its value",
    ),
    (
        r"mapped: chunksize (.*float|negative infinity|fraction|decimal|small|nan)",
        "TypeError",
        "the same",
    ),
    # without a counterpart
    (r"queues_and_signals: a handler ends a join", "= None", "it waits without a lock"),
    (
        r"ended_while_threads_submit: .*",
        [["RuntimeError"] * 3, 0],
        "each task has an outcome",
    ),
    (r"ends_of_executors: (kill|terminate)_workers", ["BrokenProcessPool"] * 2, "on any Python"),
]


def cases(library: str, group: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "support.drop_in_matrix", library, group],
        cwd=Path(drop_in_programs.__file__).parents[1],
        stdout=subprocess.PIPE,
        timeout=WATCHDOG,
        text=True,
        check=True,
    )
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("group", ["queues", "executors"])
def test_each_method_does_the_same_with_usual_and_odd_arguments(group: str) -> None:
    expected, found = cases("standard", group), cases("shmq", group)
    assert expected
    differences = {
        name: (expected.get(name), found.get(name))
        for name in expected | found
        if (name in expected, expected.get(name)) != (name in found, found.get(name))
    }
    unwanted = {
        name: what
        for name, what in differences.items()
        if not any(
            re.fullmatch(pattern, name) and wanted in (ANYTHING, what[1])
            for pattern, wanted, _ in WANTED
        )
    }
    assert not unwanted


def test_no_difference_is_wanted_that_there_cannot_be() -> None:
    """A pattern that no case has any more hides nothing."""
    folder = Path(drop_in_programs.__file__).parent
    source = "".join(file.read_text() for file in folder.glob("drop_in_*.py"))
    for pattern, _, reason in WANTED:
        name = pattern.split(":", 1)[0]
        names = ["timeouts_of_get", "timeouts_of_put"] if "(" in name else [name]
        assert all(f"def {each}(" in source for each in names), reason


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
