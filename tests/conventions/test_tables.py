"""Each table of the shared memory: how a stranger on the network could fill it, and what shows that
others still get a place; or why no stranger reaches it."""

from __future__ import annotations

import ast
import re

import pytest
from support.processes import ROOT

#: Table -> the test that fills it as a stranger, or the reason why there is none.
TABLES = {
    "CLIENTS": "A client of the gateway has no entry: the gateway's processes have theirs.",
    "WAITERS": "A gateway process waits with its own threads, whose number is fixed.",
    "REQUESTS": "A gateway process asks from its own threads, whose number is fixed.",
    "TOPICS": "nsqd/gateway/test_shares.py::test_one_client_leaves_topics_to_others",
    "QUEUES": "unit/test_shares.py::test_channels_of_one_topic",
    "SESSIONS": "A consumer is a connection, and those have limits (test_seats.py).",
    "LEASES": "nsqd/gateway/test_lease_secrets.py::test_one_client_has_a_share_of_a_channel",
    "LEASE_HOLDERS": "nsqd/gateway/test_lease_secrets.py::test_places_are_given_back",
    "LEASE_PARTS": "They are parts of one lease.",
    "WRITERS": "nsqd/gateway/test_staged.py::test_a_limited_user_stops_nobody",
    "STORES": "No command of the gateway makes a results store.",
    "PINS": "Views are of processes that attach.",
    "HINTS": "They are bits of one waiter.",
}
HEADER = ROOT / "native" / "core" / "layout.h"


def test_every_table_has_a_row() -> None:
    found = re.findall(r"^#define SHMQ_([A-Z_]+S) [0-9]+\b", HEADER.read_text(), re.MULTILINE)
    tables = {name for name in found if name not in ("HEAP_WAYS", "LATENCY_BUCKETS")}
    tables -= {"PARTS_BUCKETS", "ID_UNIT_NS", "ID_NODE_BITS"}  # sizes, and no tables
    assert tables == TABLES.keys()


@pytest.mark.parametrize("where", [row for row in TABLES.values() if "::" in row])
def test_the_tests_are_there(where: str) -> None:
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
