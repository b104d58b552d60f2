"""The source files of the repository and what is in them: functions, comments, docstrings."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from support.processes import ROOT

FOLDERS = ("shmq", "pyspark_shmq", "native", "tests", "tools", "docs", "systemd", ".ci")
#: Lines of a C function: from the line of its name to the brace in the first column.
C_FUNCTION = re.compile(
    r"^(?P<head>[A-Za-z_][^;{}#/]*?\b(?P<name>\w+)\([^;{}]*\))\s*\n\{.*?^\}", re.M | re.S
)
#: A declaration of a function in the public headers.
C_DECLARATION = re.compile(r"^(?:\w+ )+\**(?P<name>shmq_\w+)\((?P<arguments>[^;{}]*)\);", re.M)
C_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|/\*(?P<block>.*?)\*/|//(?P<line>[^\n]*)', re.S)


def _language(path: Path) -> str | None:
    by_suffix = {
        ".py": "python",
        ".pyi": "python",
        ".c": "c",
        ".h": "c",
        ".cc": "c",
        ".sh": "shell",
    }
    if path.suffix in by_suffix:
        return by_suffix[path.suffix]
    if not path.suffix and path.stat().st_size < 1 << 20:
        with path.open("rb") as file:
            head = file.readline(100)
        return "shell" if head.startswith(b"#!") and b"sh" in head else None
    return None


def files(*languages: str) -> Iterator[Path]:
    """All source files in these languages (`python`, `c`, `shell`)."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if {"__pycache__", "corpus"} & set(path.parts) or not path.is_file():
                continue
            if _language(path) in languages:
                yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, with the number of its lines."""
    text = path.read_text()
    if _language(path) == "python":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, (node.end_lineno or 0) - node.lineno + 1
    else:
        for found in C_FUNCTION.finditer(text):
            yield found["name"], found[0].count("\n") + 1


def public_functions() -> dict[str, list[str]]:
    """Each function of `native/include`, with its arguments."""
    headers = (ROOT / "native" / "include").glob("*.h")
    text = C_COMMENT.sub("", "\n".join(path.read_text() for path in headers))
    return {found["name"]: found["arguments"].split(",") for found in C_DECLARATION.finditer(text)}


def _python_prose(text: str) -> Iterator[tuple[int, str]]:
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if not block:
                first = token.start[0]
            elif token.start[0] != first + len(block):
                yield first, "\n".join(block)
                block, first = [], token.start[0]
            block.append(token.string.lstrip("#:").strip())
    if block:
        yield first, "\n".join(block)
    for node in ast.walk(ast.parse(text)):
        # the docstring of a module, a class, a function or a field
        if isinstance(node, ast.Expr) and isinstance(value := node.value, ast.Constant):
            yield node.lineno, inspect.cleandoc(str(value.value))


def _c_prose(text: str) -> Iterator[tuple[int, str]]:
    for found in C_COMMENT.finditer(text):
        words = found["block"] or found["line"]
        if words:
            yield text.count("\n", 0, found.start()) + 1, re.sub(r"\n[ \t]*\*", "\n", words)


def _shell_prose(text: str) -> Iterator[tuple[int, str]]:
    for found in re.finditer(r"(?:^[ \t]*#[^\n]*\n)+", text, re.M):
        yield text.count("\n", 0, found.start()) + 1, re.sub(r"(?m)^[ \t]*#+", "", found[0])


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, each with the number of its first line."""
    reader = {"python": _python_prose, "c": _c_prose, "shell": _shell_prose}[_language(path) or ""]
    return reader(path.read_text())
