"""Text reaches a terminal, a log or a file of a process's output through the few functions that let
printable text alone pass."""

from __future__ import annotations

import ast
import functools
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import EVIL, evil_in
from support.processes import ROOT

from shmq.printing import printable, printable_lines, said

PACKAGE = ROOT / "shmq"

#: The name of what prints -> the files that may use it, with the reason.
PRINTERS: dict[str, dict[str, str]] = {
    "print": {
        "diagnostics/bench.py": "JSON, into a pipe of the same program",
        "integrations/django/management/commands/shmq_worker.py": "a fixed sentence",
    },
    "click.echo": {"cli/output.py": "cleans what it is given"},
    "click.secho": {},
    "click.style": {"cli/output.py": "cleans what it is given"},
    "click.echo_via_pager": {},
    "sys.stderr.write": {
        "printing.py": "tracebacks, cleaned",
        "integrations/django/crew.py": "a traceback, cleaned",
    },
    "sys.stdout.write": {
        "cli/stat_screen.py": "lines of `styled`, and its own places on the screen",
        "page/arrow_reader.py": "JSON, into a pipe of the same program",
    },
    "sys.stdout.buffer.write": {"cli/results.py": "a value, byte for byte, into a pipe or a file"},
    "traceback.print_exc": {},
    "traceback.print_exception": {},
    "logging.Formatter": {"printing.py": "the base of the formatter that cleans"},
    "logging.basicConfig": {
        "logs.py": "with a handler whose formatter cleans",
        "cli/page.py": "with a handler whose formatter cleans",
    },
    "logging.StreamHandler": {
        "logs.py": "with a formatter that cleans",
        "cli/page.py": "with a formatter that cleans",
        "integrations/django/management/commands/shmq_worker.py": "with a formatter that cleans",
    },
}

#: The files that print lines with colors; all other text in them is `printable` before.
STYLED = {"cli/output.py", "cli/doctor.py", "cli/inspect.py", "cli/stat_screen.py"}


@functools.cache
def used(path: Path) -> list[tuple[str, int]]:
    """All names that a file calls, as they are written, with the line."""
    return [
        (ast.unparse(node.func), node.lineno)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def places() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path


@pytest.mark.parametrize("name", PRINTERS)
def test_text_is_printed_where_it_is_cleaned(name: str) -> None:
    found = {
        f"{place}:{line}"
        for place, path in places()
        for called, line in used(path)
        if called == name and place not in PRINTERS[name]
    }
    assert not found, f"{found}: use say() of shmq/cli/output.py, or shmq/printing.py"


def test_lines_with_colors_are_printed_by_few() -> None:
    found = {
        place
        for place, path in places()
        for called, _ in used(path)
        if called in ("say_styled", "styled")
    }
    assert found <= STYLED, (
        f"{found - STYLED}: print with say(), or clean each part and say so here"
    )


def test_no_character_but_printable_ones_pass() -> None:
    """Each of Unicode's, the lone surrogates among them."""
    for code in range(sys.maxunicode + 1):
        char = chr(code)
        for shown in (printable(char), printable_lines(char)):
            assert shown.isprintable() or (char in "\n\t" and shown == char)
        if char.isprintable():
            assert printable(char) == char
        elif unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            assert printable(char) != char


@given(st.binary(max_size=200), st.integers(10, 100))
def test_bytes_become_printable_text_of_a_bounded_length(data: bytes, most: int) -> None:
    text = said(data * 10, most)
    assert text.isprintable()
    assert len(text) <= 12 * most + 60


def test_the_evil_text_has_all_that_harms() -> None:
    assert len(evil_in(EVIL)) > 10
    assert not evil_in(printable(EVIL))
