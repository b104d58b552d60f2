"""Write docstrings.h: the docstrings and text signatures of the C code, taken from the stub.

DOC_<function>, DOC_<Class> and DOC_<Class>_<method> are string literals, so shmq/_native.pyi is the
only place that states a contract.

    python docstrings.py ../../shmq/_native.pyi docstrings.h
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def signature(function: ast.FunctionDef, name: str, *, bound: str | None) -> str:
    """The signature without types; `bound` stands for self, None leaves self out."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for rest in (arguments.vararg, arguments.kwarg):
        if rest is not None:
            rest.annotation = None
    words = ast.unparse(arguments).split(", ")
    if words[0] == "self":
        words[:1] = [bound] if bound else []
    return f"{name}({', '.join(words)})\n--\n\n"


def documented(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, str]]:
    """(name after DOC_, text) of the functions and classes; the first of several overloads."""
    seen = set()
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name in seen:
            continue
        seen.add(node.name)
        text = inspect.cleandoc(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            start = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            start = [n for n in start if n.name == "__init__"]
            yield node.name, "".join(signature(n, node.name, bound=None) for n in start) + text
            yield from documented(node.body, f"{node.name}_")
        elif any(ast.unparse(mark) == "property" for mark in node.decorator_list):
            yield owner + node.name, text
        elif text:
            yield owner + node.name, signature(node, node.name, bound="$self") + text


def literal(text: str) -> str:
    """A C string literal, a line for each line of the text."""
    return " \\\n    ".join(json.dumps(line) for line in text.splitlines(keepends=True)) or '""'


def main() -> None:
    stub, header = map(Path, sys.argv[1:])
    lines = [f"/* Made by {Path(__file__).name} from {stub.name}. */"]
    lines += [
        f"#define DOC_{n} \\\n    {literal(t)}"
        for n, t in documented(ast.parse(stub.read_text()).body)
    ]
    header.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
