"""A strict type checker finds what is wrong in a user's program, and nothing in a right one."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from support.processes import ROOT

import shmq

PROGRAMS = Path(__file__).parent / "typed"


def found_by_mypy(file: str, tmp_path: Path) -> set[tuple[int, str]]:
    """(line, code) of each error in one of the programs."""
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nenable_error_code = truthy-bool\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--show-error-codes",
            "--hide-error-context",
            f"--config-file={config}",
            f"--cache-dir={ROOT / '.mypy_cache'}",
            PROGRAMS / file,
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if ": note: " not in line]
    errors = [re.fullmatch(r".*?(\w+\.py):(\d+): error: .* \[([a-z-]+)\]", line) for line in lines]
    assert all(error and error[1] == file for error in errors), done.stdout
    return {(int(error[2]), error[3]) for error in errors if error}


def expected(file: str) -> set[tuple[int, str]]:
    lines = enumerate((PROGRAMS / file).read_text().splitlines(), 1)
    marks = ((number, re.search(r"  # wrong: (.+)$", line)) for number, line in lines)
    return {(number, mark[1]) for number, mark in marks if mark}


@pytest.mark.parametrize("file", ["right.py", "wrong.py"])
def test_mypy_finds_exactly_what_is_wrong(file: str, tmp_path: Path) -> None:
    assert found_by_mypy(file, tmp_path) == expected(file)
    assert bool(expected(file)) == (file == "wrong.py")


@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
@pytest.mark.parametrize("file", ["right.py", "wrong.py"])
def test_pyright_finds_exactly_what_is_wrong(file: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["pyright", "--pythonpath", sys.executable, PROGRAMS / file],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    found = {int(line) for line in re.findall(rf"{file}:(\d+):\d+ - error", done.stdout)}
    assert found == {number for number, _ in expected(file)}, done.stdout


def public() -> list[tuple[str, typing.Any]]:
    """Everything that a user may call: functions, classes and their methods."""
    found: list[tuple[str, typing.Any]] = []
    for name in shmq.__all__:
        item = getattr(shmq, name)
        if inspect.isclass(item) and item.__module__.startswith("shmq.") and name[0].isupper():
            found += [
                (f"{name}.{word}", member)
                for word, member in vars(item).items()
                if inspect.isfunction(member) and not word.startswith("_")
            ]
        elif inspect.isfunction(item):
            found.append((name, item))
    return found


@pytest.mark.parametrize(("name", "call"), public(), ids=[name for name, _ in public()])
def test_every_python_function_says_its_types(name: str, call: typing.Any) -> None:
    signature = inspect.signature(call)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.name == "self" or parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize(
    ("owner", "words"),
    [
        (shmq.Producer, "`publish(body: Buffer, defer: float | None = None, "),
        (shmq.Producer, "`loan(nbytes: int, defer: float | None = None, "),
        (shmq.Consumer, "`take(timeout: float | None = None) -> Message | None`"),
        (shmq.Consumer, "`take_many(n: int, timeout: float | None = None) -> Batch`"),
    ],
)
def test_what_is_c_says_its_types_in_the_docstring(owner: type, words: str) -> None:
    """A C function's signature has no annotations: Python cannot be told them."""
    assert words in (owner.__doc__ or "")
    method = getattr(owner, words[1:].partition("(")[0])
    named = [name for name in inspect.signature(method).parameters if name != "self"]
    shown = re.search(re.escape(words[1:].partition("(")[0]) + r"\(([^)]*)\)", owner.__doc__ or "")
    assert shown is not None
    assert re.findall(r"(\w+):", shown[1]) == named
