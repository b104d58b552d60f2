"""shmq/_native.pyi and the extension agree, and help() states the contract of what users call."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import shmq
from shmq import _native

STUB = Path(__file__).parents[2] / "shmq" / "_native.pyi"

# only in a killpoints build
OPTIONAL = {"killpoint"}

Node = ast.FunctionDef | ast.AsyncFunctionDef


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """The declarations of a module or class of the stub by name; the first of several overloads."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, Node | ast.ClassDef):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


MODULE = declared(ast.parse(STUB.read_text()).body)
CLASSES = {name: node for name, node in MODULE.items() if isinstance(node, ast.ClassDef)}
FUNCTIONS = [
    (owner, node)
    for owner, names in [("", MODULE), *((n, declared(c.body)) for n, c in CLASSES.items())]
    for node in names.values()
    if isinstance(node, Node) and not node.name.startswith("__")
]


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_the_module_has_what_the_stub_declares_and_no_more() -> None:
    stub, there = public(MODULE), public(dir(_native))
    assert there - stub == set(), "not declared in shmq/_native.pyi"
    assert stub - there - OPTIONAL == set(), "declared in shmq/_native.pyi, in no table of methods"
    assert _native.__version__
    assert ("killpoint" in there) == _native.KILLPOINTS


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_the_stub_declares_and_no_more(name: str) -> None:
    stub = declared(CLASSES[name].body)
    there = getattr(_native, name)
    assert isinstance(there, type)
    assert public(vars(there)) - public(stub) == set(), "not declared in shmq/_native.pyi"
    assert public(stub) - public(vars(there)) == set(), "declared, but in no table of methods"
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
    signature = inspect.signature(there)
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    given = [*arguments.defaults, *(value for value in arguments.kw_defaults if value)]
    defaults = [
        parameter.default
        for parameter in signature.parameters.values()
        if parameter.default is not parameter.empty
    ]
    assert list(signature.parameters) == [item.arg for item in named]
    assert defaults == [ast.literal_eval(value) for value in given]


# ---- docstrings ----


def described(node: Node | ast.ClassDef) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")


@pytest.mark.parametrize(
    ("owner", "node"), FUNCTIONS, ids=[f"{owner}.{node.name}" for owner, node in FUNCTIONS]
)
def test_help_shows_the_docstring_of_the_stub(owner: str, node: Node) -> None:
    there = getattr(getattr(_native, owner) if owner else _native, node.name, None)
    if there is not None:
        assert described(node), "no docstring"
        assert inspect.getdoc(there) == described(node)


@pytest.mark.parametrize("name", CLASSES)
def test_help_shows_the_class_docstring_of_the_stub(name: str) -> None:
    assert described(CLASSES[name]), "no docstring"
    assert inspect.getdoc(getattr(_native, name)) == described(CLASSES[name])


def met_by_users() -> list[tuple[str, Node]]:
    """(public class, stub) of the methods in C that dir() of the class shows."""
    found = []
    for name in shmq.__all__:
        item = getattr(shmq, name)
        for base in inspect.getmro(item) if inspect.isclass(item) else ():
            there = vars(base) if base.__module__ == "shmq._native" else {}
            found += [
                (name, node)
                for owner, node in FUNCTIONS
                if owner == base.__name__
                and node.name in set(dir(item)) & set(there)
                and not inspect.isdatadescriptor(there[node.name])
            ]
    return found


USED = met_by_users()


def test_users_meet_methods_in_c_through_these_classes() -> None:
    assert {name for name, _ in USED} == {
        "Batch",
        "Consumer",
        "Loan",
        "Message",
        "MultiConsumer",
        "Producer",
        "Results",
    }
    assert {n.name for name, n in USED if name == "Producer"} == {"close", "loan", "publish"}


@pytest.mark.parametrize(("name", "node"), USED, ids=[f"{n}.{f.name}" for n, f in USED])
def test_help_states_arguments_result_and_errors(name: str, node: Node) -> None:
    text = inspect.getdoc(getattr(getattr(shmq, name), node.name)) or ""
    assert len(re.findall(r"[.](?=\s|$)", text)) > 1, "one sentence"
    for argument in [*node.args.args[1:], *node.args.posonlyargs[1:], *node.args.kwonlyargs]:
        assert re.search(rf"\b{argument.arg}\b", text), argument.arg
    assert node.returns is not None
    assert ast.unparse(node.returns) == "None" or "Returns" in text
    raises = re.search(r"\braises?\b", text, re.IGNORECASE)
    copies = {("Batch", "bodies"), ("Batch", "blocks")}  # they have no errors
    assert raises or (name, node.name) in copies
