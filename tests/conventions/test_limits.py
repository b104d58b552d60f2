"""How long files, functions and calls may be, and how seldom the formatter is told to look away."""

from __future__ import annotations

import re

import pytest
from conventions.sources import files, functions, name_of, public_functions

FILE_LINES = 700
FUNCTION_LINES = 80
ARGUMENTS = 7
#: Switches of the formatters, of which there may be fewer than MOST in all: for real tables only.
SWITCH = re.compile(r"(?:#|/[*/]) *(?:fmt: (?:skip|off)|clang-format off)")
MOST = 30


def test_no_file_is_long() -> None:
    """A stub is left out: a module has one, however much it declares."""
    lines = {
        name_of(path): path.read_text().count("\n")
        for path in files("python", "c", "shell")
        if path.suffix != ".pyi"
    }
    long = {name: count for name, count in lines.items() if count > FILE_LINES}
    assert not long, f"{FILE_LINES} lines at most; give a part a file of its own: {long}"


def test_no_function_is_long() -> None:
    lines = {
        f"{name_of(path)}:{name}": count
        for path in files("python", "c")
        for name, count in functions(path)
    }
    long = {name: count for name, count in lines.items() if count > FUNCTION_LINES}
    assert not long, f"{FUNCTION_LINES} lines at most; make a part a function: {long}"


def test_no_public_function_of_c_takes_many_arguments() -> None:
    """Those that belong together are a structure, which a caller fills by name."""
    counts = {name: len(arguments) for name, arguments in public_functions().items()}
    assert counts["shmq_publish"] == 6
    many = {name: count for name, count in counts.items() if count > ARGUMENTS}
    assert not many, f"{ARGUMENTS} parameters at most; make some a structure: {many}"


def test_the_formatter_is_seldom_told_to_look_away() -> None:
    found = {name_of(path): len(SWITCH.findall(path.read_text())) for path in files("python", "c")}
    assert sum(found.values()) < MOST, {name: count for name, count in found.items() if count}


@pytest.mark.parametrize(("language", "least"), [("python", 200), ("c", 80), ("shell", 4)])
def test_files_are_found(language: str, least: int) -> None:
    assert len(list(files(language))) >= least


def test_functions_of_c_are_found() -> None:
    found = {name for path in files("c") for name, _ in functions(path)}
    assert found >= {"shmq_publish", "shmq_take", "record_read"}
