"""The killpoints of the core, read from its sources, and which test dies at which.

A number says at which passing; a loop is cut at its first round and in the middle.
"""

from __future__ import annotations

import re

from support.processes import ROOT

Cases = list[tuple[str, int]]


def in_sources() -> set[str]:
    """Every SHMQ_KILLPOINT(name) of native/core."""
    found: set[str] = set()
    for file in sorted((ROOT / "native" / "core").rglob("*.[ch]")):
        found |= set(re.findall(r'^\s+SHMQ_KILLPOINT\("([^"]+)"\);', file.read_text(), re.M))
    return found


def cases(*names: str, counts: tuple[int, ...] = (1,)) -> Cases:
    """Each of the points at each of the passings."""
    return [(name, count) for name in names for count in counts]


#: Passed by a publisher: singles, batches of 4, large bodies, loans, deferred ones.
PUBLISHED: Cases = [
    *cases("publish.fields", "publish.prepared", "publish.flipped", counts=(1, 4)),
    *cases("publish.head", "publish.committed", "publish.ring", "publish.tail", counts=(1, 2)),
    *cases("loan.fields", "loan.state", "loan.committed"),
    *cases("arena.committed", "grow.pages", "grow.dirty", "grow.mask", "grow.slots", "grow.free"),
]

#: Passed by a consumer: take, finish, views, touch, requeue, close.
CLIENT: Cases = [
    *cases("take.fields", "take.state", "take.head", "take.heap", counts=(1, 4)),
    *cases("finish.state", "finish.heap", counts=(1, 3)),
    *cases("release.ring", "release.free", "pin.logged", "unpin.logged", "touch.deadline"),
    *cases("back.fields", "back.state", "back.ring", counts=(1, 2)),
    *cases("requeue.due", "requeue.state", "requeue.heap"),
    *cases("return.slot", counts=(1, 2)),
    *cases("defer.heap", "wait.announced", "waiter.announced"),
]

#: Passed by who repairs: how the first one died (holding P, P, D), where the second one does.
RECOVERED: list[tuple[str, str, int]] = [
    *(
        (first, point, count)
        for first in ("publish.prepared", "publish.flipped")
        for point, count in [
            *cases("recover.topic_dirty"),
            *cases("recover.topic_queue", "rebuild.sorted", "rebuild.clear", counts=(1, 3)),
            *cases("rebuild.begin", "rebuild.resolved", "rebuild.decided", "rebuild.arena"),
        ]
    ),
    *(
        ("take.state", point, 1)
        for point in (
            "recover.deliver_dirty",
            "rebuild.begin",
            "rebuild.decided",
            "rebuild.arena",
            "rebuild.sorted",
            "rebuild.clear",
        )
    ),
]

#: Passed by a lease holder: take, finish, return, close.
LEASED: Cases = [
    *cases("holder.filled", "lease.filled", "lease.taking", "lease.gathered", "lease.held"),
    *cases("lease.fields", "lease.state", "lease.head", counts=(1, 5)),
    *cases("lease.finishing", "lease.finished", "lease.returning", "lease.returned", counts=(1, 2)),
    *cases("lease.freed", "lease.fields_back", "lease.back", counts=(1, 2)),
    *cases("lease.orphaned"),
]
#: Passed by who publishes in epochs.
MARKED: Cases = [
    *cases("writer.being_made", "writer.filled"),
    *cases("writer.next", "writer.prepared", "writer.committed", counts=(1, 4)),
]

#: Each has a test of its own.
OTHERS = {
    "attach.filled",
    "attach.generation",
    "attach.live",
    "request.filled",
    "wake.post",
    "empty.dirty",
    "empty.slot",
    "empty.disk",
    "holder.left",  # by a gateway whose client has gone: test_killpoints.c
    "writer.gave_way",  # by a publisher of another topic: test_killpoints.c
    "writer.remembered",  # by who takes the entry of another writer: test_killpoints.c
    "writer.settled",  # by a repairer: test_killpoints.c
    "lease.run",
    "lease.run_read",  # of what is on disk: test_killpoints.c
    "trim.dirty",
    "trim.lowered",
    "fail.counted",
    "fail.back",
    "return.marked",
    "carry.fields",
    "carry.moving",
    "carry.committed",
    "carry.popped",
    "postpone.due",
    "recover.source_dirty",
    "recover.moved",
    "trim.punched",  # test_killpoints.c
    "store.freed",
    "store_arena.backed",
    "store_grow.backed",
    "store_grow.committed",
    "store_lock.dirty",
    "store_rebuild.begin",
    "store_rebuild.clear",
    "store_set.committed",
    "store_set.filled",
    "store_trim.dirty",
    "store_trim.lowered",
    "store_trim.punched",
    "store_wait.announced",  # test_killpoints.c
    # of limits, expiry and lanes: test_killpoints.c
    "cast.fields",
    "drop.head",
    "due.expires",
    "lanes.asleep",
    "lanes.bell",
    "cast.state",
    "configure.fields",
    "drop.free",
    "expire.head",
    "lanes.announced",
    "sweep.deferred",
    "sweep.ring",
    "sweep.slot",
    "wake.hint",
}

