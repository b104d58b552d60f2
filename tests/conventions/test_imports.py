"""The modules of the package import each other in no circle, neither at run time nor for typing,
and use no private name of another part."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conventions.test_layers import PACKAGE, modules, part_of


def module_name(path: Path) -> str:
    words = ["shmq", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(words).removesuffix(".__init__")


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, or that a type checker reads then."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _top_level(getattr(node, part, []))


def imported(path: Path, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, those under TYPE_CHECKING too."""
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in _top_level(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom):
            words = package.split(".")
            base = ".".join(words[: len(words) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module or ""]))
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found |= {whole} & known or {base} & known
    return found - {name}


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: set[frozenset[str]] = set()

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            at = stack.index(node)
            component = frozenset(stack[at:])
            del stack[at:]
            if len(component) > 1:
                found.add(component)

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def test_modules_import_each_other_in_no_circle() -> None:
    known = {module_name(path) for path in modules()}
    graph = {module_name(path): imported(path, known | {"shmq._native"}) for path in modules()}
    found = circles(graph | {"shmq._native": set()})
    assert not found, [sorted(circle) for circle in found]


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "d"}}
    assert circles(graph) == {frozenset("abc")}


#: Names with an underscore that are public: of named tuples, and the throw-away name.
PUBLIC = {"_", "_replace"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC


def defined(tree: ast.Module) -> set[str]:
    """Private names that a module defines: functions, classes, variables, attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names that a module takes from elsewhere: of another object, by an import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if is_private(alias.name) and alias.name != "_native":
                    yield node.lineno, alias.name


def test_private_names_stay_in_their_part() -> None:
    trees = {path: ast.parse(path.read_text()) for path in modules()}
    of_the_extension = defined(ast.parse((PACKAGE / "_native.pyi").read_text()))
    owners: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for name in defined(tree):
            owners.setdefault(name, set()).add(part_of(path))
    found = {
        f"{path.relative_to(PACKAGE)}: {name}": line
        for path, tree in trees.items()
        for line, name in used(tree)
        if name in owners and part_of(path) not in owners[name] and name not in of_the_extension
    }
    assert not found
