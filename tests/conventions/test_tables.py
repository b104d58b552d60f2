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
    "QUEUES": "nsqd/gateway/test_shares.py::test_one_client_leaves_channels_to_others",
    "SESSIONS": "A consumer is a connection, and those have limits (test_seats.py).",
    "LEASES": "nsqd/gateway/test_lease_secrets.py::test_one_client_has_a_share_of_a_channel",
    "LEASE_HOLDERS": "nsqd/gateway/test_lease_secrets.py::test_places_are_given_back",
    "LEASE_PARTS": "They are parts of one lease.",
    "WRITERS": "nsqd/gateway/test_staged.py::test_a_limited_user_stops_nobody",
    "STORES": "No command of the gateway makes a results store.",
    "PINS": "Views are of processes that attach.",
    "HINTS": "They are bits of one waiter.",
}
HEADER = ROOT / "native" / "core" / "memory" / "layout.h"


#: Sizes of arrays that are no tables: nobody takes a place in them.
NO_TABLES = {
    "ARENA_FL": "Lists of free blocks by their size.",
    "ARENA_SL": "The same.",
    "BASE": "Bytes of a name.",
    "DATA_PATH": "Bytes of a path.",
    "LATENCY_BUCKETS": "Counts of a histogram.",
    "NAME": "Bytes of a name.",
    "PARTS_BUCKETS": "Counts of a histogram.",
    "STORE_STRIPES": "Bells, which keys share by their hashes.",
}
#: Sizes that are written as those of tables are, and are units.
UNITS = {"HEAP_WAYS", "ID_NODE_BITS", "ID_UNIT_NS"}


def test_every_table_has_a_row() -> None:
    """Tables are named in the plural, or are arrays of the layout."""
    text = "".join(path.read_text() for path in HEADER.parent.glob("layout*.h"))
    plural = re.findall(r"^#define SHMQ_([A-Z_]+S) [0-9]+", text, re.MULTILINE)
    arrays = re.findall(r"\[SHMQ_([A-Z_]+)\b[^]]*\]", text)
    assert len(set(arrays)) > 8
    assert {*plural, *arrays} - UNITS == TABLES.keys() | NO_TABLES.keys()


@pytest.mark.parametrize("where", [row for row in TABLES.values() if "::" in row])
def test_the_tests_are_there(where: str) -> None:
    path, _, name = where.partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