#: Passed by a supervisor that makes and deletes what clients ask for.
CREATED: Cases = [
    *cases("create_topic.filled", "take_over.named", "take_over.done"),
    *cases("queue.filled", "queue.ready", "enter_queue.filled", "enter_queue.live", counts=(1, 2)),
    *cases("remove_queue.deleting", "remove_queue.closed", counts=(1, 2)),
    *cases("remove_topic.generation"),
]
#: Passed by a supervisor that makes and deletes results stores.
STORED: Cases = cases(
    "store.filled", "store.ready", "enter_store.filled", "remove_store.generation"
)
STARTED: Cases = cases("directory.filled", "directory.ready")
EXPIRED: Cases = [
    *cases("expire.back", "expire.due", counts=(1, 5)),
    *cases("back.fields", "back.state", "back.ring"),
]
SPILLED: Cases = [
    *cases("stage.back", counts=(1, 20)),
    *cases("spill.fields", "spill.state", "spill.head", "spill.freed", counts=(1, 20)),
    *cases("spill.flag", "spill.positions", "spill.committed", counts=(1, 2)),
    *cases("release.free", "release.ring", counts=(3,)),
]
RESTORED: Cases = [
    *cases("restore.fields", "restore.state", "restore.back", counts=(1, 20)),
    *cases("restore.committed", "restore.head", counts=(1, 2)),
]
FLUSHED: Cases = [
    *cases("evict_read_ahead.state", counts=(1, 20)),
    *cases("evict_read_ahead.committed"),
    *cases("spill.fields", "spill.state", "spill.head", "spill.freed", counts=(1, 20)),
    *cases("spill.flag", "spill.positions", "spill.committed"),
]
#: A flush of what is in flight and in the requeue ring while something is on disk.
PREPENDED: Cases = [
    *cases("prepend.fields", "prepend.state", "prepend.freed", counts=(1, 20)),
    *cases("prepend.committed"),
]
#: Deferred messages to disk and back.
DEFERRED: Cases = [
    *cases("chunk.fields", "chunk.state", "chunk.freed", counts=(1, 20)),
    *cases("chunk.written", "chunk.committed", counts=(1, 3)),
    *cases("load.fields", "load.state", "load.deferred", counts=(1, 20)),
    *cases("load.committed", "load.head", counts=(1, 3)),
]
PUMPED: Cases = cases(
    "pump.fields",
    "pump.moving",
    "pump.committed",
    "pump.popped",
    "publish.prepared",
    "publish.flipped",
    counts=(1, 20),
)
REAPED: Cases = [*cases("reap.queue", "reap.entry"), *cases("return.slot", counts=(1, 10))]
#: How the supervisor before died, and where the one that adopts does.
ADOPTED: list[tuple[str, str]] = [
    *(
        ("spill.positions", point)
        for point in (
            "rebuild.begin",
            "rebuild.resolved",
            "rebuild.decided",
            "rebuild.arena",
            "rebuild.sorted",
            "rebuild.clear",
        )
    ),
    ("spill.state", "rebuild.resolved"),
    ("spill.committed", "rebuild.clear"),
    ("restore.state", "rebuild.begin"),
    ("restore.state", "rebuild.clear"),
    ("restore.committed", "rebuild.begin"),
    ("restore.committed", "rebuild.arena"),
    ("restore.back", "rebuild.sorted"),
]

COVERED = (
    OTHERS
    | {
        name
        for table in (
            PUBLISHED,
            CLIENT,
            LEASED,
            MARKED,
            CREATED,
            STORED,
            STARTED,
            EXPIRED,
            SPILLED,
            RESTORED,
            FLUSHED,
            PREPENDED,
            DEFERRED,
            PUMPED,
            REAPED,
        )
        for name, _ in table
    }
    | {point for _, point, _ in RECOVERED}
    | {point for _, point in ADOPTED}
)
