"""A loop that tries again because there is no room says so: nothing waits in silence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shmq import patience

TOP = Path(__file__).parents[2]

#: Functions that catch Full and neither raise, nor return to a caller that does, nor say it: why.
ELSEWHERE = {
    "shmq/pool/executor.py:_send": "the feeder, which it starts, says it",
    "shmq/pool/worker.py:_deliver": "`_press`, which it calls, says it",
    "shmq/pool/inbox.py:put": "the outcome goes to the memory of this process",
    "shmq/supervisor/topics.py": "it takes memory from other queues, and tries once more",
    "shmq/integrations/django/worker.py:_store": "it says so at once, by the worker's own log",
}


def handlers(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.ExceptHandler]]:
    """(the innermost function, the handler) of each `except` that names Full."""
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        caught = isinstance(node, ast.ExceptHandler) and node.type is not None
        if caught and re.search(r"\bFull\b", ast.unparse(node.type)):
            yield function, node
        yield from handlers(node, inside)


def test_who_catches_full_says_so_or_passes_it_on() -> None:
    found = set()
    for path in sorted(TOP.glob("shmq/**/*.py")):
        name = str(path.relative_to(TOP))
        for function, handler in handlers(ast.parse(path.read_text())):
            body = "\n".join(ast.unparse(line) for line in handler.body)
            ends = isinstance(handler.body[-1], ast.Raise | ast.Return)
            listed = {name, f"{name}:{function}"} & ELSEWHERE.keys()
            found |= listed
            assert ends or ".refused(" in body or listed, (
                f"{name}:{handler.lineno}: {function} catches Full and goes on: call "
                "patience.Patience.refused there, or say in ELSEWHERE who speaks for it"
            )
    assert found == ELSEWHERE.keys()


def test_the_extension_waits_as_long_before_it_says_so() -> None:
    [seconds] = re.findall(
        r"#define PATIENCE_NS \((\d+) \* SECOND_NS\)",
        (TOP / "native" / "binding" / "objects.h").read_text(),
    )
    assert float(seconds) == patience.AFTER
