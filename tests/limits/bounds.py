"""The bounds of the headers: those that a user can meet, and the others with the reason.

`defined` reads the headers, so that a new bound without a row or a reason fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from support.processes import ROOT

HEADERS = (
    "core/memory/layout.h",
    "core/memory/layout_store.h",
    "include/shmq.h",
    "include/shmq_lease.h",
    "include/shmq_store.h",
    "include/shmq_supervisor.h",
    "include/shmq_wire.h",
)
_DEFINE = re.compile(
    r"^#define SHMQ_(\w+)[ \t]+(\(?(?:UINT64_C|INT64_C|UINT32_C)?\(?[0-9][^\n]*|UINT\d+_MAX)",
    re.MULTILINE,
)

#: Nobody can exceed them: bound -> why.
INNER = {
    "MAGIC": "a mark",
    "LAYOUT_VERSION": "a number of the layout",
    "NONE": "a mark",
    "SLOT_REASON_SHIFT": "a place of bits",
    "SLOT_SEALED": "a bit",
    "DUE_CONVICTED": "a mark",
    "FLAG_EPHEMERAL": "a bit",
    "FLAG_DEAD": "a bit",
    "LATENCY_BUCKETS": "what is longer counts in the last bucket",
    "LATENCY_FIRST": "the first bucket",
    "LATENCY_WINDOW_NS": "a period",
    "PARTS_BUCKETS": "what is longer counts in the last bucket",
    "PARTS_FIRST": "the first bucket",
    "ARENA_UNIT": "sizes are rounded up to it",
    "ARENA_HEAD": "bytes beside each body",
    "ARENA_FL": "lists of free blocks, enough for ARENA_MAX",
    "ARENA_SL": "lists of free blocks, enough for ARENA_MAX",
    "HEAP_WAYS": "the form of a heap",
    "SLOTS_FIRST": "more are committed when they are needed",
    "STORE_FIRST": "more are committed when they are needed",
    "ARENA_FIRST": "more are committed when they are needed",
    "SESSIONS_FIRST": "more are committed when they are needed",
    "ORDER_FIRST": "2^48 messages",
    "NO_POSITION": "a mark",
    "POS_SHIFT": "a place of bits; max_bytes_per_file is below it",
    "CHUNK_SHIFT": "a place of bits; a chunk has 4096 messages at most",
    "EPOCH_NS": "a time",
    "ID_UNIT_NS": "a unit",
    "STORE_STRIPES": "any number of keys share them",
    "HINTS": "any number of queues share them",
    "BASE": "a topic and a channel of the longest names fit",
    "SEAL_KEY": "the size of a key that the broker makes",
    "AS_DIRECTORY": "a mark",
    "ENVELOPE": "the size of a head on disk",
    "RECORD_HEAD": "the size of a head on disk",
    "RECORD_MORE": "bytes that a record may be longer than a message",
    "STRIPES": "any number of keys share them",
    "SWEPT": "entries that one call looks at; it is called again for more",
    "WIRE_FIN": "the size of a command",
    "WIRE_FRAME": "the size of a head",
    "WIRE_ID": "the size of an id",
}
#: Options and numbers have them as their bounds: bound -> what the other tables call it.
AS_NUMBERS = {
    "SLOTS_MAX": "mem_queue_size",
    "ARENA_MAX": "arena_size",
    "TRANSIT": "mem_queue_size",
    "ID_NODE_BITS": "node_id",
    "STORE_KEYS_MAX": "Broker.results.max_keys",
    "LEASE_PARTS": "LeaseHolder.lease.parts",
    "WEIGHT_MOST": "Broker.consumer.weights",
    "LARGE": "Consumer.take_many.n",
}
#: A row would take too long here: bound -> the test that fills it.
ELSEWHERE = {"QUEUES": "scale/test_channels.py"}


def defined() -> Iterator[str]:
    for name in HEADERS:
        for found in _DEFINE.finditer((ROOT / "native" / name).read_text()):
            yield found[1]
