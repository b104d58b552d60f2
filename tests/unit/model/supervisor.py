"""The supervisor of test_model: time passes, messages go to disk and come back."""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import (
    rule,
)
from support.queue_model import Queue
from support.queue_parts import (
    AT_ONCE,
    Msg,
    Record,
    block,
)
from unit.model.base import (
    FILE_BYTES,
    NEVER,
    PICK,
    Base,
    choose,
    dead_topic,
    read_records,
    when,
)

from shmq import Full, layout
from shmq.layout import State


class Supervisor(Base):
    """Rules of the supervisor."""

    # ---- the supervisor's work ----

    @rule(which=PICK, late=st.integers(0, 12), due=st.integers(0, 6), limit=st.integers(0, 12))
    @when(lambda self: any(q.in_flight or q.deferred for q in self.topic.queues))
    def time_passes(self, which: int, late: int, due: int, limit: int) -> None:
        """Until the late-th deadline and the due-th due time."""
        queue = choose([q for q in self.topic.queues if q.in_flight or q.deferred], which)
        deadlines = sorted(msg.deadline for msg in queue.in_flight.values())
        dues = sorted(msg.due for msg in queue.deferred.values())
        now = min(deadlines[late - 1 : late] or [0], default=0)
        realtime = min(dues[due - 1 : due] or [0], default=0)
        if now == NEVER:
            now -= 1
        expired = [value for value in deadlines if value <= now][:limit]
        result = self.world.supervisor.expire(queue.index, limit, now, realtime)
        view = self.view(queue)
        ids = view.slots["id"][view.requeue].tolist()[len(queue.back) :]
        states = layout.state(view.slots["word"])
        flying = set(view.slots["id"][states == int(State.IN_FLIGHT)].tolist())
        messages = [msg for id_, msg in queue.in_flight.items() if id_ not in flying]
        assert sorted(msg.deadline for msg in messages) == expired
        places = {id_: place for place, id_ in enumerate(ids)}
        for msg in sorted(messages, key=lambda msg: places.get(msg.id, -1)):
            queue.timed_out(msg, self.due_of)
        came = self.fall_due(queue, realtime, limit - len(expired), places)
        assert result == (len(expired), came)

    def fall_due(self, queue: Queue, realtime: int, limit: int, places: dict[int, int]) -> int:
        """Those that are due come back; a convicted one stays on top, and holds up the others."""
        count = 0
        while count < limit and queue.deferred:
            first = min(msg.due for msg in queue.deferred.values())
            if first > realtime:
                break
            equal = [msg for msg in queue.deferred.values() if msg.due == first]
            top = min(equal, key=lambda msg: places.get(msg.id, NEVER))
            convicted = [msg for msg in equal if msg.reason]
            if convicted:
                assert len(equal) == 1 or first == AT_ONCE
                convicted[0].due = AT_ONCE
                break
            queue.came_due(top)
            count += 1
        return count

    @rule(which=PICK, n=st.integers(1, 40))
    @when(lambda self: self.topic.channels)
    def dead_letters_are_moved(self, which: int, n: int) -> None:
        queue = choose(self.topic.channels, which)
        now = time.time_ns()
        due = [msg for msg in queue.deferred.values() if msg.reason and msg.due <= now]
        first = min((msg.due for msg in queue.deferred.values()), default=NEVER)
        to = self.world.create_topic(dead_topic(queue.channel))
        try:
            moved = self.world.supervisor.dead_move(queue.index, queue.serial, *to, n)
        except Full:
            moved = 0
        messages = [
            msg for msg in queue.deferred.values() if msg.reason and self.is_moved(queue, msg)
        ]
        assert len(messages) == moved
        at_once = [msg for msg in due if msg.due == AT_ONCE]
        if moved < min(n, len(at_once)) and first == AT_ONCE:
            left = [msg for msg in at_once if msg not in messages]
            assert any(self.grave_lacks(queue, msg) for msg in left)
        self.bury(queue, messages)

    @rule(which=PICK)
    @when(lambda self: any(grave.ready for grave in self.graves.values()))
    def dead_letters_are_dropped(self, which: int) -> None:
        grave = choose([grave for grave in self.graves.values() if grave.ready], which)
        assert self.world.supervisor.empty(grave.index, grave.serial) == grave.clear()

    @rule(which=PICK)
    @when(lambda self: self.topic.queues)
    def expired_are_swept(self, which: int) -> None:
        queue = choose(self.topic.queues, which)
        self.drain([queue])
        assert self.world.supervisor.sweep(queue.index) == queue.sweep(time.time_ns())

    @rule(which=PICK, n=st.integers(0, 20))
    @when(lambda self: any(queue.ready for queue in self.topic.queues))
    def oldest_are_advanced(self, which: int, n: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.ready], which)
        assert self.world.supervisor.stage_oldest(queue.index, n) == queue.stage_oldest(n)

    @rule(
        which=PICK,
        n=st.integers(0, 80),
        max_bytes=st.sampled_from([1, 300, 5000, 1 << 20]),
        everything=st.booleans(),
    )
    @when(lambda self: self.topic.queues)
    def spill_begins(self, which: int, n: int, max_bytes: int, everything: bool) -> None:
        self.spill(choose(self.topic.queues, which), n, max_bytes, everything)

    @rule(which=PICK, n=st.integers(5, 80))
    @when(lambda self: any(queue.ready for queue in self.topic.queues))
    def overflow_is_written(self, which: int, n: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.ready], which)
        if queue not in self.spills:
            self.spill(queue, n, 1 << 20, False)
        if queue in self.spills:
            self.end_spill(queue, "ok")

    def spill(self, queue: Queue, n: int, max_bytes: int, everything: bool) -> None:
        if queue in self.spills or queue.spill_flag:
            return
        spill = self.world.supervisor.spill_begin(queue.index, n, max_bytes, everything)
        ids = [] if spill is None else [id_ for id_, _ in read_records(spill.encode())]
        batch = queue.spill_begin(n, max_bytes, everything)
        assert ids == [msg.id for msg, _ in batch]
        if spill is None:
            return
        assert spill.count == len(batch)
        assert list(spill.lengths) == [msg.record_bytes for msg, _ in batch]
        assert spill.bytes == sum(spill.lengths)
        self.spills[queue] = spill

    @rule(which=PICK, how=st.sampled_from(["ok", "ok", "ok", "fail", "drop"]))
    @when(lambda self: self.spills)
    def spill_ends(self, which: int, how: str) -> None:
        self.end_spill(choose(list(self.spills), which), how)

    def end_spill(self, queue: Queue, how: str) -> None:
        spill = self.spills.pop(queue)
        if how == "drop" or how == "fail":
            if how == "fail":
                assert spill.end(0, False)
            del spill
            queue.spill_undo()
            queue.spilling, queue.spill_flag = None, False
            return
        file, offset = queue.write >> 40, queue.write & (1 << 40) - 1
        data = self.files[queue][file]
        del data[offset:]
        records_bytes = spill.encode()
        if queue.spilling:
            expected = [(msg.id, msg.body) for msg, _ in queue.spilling]
            found = read_records(records_bytes)
            assert [id_ for id_, _ in found] == [id_ for id_, _ in expected]
            assert all(
                data.endswith(body) for (_, data), (_, body) in zip(found, expected, strict=True)
            )
        data += records_bytes
        positions = [queue.write]
        for length in spill.lengths:
            positions.append(positions[-1] + length)
        for number, position in enumerate(positions[:-1]):
            spill.positions[number] = position
        if len(data) > FILE_BYTES:
            positions[-1] = (file + 1) << 40
        records = []
        if queue.spilling:
            records = [
                Record(msg.written(), here, there)
                for (msg, _), here, there in zip(
                    queue.spilling, positions[:-1], positions[1:], strict=True
                )
            ]
        assert spill.end(positions[-1], True) == queue.spill_end(records, positions[-1])
        self.files[queue].setdefault(queue.write >> 40, bytearray())

    @rule(which=PICK, n=st.integers(1, 40))
    @when(lambda self: any(queue.disk for queue in self.topic.queues))
    def some_are_restored(self, which: int, n: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.disk], which)
        supervisor = self.world.supervisor
        self.drain([queue])
        records = [r for r in queue.disk[:n] if r.position >> 40 == queue.disk[0].position >> 40]
        first, last = records[0].position, records[-1]
        start = first & (1 << 40) - 1
        nbytes = sum(record.msg.record_bytes for record in records)
        data = bytes(self.files[queue][first >> 40][start : start + nbytes])
        elsewhere = supervisor.restore(queue.index, data, first + 1, last.next_position)
        assert elsewhere in (None, (0, 0))  # it may find no room before it looks at the position
        result = supervisor.restore(queue.index, data, first, last.next_position)
        assert result is not None
        count, used = result
        most = queue.restorable(len(records))
        lengths = [len(record.msg.body) for record in records[:most]]
        if count != most:
            assert count < most
            # a block may be up to four times as large as needed
            may = queue.in_use_bytes() + sum(5 * block(length) + 1024 for length in lengths)
            assert may > self.topic.bytes_budget or self.may_lack_memory(queue, lengths)
        assert used == sum(record.msg.record_bytes for record in records[:count])
        queue.restore(count, records[count - 1].next_position if count else 0)

    @rule(which=PICK)
    @when(lambda self: any(queue.back for queue in self.topic.queues))
    def read_ahead_goes_back(self, which: int) -> None:
        queue = choose([queue for queue in self.topic.queues if queue.back], which)
        assert self.world.supervisor.evict_read_ahead(queue.index) == queue.evict_read_ahead()

    @rule(which=PICK)
    @when(lambda self: any(queue.disk for queue in self.topic.queues))
    def damage_is_skipped(self, which: int) -> None:
        """The first record on disk is lost."""
        queue = choose([queue for queue in self.topic.queues if queue.disk], which)
        record, depth = queue.disk[0], len(queue.disk) - 1
        supervisor = self.world.supervisor
        assert not supervisor.disk_set(queue.index, queue.read + 1, record.next_position, depth)
        assert supervisor.disk_set(queue.index, queue.read, record.next_position, depth)
        del queue.disk[0]
        queue.read = record.next_position

    @rule(n=st.integers(1, 40))
    @when(lambda self: self.topic.backlog)
    def backlog_is_moved(self, n: int) -> None:
        topic, backlog = self.topic, self.topic.backlog
        assert backlog
        self.drain(topic.channels)
        moved = self.world.supervisor.pump(self.index, self.generation, n)
        if topic.paused or not topic.channels:
            assert moved == 0
            return
        channels = sorted(topic.channels, key=lambda queue: queue.index)
        for _ in range(max(moved, 0)):
            source = topic.next_of_backlog()
            assert source is not None
            if source[1] == "deferred":  # of equal due times any may go first
                left = self.view(backlog).deferred[1]
                still = set(self.view(backlog).slots["id"][left].tolist())
                gone = [msg for msg in backlog.deferred.values() if msg.id not in still]
                chosen = min(gone, key=lambda msg: msg.due)
                assert chosen.due == source[0].due
                backlog.deferred = {chosen.id: chosen} | {
                    key: msg for key, msg in backlog.deferred.items() if msg is not chosen
                }
                source = chosen, "deferred"
            served = []
            for queue in channels:
                length, deferred = [len(source[0].body)], source[1] == "deferred"
                outcome = queue.admit(length, deferred)
                if queue.makes_room:
                    if not deferred:
                        queue.make_room(queue.surplus(length))
                    served.append(queue)
                    continue
                if outcome == "big":  # it was accepted before
                    outcome = "full" if queue.ready else queue.room(length, deferred)
                if self.got(queue, source[1], source[0]):
                    assert outcome == "ok"
                    served.append(queue)
                    continue
                assert queue.skips
                assert outcome == "full" or self.may_lack_memory(queue, [len(source[0].body)])
                queue.counters["dropped"] += 1
            topic.pump_one(served)
        for queue in channels:
            assert self.view(queue).read("dropped") == queue.counters["dropped"]
        source = topic.next_of_backlog()
        if moved < n and source is not None:
            due, deferred = source[0].due, source[1] == "deferred"
            equals = [msg for msg in backlog.deferred.values() if msg.due == due]
            assert any(
                queue.admit(length, deferred) != "ok" or self.may_lack_memory(queue, length)
                for queue in channels
                if not queue.skips
                for length in [[len(msg.body)] for msg in (equals if deferred else source[:1])]
            )
        assert moved != -1 or source is not None

    def got(self, queue: Queue, state: str, msg: Msg) -> bool:
        """Has the backlog's message come to this channel?"""
        slots = self.view(queue).slots
        wanted = State.DEFERRED if state == "deferred" else State.READY
        return bool(np.any((slots["id"] == msg.id) & (layout.state(slots["word"]) == int(wanted))))

    @rule(which=PICK, adopting=st.sampled_from([False, False, True]))
    @when(lambda self: self.topic.queues)
    def all_is_rebuilt(self, which: int, adopting: bool) -> None:
        """Changes nothing; a new supervisor gives up what the last one was spilling."""
        queue = choose(self.topic.queues, which)
        if not adopting:
            self.world.supervisor.rebuild(queue.index)
            return
        self.world.supervisor.adopt(queue.index)
        queue.adopt()
        spill = self.spills.pop(queue, None)
        if spill is not None:
            assert not spill.end(queue.write + 1, True)
            queue.spilling = None
