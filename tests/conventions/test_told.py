"""A text of an exception that a client reads goes through `shmq/door/telling.py`, which leaves out
what belongs to the host. Where the gateway or the page makes a text of an exception in another way,
it is named here, with the reason why no client reads it or why nothing of the host is in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from conventions.sources import ROOT

_LOG = "for the log"
_CODEC = "of a codec, about the client's own bytes"

#: module:function -> why it may make a text of an exception.
ALLOWED = {
    "shmq/door/shortage.py:shortage": "to find the system's words in it",
    "shmq/gateway/pools.py:Pool._start": "to find the system's words in it",
    "shmq/door/telling.py:told": "it is the function",
    "shmq/door/wishes.py:parsed": "of the JSON decoder, about the client's own bytes",
    "shmq/gateway/codecs.py:Deflate.pull": _CODEC,
    "shmq/gateway/codecs.py:Snappy.pull": _CODEC,
    "shmq/gateway/http.py:Http._answer": _LOG,
    "shmq/gateway/http.py:_word_of": "to find a word in it",
    "shmq/gateway/listeners.py:_open": "for who starts the gateway",
    "shmq/gateway/lookupd.py:Peer._command": _LOG,
    "shmq/gateway/staged.py:_files": "the name of an attempt",
    "shmq/gateway/tcp.py:Connection._shake_hands": "of OpenSSL, about the client's own handshake",
    "shmq/page/actions.py:act": "raised again, for `Page.answer`",
    "shmq/page/snapshot.py:Snapshots._facts": "`without_host` is called with it",
}


def texts(node: ast.AST, names: frozenset[str], where: str) -> Iterator[str]:
    """The functions in which `str(NAME)` or an f-string has a caught exception."""
    for child in ast.iter_child_nodes(node):
        inside, known = where, names
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{where}.{child.name}" if where else child.name
            arguments = getattr(child, "args", None)
            for each in getattr(arguments, "args", []):
                kind = ast.unparse(each.annotation) if each.annotation else ""
                if kind.endswith(("Error", "Exception")):
                    known |= {each.arg}
        if isinstance(child, ast.ExceptHandler) and child.name:
            known |= {child.name}
        if isinstance(child, ast.FormattedValue) and _is_one(child.value, known):
            yield inside
        is_text = isinstance(child, ast.Call) and getattr(child.func, "id", "") in ("str", "repr")
        if is_text and child.args and _is_one(child.args[0], known):
            yield inside
        yield from texts(child, known, inside)


def _is_one(node: ast.AST, names: frozenset[str]) -> bool:
    if isinstance(node, ast.Attribute) and node.attr in ("strerror", "filename", "args"):
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def found() -> set[str]:
    return {
        f"{path.relative_to(ROOT)}:{place}"
        for part in ("gateway", "door", "page")
        for path in sorted((ROOT / "shmq" / part).glob("*.py"))
        for place in texts(ast.parse(path.read_text()), frozenset(), "")
    }


def test_clients_read_no_exception_as_it_is() -> None:
    assert found() == set(ALLOWED)


def test_the_check_finds_a_text() -> None:
    source = "def f():\n try: g()\n except OSError as exc:\n  return {'error': f'no: {exc}'}"
    assert list(texts(ast.parse(source), frozenset(), "")) == ["f"]
    source = "def f(error: ShmqError):\n return str(error)"
    assert list(texts(ast.parse(source), frozenset(), "")) == ["f"]
