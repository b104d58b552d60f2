"""How long files and functions may be, and how often the formatter may be told to look away."""

from __future__ import annotations

import re

import pytest
from conventions.sources import files, functions, name_of

FILE_LINES = 700
FUNCTION_LINES = 80
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
    assert not {name: count for name, count in lines.items() if count > FILE_LINES}


def test_no_function_is_long() -> None:
    lines = {
        f"{name_of(path)}:{name}": count
        for path in files("python", "c")
        for name, count in functions(path)
    }
    assert not {name: count for name, count in lines.items() if count > FUNCTION_LINES}


def test_the_formatter_is_seldom_told_to_look_away() -> None:
    found = {name_of(path): len(SWITCH.findall(path.read_text())) for path in files("python", "c")}
    assert sum(found.values()) < MOST, {name: count for name, count in found.items() if count}


@pytest.mark.parametrize(("language", "least"), [("python", 200), ("c", 80), ("shell", 4)])
def test_files_are_found(language: str, least: int) -> None:
    assert len(list(files(language))) >= least


def test_functions_of_c_are_found() -> None:
    found = {name for path in files("c") for name, _ in functions(path)}
    assert found >= {"shmq_publish", "shmq_take", "record_read"}
