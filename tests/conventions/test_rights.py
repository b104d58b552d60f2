"""Every command of TCP and every route of HTTP says which right it needs."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmq.gateway.acts import COMMANDS, ROUTES, Need, Scope, need_of
from shmq.gateway.delivery import DELIVERY_COMMANDS
from shmq.gateway.lease_requests import COMMANDS as LEASE_COMMANDS
from shmq.gateway.publish import PUBLISH_COMMANDS
from shmq.users import ACTS

TOP = Path(__file__).parents[2]
SESSION = (TOP / "shmq" / "gateway" / "session.py").read_text()


def test_every_command_has_a_row() -> None:
    named = {word.encode() for word in re.findall(r'name [!=]= b"([A-Z]+)"', SESSION)}
    known = {*DELIVERY_COMMANDS, *PUBLISH_COMMANDS, *LEASE_COMMANDS, *named}
    assert {b"IDENTIFY", b"AUTH", b"NOP"} <= named
    assert set(COMMANDS) == known, "give each command its row in shmq/gateway/acts.py"


@pytest.fixture
def routes() -> Any:
    """The routes of the gateway: (method, path)."""
    from shmq.gateway import http
    from shmq.options import Options

    context: Any = SimpleNamespace(options=Options(), argv=[])
    made = http.Http(context, SimpleNamespace(accepted=()))  # type: ignore[arg-type]
    found = {(method, path) for path, methods in made._routes.items() for method in methods}
    for path in ("/config/x", "/page", "/page/", "/page/ticks"):
        found |= {(method, path) for method in made._methods(path) or ()}
    return found


def test_every_route_has_a_row(routes: set[tuple[str, str]]) -> None:
    assert len(routes) > 20
    without = {route for route in routes if need_of(*route) is None}
    assert not without, f"{without}: give each its row in shmq/gateway/acts.py"


def test_every_row_has_a_route(routes: set[tuple[str, str]]) -> None:
    for path, methods in ROUTES.items():
        begin = path.removesuffix("*")
        for method in methods:
            assert any(
                method == had and (name.startswith(begin) if path.endswith("*") else name == path)
                for had, name in routes
            ), (method, path)


def test_what_is_in_no_table_needs_a_right_that_nobody_has() -> None:
    assert need_of("GET", "/new") is None
    assert need_of("DELETE", "/stats") is None


@pytest.mark.parametrize(
    "need", [*COMMANDS.values(), *(need for row in ROUTES.values() for need in row.values())]
)
def test_rows_name_acts_that_there_are(need: Need) -> None:
    assert {*need.acts, *need.of_topic} <= set(ACTS)
    assert bool(need.acts) == (need.scope not in (Scope.NOTHING, Scope.ITSELF))
    if need.acts:
        assert not need.held(lambda act, topic, channel: False, "t", "c")
