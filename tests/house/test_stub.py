"""shmq/_native.pyi and the extension say the same."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from shmq import _native

STUB = Path(__file__).parents[2] / "shmq" / "_native.pyi"

# only in a killpoints build
OPTIONAL = {"killpoint"}

Node = ast.FunctionDef | ast.AsyncFunctionDef


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class of the stub declares, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, Node | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


MODULE = declared(ast.parse(STUB.read_text()).body)
CLASSES = {name: node for name, node in MODULE.items() if isinstance(node, ast.ClassDef)}
FUNCTIONS = [
    (owner, node)
    for owner, body in [("", list(MODULE.values())), *((n, c.body) for n, c in CLASSES.items())]
    for node in body
    if isinstance(node, Node) and not node.name.startswith("__")
]


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_module_has_what_the_stub_declares_and_no_more() -> None:
    stub, there = public(MODULE), public(dir(_native))
    assert there - stub == set(), "not in _native.pyi"
    assert stub - there - OPTIONAL == set(), "only in _native.pyi"
    assert _native.__version__
    assert ("killpoint" in there) == _native.KILLPOINTS


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_the_stub_declares_and_no_more(name: str) -> None:
    stub = declared(CLASSES[name].body)
    there = getattr(_native, name)
    assert isinstance(there, type)
    assert public(vars(there)) == public(stub)
    for special in set(stub) - public(stub) - {"__slots__"}:
        assert getattr(there, special, None) is not getattr(object, special, None), special


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_the_bases_of_the_stub(name: str) -> None:
    bases = [ast.unparse(base).rpartition(".")[2] for base in CLASSES[name].bases]
    there = [base.__name__ for base in getattr(_native, name).__bases__]
    assert there == (bases or ["object"])


@pytest.mark.parametrize("name", CLASSES)
def test_final_classes_cannot_be_subclassed(name: str) -> None:
    final = any(ast.unparse(mark) == "final" for mark in CLASSES[name].decorator_list)
    if final:
        with pytest.raises(TypeError):
            type("Sub", (getattr(_native, name),), {})
    else:
        type("Sub", (getattr(_native, name),), {})


@pytest.mark.parametrize(
    ("owner", "node"), FUNCTIONS, ids=[f"{owner}.{node.name}" for owner, node in FUNCTIONS]
)
def test_parameters_are_those_of_the_stub(owner: str, node: Node) -> None:
    there = getattr(getattr(_native, owner) if owner else _native, node.name, None)
    if there is None:
        assert node.name in OPTIONAL
        return
    if any(ast.unparse(mark) == "property" for mark in node.decorator_list):
        assert inspect.isdatadescriptor(there)
        return
    assert there.__doc__, "no docstring"
    try:
        signature = inspect.signature(there)
    except ValueError:
        pytest.fail(f"no text signature: {there.__doc__!r}")
    arguments = node.args
    names = [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    shown = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    if len(shown) < len(signature.parameters):  # **limits: the keywords are the core's to name
        names = names[: len(shown)]
    assert shown == names
