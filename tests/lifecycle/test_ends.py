"""Every end of every handle gives everything back, or `ends.STAYS` says what stays and why."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lifecycle import plants
from lifecycle.__main__ import command
from lifecycle.ends import ENDS, has
from lifecycle.handles import ROWS
from support.processes import HELPERS

ALL = [end for ends in ENDS.values() for end in ends]
SAMPLE = ("consumer", "executor_of_a_broker", "remote_consumer", "queue")
#: Rows, and how many of the ends that need a process of their own a run of `--all` draws.
SHARE = 0.2
GROUPS = {
    "shared": ([name for name, row in ROWS.items() if not row.own], 0.5),
    "own": ([name for name, row in ROWS.items() if row.own], 0.25),
}


def ended(directory: Path, words: Sequence[str], env: dict[str, str] | None = None) -> Any:
    """Run the machine: what it found, and the number of cells."""
    env = {**os.environ, **HELPERS, **(env or {})}
    done = subprocess.run(
        command(directory, words), capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    *found, last = map(json.loads, done.stdout.splitlines())
    return found, last["cells"], done.stderr


def everything_is_given_back(directory: Path, rows: Sequence[str], share: float = 1.0) -> None:
    found, cells, said = ended(directory, [*rows, f"--share={share}"])
    seed = said.partition("\n")[0]
    assert not found, f"{seed}\n{json.dumps(found, indent=1)}{said[-3000:]}"
    every = sum(has(ROWS[row], end) for row in rows for end in ALL)
    assert cells == every if share == 1 else share * every / 2 < cells < every, seed


@pytest.mark.shallow
def test_every_end_of_some_handles_gives_everything_back(tmp_path: Path) -> None:
    everything_is_given_back(tmp_path, SAMPLE)


@pytest.mark.deep
@pytest.mark.parametrize("group", GROUPS)
def test_drawn_ends_of_every_handle_give_everything_back(tmp_path: Path, group: str) -> None:
    everything_is_given_back(tmp_path, *GROUPS[group])


#: Modules with rows, and what each needs.
OTHERS = {
    "programs": "aiohttp",
    "celery": "celery",
    "django": "django",
    "dramatiq": "dramatiq",
    "taskiq": "taskiq",
    "joblib": "joblib",
    "spark": "pyspark",
}


@pytest.mark.deep
def test_drawn_ends_of_programs_or_a_framework_give_everything_back(tmp_path: Path) -> None:
    """Of one of these modules in a run: each takes half a minute of a processor."""
    there = [name for name, package in OTHERS.items() if importlib.util.find_spec(package)]
    if not there:
        pytest.skip(f"needs one of {', '.join(OTHERS.values())}")
    seed = os.environ.get("SHMQ_TEST_SEED", secrets.token_hex(4))
    module = f"lifecycle.rows_of_{random.Random(seed).choice(there)}"
    words = [f"--share={SHARE}", f"--seed={seed}", "--modules", module]
    found, cells, said = ended(tmp_path, words)
    named = f"{module}, {said.partition(chr(10))[0]}"
    assert not found, f"{named}\n{json.dumps(found, indent=1)}{said[-3000:]}"
    assert cells, named


@pytest.mark.deep
@pytest.mark.parametrize("name", plants.PLANTS)
def test_a_planted_fault_is_found(tmp_path: Path, name: str) -> None:
    plant = plants.PLANTS[name]
    words = [plant.row, "--ends", plant.end, "--patience", "10"]
    found, _, said = ended(tmp_path, words, plants.environment(name))
    assert [each["rows"] for each in found] == [[plant.row]], said[-3000:]
