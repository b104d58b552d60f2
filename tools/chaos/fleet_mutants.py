"""Faults that fleet_kills.py must find: patches of the package, each in a copy of it.

The first lines of a patch say what is wrong, and which nemeses find it. The storm, its instances
and Spark's processes import the copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from support.processes import ROOT, TESTS

from shmq import _native

PATCHES = TESTS / "chaos" / "fleet" / "mutants"
SURVIVES, FOUND = 0, 1  # statuses of a storm

# The editable installation finds the package before PYTHONPATH does. Python imports this module
# when that has been set up.
_SITE = """\
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "ScikitBuild" not in type(each).__name__]
"""


def names() -> list[str]:
    """The faults."""
    return sorted(path.stem for path in PATCHES.glob("*.patch"))


def made(name: str, to: Path) -> None:
    """A copy of the package with a fault, in a directory for PYTHONPATH."""
    for package in ("shmq", "pyspark_shmq"):
        shutil.copytree(ROOT / package, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_native.__file__, to / "shmq")
    (to / "sitecustomize.py").write_text(_SITE)
    done = subprocess.run(
        ["patch", "--quiet", "--fuzz=0", "-p1", "-d", to, "-i", PATCHES / f"{name}.patch"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"{name}.patch no longer applies: make the change that its first line describes in a "
            "copy of the file, write the patch again with 'diff -U2' below its header, and see "
            f"that the storm still finds it. patch says:\n{done.stdout}{done.stderr}"
        )


def words_of(name: str) -> list[str]:
    """The words of the command line of a storm that finds it: its nemeses, with commas between, and
    the properties of its round."""
    head = (PATCHES / f"{name}.patch").read_text().partition("\n---")[0]
    found = re.search(r"^Found by: (\S+)( --write)?$", head, re.MULTILINE)
    assert found, name
    writes = "--write" if found[2] else "--no-write"
    return ["--kinds", found[1], writes, "--no-tls", "--no-lookupd"]


def storm(name: str, words: Sequence[str]) -> tuple[int, str]:
    """The status of a storm with a fault, and what it said."""
    with tempfile.TemporaryDirectory(prefix="shmq-mutant-") as directory:
        made(name, Path(directory))
        program = Path(__file__).with_name("fleet_kills.py")
        done = subprocess.run(
            [sys.executable, str(program), *words_of(name), *words],
            cwd=directory,  # Python looks there first, or in PYTHONPATH
            env={**os.environ, "PYTHONPATH": os.pathsep.join((directory, str(TESTS)))},
            capture_output=True,
            text=True,
            check=False,
        )
    return done.returncode, done.stdout + done.stderr


def find_all(words: Sequence[str]) -> list[str]:
    """The faults that the storm does not find. words: of its command line."""
    missed = []
    for name in names():
        status, said = storm(name, words)
        last = next((line for line in said.splitlines() if "problems:" in line), "")
        click.echo(f"{name}: {'found' if status == FOUND else 'not found'} {last}")
        if status != FOUND or not last:
            click.echo(said)
            missed.append(name)
    return missed
