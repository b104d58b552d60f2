"""The fuzzers of access rules, on a few inputs: they know all commands and paths, and still run.

`tools/dev fuzz access requests` gives them more, and atheris to choose them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from fuzz import rules

from shmq.gateway.acts import COMMANDS, ROUTES, Scope, need_of


@pytest.fixture(scope="module", autouse=True)
def statistics(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those of a broker that has all the names."""
    rules.prepare(str(tmp_path_factory.mktemp("fuzz")), f"fuzz-rules-{os.getpid()}")


@pytest.mark.parametrize("target", [rules.session, rules.requests])
def test_random_rules_allow_what_a_second_reading_of_them_allows(
    target: Callable[[bytes], None],
) -> None:
    chosen = random.Random(27)
    for _ in range(40):
        target(chosen.randbytes(chosen.randrange(30, 300)))


def test_they_know_every_command_with_names() -> None:
    asked = {name.decode() for name, need in COMMANDS.items() if need.scope is Scope.NAMES}
    assert asked <= set(rules.NEEDS)


def test_they_know_every_kind_of_path() -> None:
    """Each row of the table, or another one that needs just the same."""
    known = {
        need
        for path in rules.HTTP_NEEDS
        for method in ("GET", "POST", "PUT")
        if (need := need_of(method, path)) is not None
    }
    free = (Scope.NOTHING, Scope.ITSELF)
    needed = {need for row in ROUTES.values() for need in row.values() if need.scope not in free}
    assert needed <= known, needed - known
