"""Which of the deaths only `tools/dev test --all` tries."""

from __future__ import annotations

from typing import Any

import pytest


def case(item: pytest.Item) -> tuple[Any, ...] | None:
    """The test and its parameters without `count`; None if it has no such parameter."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if "count" not in parameters:
        return None
    rest = (f"{name}={value}" for name, value in parameters.items() if name != "count")
    return (item.path, getattr(item, "originalname", item.name), *sorted(rest))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A point that a loop passes is tried at its first passing; the later ones, and publishes to
    one channel where those to three are tried, are `deep`."""
    seen = set()
    for item in items:
        this = case(item)
        if this is None:
            continue
        if this in seen or "channels=1" in this:
            item.add_marker(pytest.mark.deep)
        seen.add(this)
