"""SECURITY.md claims nothing without a link to the test that shows it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "SECURITY.md"
#: The last cell of a row: links to tests, and commands of tools/dev that run many.
SHOWN = re.compile(r"\[([a-z0-9_./]+)\]\((tests/[a-z0-9_/]+\.py)\)|`tools/dev ([a-z-]+)`")


def rows() -> list[str]:
    """The rows of the table of defences."""
    text = PAGE.read_text()
    table = text[text.index("\n## Defences") : text.index("\n## Not defended")]
    return [line for line in table.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split("|")[2].strip()[:40])
def test_a_claim_is_a_link_to_tests_that_exist(row: str) -> None:
    shown = row.rstrip(" |").rpartition("|")[2]
    assert SHOWN.search(shown), f"this row names no test: {row}"
    assert not SHOWN.sub("", shown).strip(" ,"), f"this is no link to a test: {shown}"
    for name, path, command in SHOWN.findall(shown):
        if command:
            assert f"\n## {command} " in (ROOT / "tools" / "dev").read_text()
            continue
        tree = ast.parse((ROOT / path).read_text())
        assert path.endswith(name)
        assert any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test_")
            for node in ast.walk(tree)
        ), f"{path} has no test"


def test_the_table_has_its_rows() -> None:
    assert len(rows()) > 30
