"""Dictionaries that one loop of the supervisor changes while another walks them.

To walk a plain dictionary while another thread adds a key raises RuntimeError. A class of the
supervisor or of its storage that keeps one either makes it `Shared`, walks it under a lock, or is
named here with the reason why only one thread has it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from conventions.sources import ROOT

_ONE_LOOP = "only the loop that owns the object"
_START = "filled before the threads start; later only values are replaced"

#: module:attribute -> why its walks need nothing
ALLOWED = {
    "shmq/supervisor/historian.py:_places": _ONE_LOOP,
    "shmq/supervisor/loops.py:_bells": _START,
    "shmq/supervisor/loops.py:_loops": _START,
    "shmq/supervisor/loops.py:_threads": _START,
    "shmq/supervisor/overflow/files.py:_open": _ONE_LOOP,
    "shmq/supervisor/overflow/spiller.py:_watched": _ONE_LOOP,
    "shmq/supervisor/reaper.py:_watched": _ONE_LOOP,
    "shmq/supervisor/results.py:_stores": "under its lock",
    "shmq/supervisor/trouble.py:_met": "under its lock",
    "shmq/supervisor/topics.py:chunks": "of the loop that makes queues",
}
_WALKS = ("items", "keys", "values")


def plain(tree: ast.AST) -> set[str]:
    """The attributes that are declared as plain dictionaries."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
            kind = node.annotation.value
            is_plain = isinstance(kind, ast.Name) and kind.id == "dict"
            if is_plain and isinstance(node.target, ast.Attribute):
                found.add(node.target.attr)
    return found


def walked(tree: ast.AST) -> Iterator[str]:
    """The attributes whose items, keys or values are walked, or that are walked themselves."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _WALKS
            and isinstance(node.func.value, ast.Attribute)
        ):
            yield node.func.value.attr
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.iter, ast.Attribute):
            yield node.iter.attr


def found() -> set[str]:
    paths = [*(ROOT / "shmq/supervisor").rglob("*.py"), *(ROOT / "shmq/storage").rglob("*.py")]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    walks = {path: set(walked(tree)) for path, tree in trees.items()}
    everywhere = set().union(*walks.values())
    return {
        f"{path}:{name}"
        for path, tree in trees.items()
        for name in plain(tree)
        if name in (walks[path] if name.startswith("_") else everywhere)
    }


def test_dictionaries_that_are_walked_are_shared_or_of_one_thread() -> None:
    new = found() - ALLOWED.keys()
    assert not new, f"make it shmq.shared.Shared, or give the reason here: {sorted(new)}"


def test_no_dictionary_is_named_that_is_not_walked() -> None:
    assert not ALLOWED.keys() - found()


def test_walks_are_seen() -> None:
    code = (
        "class C:\n"
        "    def __init__(self):\n"
        "        self.a: dict[str, int] = {}\n"
        "        self.b: Shared[str, int] = Shared()\n"
        "    def f(self):\n"
        "        return [x for x in self.a], list(self.b.values()), self.c.items()\n"
    )
    tree = ast.parse(code)
    assert plain(tree) == {"a"}
    assert set(walked(tree)) == {"a", "b", "c"}
