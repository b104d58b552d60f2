"""The programs that the documentation shows, as they would be pasted."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.processes import ROOT


@dataclass(frozen=True)
class Program:
    """A block of a document or docstring."""

    where: str
    """`README.md:26`, `shmq/broker.py:Broker`."""
    language: str
    """As its fence says (`python`, `sh`); of an indented block: `python` if it is Python, else
    `text`."""
    text: str

    @property
    def first(self) -> str:
        """Its first line that is no comment, by which tests know it."""
        lines = [line.strip() for line in self.text.splitlines()]
        return next(line for line in lines if line and not line.startswith("#"))


def in_markdown(path: Path) -> Iterator[Program]:
    """Its fenced blocks, and those that are indented by four spaces."""
    name = path.relative_to(ROOT).as_posix()
    lines, at = path.read_text().splitlines(), 0
    while at < len(lines):
        start, fence = at, re.match(r"(```+)\s*(\w*)", lines[at])
        if fence:
            at += 1
            while at < len(lines) and not lines[at].startswith(fence[1]):
                at += 1
            yield Program(f"{name}:{start + 1}", fence[2] or "text", _joined(lines[start + 1 : at]))
        elif lines[at].startswith("    ") and not (at and lines[at - 1].strip()):
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at].strip()):
                at += 1
            yield Program(f"{name}:{start + 1}", "text", _joined(lines[start:at]))
            continue
        at += 1


def in_docstrings(package: Path) -> Iterator[Program]:
    """Indented blocks of Python in the docstrings of a package's modules, classes and functions."""
    for path in sorted(package.rglob("*.py")):
        tree, name = ast.parse(path.read_text()), path.relative_to(ROOT).as_posix()
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                owner = "" if isinstance(node, ast.Module) else f":{node.name}"
                for block in _indented(ast.get_docstring(node) or ""):
                    if _is_python(block):
                        yield Program(f"{name}{owner}", "python", block)


def _indented(text: str) -> Iterator[str]:
    for block in re.findall(r"(?:\A|\n\n)((?:    .*(?:\n|\Z)|\n(?=    ))+)", text):
        yield _joined(block.splitlines())


def _joined(lines: list[str]) -> str:
    return textwrap.dedent("\n".join(lines)).strip("\n") + "\n"


def _is_python(text: str) -> bool:
    """Whether it is a program: Python that is more than a name or a comparison of words."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call | ast.Import) for node in ast.walk(tree))
