"""Every end of every handle gives everything back, or `ends.STAYS` says what stays and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lifecycle import plants
from lifecycle.ends import ENDS, has
from lifecycle.handles import ROWS
from support.processes import HELPERS

ALL = [end for ends in ENDS.values() for end in ends]
SAMPLE = ("consumer", "executor_of_a_broker", "remote_consumer", "queue")
GROUPS = {
    "attached": [name for name, row in ROWS.items() if not row.own and "remote" not in name],
    "remote": [name for name in ROWS if "remote" in name],
    "own": [name for name, row in ROWS.items() if row.own],
}
#: A /dev/shm and a directory of its own, so that what is left there was left by its processes.
OWN = (
    'mount -t tmpfs -o size=512m tmpfs /dev/shm && mount -t tmpfs -o size=64m tmpfs $0 && exec "$@"'
)


def ended(directory: Path, words: Sequence[str], env: dict[str, str] | None = None) -> Any:
    """Run the machine: what it found, and the number of cells."""
    own = ["unshare", "-Urm", "sh", "-c", OWN, str(directory)]
    command = [*own, sys.executable, "-m", "lifecycle.machine", str(directory), *words]
    env = {**os.environ, **HELPERS, **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    *found, last = map(json.loads, done.stdout.splitlines())
    return found, last["cells"], done.stderr


def everything_is_given_back(directory: Path, rows: Sequence[str]) -> None:
    found, cells, said = ended(directory, rows)
    assert not found, json.dumps(found, indent=1) + said[-3000:]
    assert cells == sum(has(ROWS[row], end) for row in rows for end in ALL)


@pytest.mark.shallow
def test_every_end_of_some_handles_gives_everything_back(tmp_path: Path) -> None:
    everything_is_given_back(tmp_path, SAMPLE)


@pytest.mark.deep
@pytest.mark.parametrize("group", GROUPS)
def test_every_end_of_every_handle_gives_everything_back(tmp_path: Path, group: str) -> None:
    everything_is_given_back(tmp_path, GROUPS[group])


@pytest.mark.deep
@pytest.mark.parametrize("name", plants.PLANTS)
def test_a_planted_fault_is_found(tmp_path: Path, name: str) -> None:
    plant = plants.PLANTS[name]
    words = [plant.row, "--ends", plant.end, "--patience", "10"]
    found, _, said = ended(tmp_path, words, plants.environment(name))
    assert [each["rows"] for each in found] == [[plant.row]], said[-3000:]
