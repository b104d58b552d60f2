"""The spiller's loop: watches queues, serves each one in turn, and keeps an eye on their files."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from shmq import _native, layout
from shmq._native import Broker
from shmq.errors import Busy, Gone
from shmq.options import Options
from shmq.storage import own_files
from shmq.supervisor import salvage
from shmq.supervisor.loops import Bell
from shmq.supervisor.memory import Trimmer, scarce
from shmq.supervisor.overflow.deferred import DeferredMover
from shmq.supervisor.overflow.files import Files
from shmq.supervisor.overflow.health import DiskHealth
from shmq.supervisor.overflow.mover import Mover
from shmq.supervisor.overflow.policy import FAST_WINDOW, LEAD, Policy, holds
from shmq.supervisor.overflow.state import States
from shmq.supervisor.registry import Queue, Registry, Snapshot
from shmq.supervisor.trouble import DiskTrouble

_PUMP_MESSAGES = 2048  # messages of a backlog moved at once
_RETRY_AFTER = 1.0  # seconds after a disk error
_TICK = 1.0  # seconds between rounds without a ring
_TICK_WATCHING = 0.005  # ... while a queue needs something; doubles while nothing can be moved
_TICK_WAITING = 0.100  # ... up to this; also while files wait to be synced
_TICK_DRAINING = 0.0005  # ... while consumers take messages from disk
_DRAINING = 0.050  # seconds after a restore in which consumers are assumed to take from disk
_ENOUGH = 8  # consumers wait if less than this part (1/8) of what was read from disk is left
_OTHERS = 32  # queues without a request that are looked at every second, in turn

_NEVER = np.iinfo(np.int64).max

_Work = Callable[[Queue], bool]

_log = logging.getLogger(__name__)


class Spiller:
    """The loop. A stop calls `flush` when the loop has ended."""

    def __init__(
        self, broker: Broker, registry: Registry, options: Options, trouble: DiskTrouble
    ) -> None:
        """trouble: where disk errors are published."""
        spill_all = options.mem_queue_size == 0
        self._broker = broker
        self._registry = registry
        self._trimmer = Trimmer(broker)
        self._states = States()
        self._files = Files(self._states, spill_all)
        self._health = DiskHealth(Path(options.data_path or "."), trouble)
        self._policy = Policy(registry, self._states, spill_all)
        self._deferred = DeferredMover(broker, self._policy)
        self._mover = Mover(broker, self._states, self._files, self._deferred, spill_all)
        self._changes = -1  # the registry's count when deleted queues were last let go of
        self._watched: dict[Queue, None] = {}
        self._due = np.full(layout.constant("QUEUES"), _NEVER)  # by index: next due time on disk
        self._others: Iterator[Queue] = iter(())
        self._others_at = 0.0
        self._pause = _TICK_WATCHING

    @property
    def health(self) -> str:
        """nsqd's text: `OK`, or `NOK - ` and the disk's last error."""
        return self._health.text

    def flush(self, queue: Queue, tell: Callable[[str], None]) -> None:
        """Write everything in memory to disk (see `Mover.flush`). Raises OSError."""
        self._mover.flush(queue, tell)

    def needed(self, queue: Queue) -> tuple[int, int]:
        """As `Files.needed`."""
        return self._files.needed(queue, queue.positions[0])

    def run(self, bell: Bell) -> None:
        """Move messages until the bell is stopped."""
        while not bell.check():
            bell.wait(self._round(time.monotonic()))

    def _round(self, now: float) -> float:
        """Do one round. Returns the seconds to sleep without a ring, 0 if anything was moved."""
        self._let_go()
        self._gather(now)
        if not self._watched and not self._files.active:
            self._health.only(set())
            self._health.probe()
            return _TICK
        snapshot = Snapshot.of([queue for queue in self._watched if not queue.gone])
        needs, busy, pause = self._serve(snapshot, now)
        self._tidy(snapshot, now)
        self._trimmer.trim_idle(snapshot, now)
        self._make_room(snapshot)
        self._forget(snapshot, needs)
        self._health.only(needs | self._files.active)
        self._health.probe()
        if busy:
            self._pause = _TICK_WATCHING
            return 0.0
        if needs:
            pause = min(pause, self._pause)
            self._pause = min(2 * self._pause, _TICK_WAITING)
        return min(pause, _TICK_WAITING) if self._files.active else pause

    def _let_go(self) -> None:
        """Drop references to deleted queues, because each one keeps its memory mapped."""
        if self._changes == self._registry.changes:
            return
        self._changes = self._registry.changes
        for queue in [queue for queue in self._watched if queue.gone]:
            del self._watched[queue]
        pressed = self._policy.pressed
        pressed.difference_update([queue for queue in pressed if queue.gone])
        self._files.forget_gone()
        self._states.forget_gone()
        self._others = iter([queue for queue in self._others if not queue.gone])

    def _make_room(self, snapshot: Snapshot) -> None:
        """Free memory in /dev/shm if a publisher waits whose queue could not grow."""
        for row in np.flatnonzero(self._policy.small(snapshot)).tolist():
            if scarce(int(snapshot.hot["need_bytes"][row])):
                self._trimmer.trim_now(self._registry.queues)
                return

    def _gather(self, now: float) -> None:
        """Watch queues that were requested, queues with deferred messages to be read soon, and
        every second some others."""
        rung = self._broker.spiller_pending()
        if rung:
            self._pause = _TICK_WATCHING
        soon = np.flatnonzero(self._due <= _native.realtime() + LEAD)
        for index in (*rung, *soon.tolist()):
            queue = self._registry.queue(index)
            if queue is not None:
                self._watched[queue] = None
        for queue in filter(None, map(self._registry.queue, rung)):
            if queue.view.read("need_slots"):
                self._states[queue].asked_at = now
        self._due[soon] = _NEVER
        if now >= self._others_at:
            self._others_at = now + _TICK
            others = [*itertools.islice(self._others, _OTHERS)]
            self._others = self._others if others else iter(self._registry.queues)
            self._watched.update(dict.fromkeys(others))

    def _serve(self, snapshot: Snapshot, now: float) -> tuple[set[Queue], bool, float]:
        """Move a batch for each queue that needs it. Returns the queues that still need something,
        whether anything was moved, and the seconds after which to look again."""
        hot, busy, pause = snapshot.hot, False, _TICK
        on_disk = (hot["disk_read"] != hot["disk_write"]) | (hot["spilling"] != 0)
        needs = set(snapshot.at(self._policy.wanted(snapshot)))

        def each(queues: Iterable[Queue], work: _Work, kind: str = "write") -> list[Queue]:
            chosen = list(queues)
            needs.update(chosen)
            ready = [queue for queue in chosen if self._may_try(queue, kind, now)]
            return [queue for queue in ready if self._guarded(queue, work, kind)]

        low = self._policy.running_low(snapshot, on_disk)
        self._note_starved(snapshot, low, now)
        for queue in each(low, self._mover.restore, "read"):
            self._states[queue].restored_at, busy = now, True
        full = []
        for row in np.flatnonzero(self._policy.overflowing(snapshot, on_disk)).tolist():
            queue = snapshot.queues[row]
            settled = on_disk[row] or hot["overflowed"][row] or queue in self._policy.pressed
            if settled or not self._policy.is_fast(queue, int(hot["delivered"][row]), now):
                full.append(queue)
            else:
                needs.add(queue)
                pause = FAST_WINDOW
        busy |= bool(each(full, self._mover.spill))
        busy |= bool(each(self._policy.defers_too_many(snapshot), self._deferred.write))
        busy |= bool(each(self._policy.crowded(snapshot), self._mover.relieve))
        self._policy.pressed.clear()
        busy |= bool(each(self._policy.has_deferred_due(snapshot), self._deferred.read, "read"))
        busy |= bool(each(filter(self._is_pumped, snapshot.queues), self._pump))
        needs |= self._policy.pressed
        for row in np.flatnonzero(on_disk).tolist():
            if now - self._states[snapshot.queues[row]].restored_at < _DRAINING:
                needs.add(snapshot.queues[row])
                pause = _TICK_DRAINING
        return needs, busy, pause

    def _note_starved(self, snapshot: Snapshot, low: list[Queue], now: float) -> None:
        """Note the queues whose consumers have taken nearly all that was just read from disk."""
        if not low:
            return
        rows = dict(zip(snapshot.queues, snapshot.waiting.tolist(), strict=True))
        for queue in low:
            state = self._states[queue]
            if now - state.restored_at < _DRAINING and rows[queue] * _ENOUGH < state.filled:
                if not state.is_starved(now):
                    state.credit = 0
                state.starved_at = now

    def _forget(self, snapshot: Snapshot, needs: set[Queue]) -> None:
        """Watch only the queues that still need something."""
        for queue in snapshot.queues:
            if queue not in needs:
                due = queue.deferred_store.due
                self._due[queue.index] = _NEVER if due is None else due
        self._watched = dict.fromkeys(needs)

    def _is_pumped(self, queue: Queue) -> bool:
        """True if this is a backlog whose messages can move to its topic's channels."""
        return self._policy.feeds_channels(queue) and holds(queue)

    def _pump(self, backlog: Queue) -> bool:
        """Move part of a backlog to its topic's channels. A full channel first gets room."""
        topic = backlog.topic
        if backlog.deferred_store.chunks:
            self._deferred.read(backlog, everything=True)
        moved = self._broker.pump(topic.index, topic.generation, _PUMP_MESSAGES)
        if moved < 0:
            self._policy.pressed.update(queue for queue in topic.channels if not queue.in_memory)
        return moved > 0

    def _tidy(self, snapshot: Snapshot, now: float) -> None:
        """Delete files that were read (or emptied) completely, and sync queues that are due."""
        seen = np.array([self._states[queue].seen_read for queue in snapshot.queues], np.uint64)
        self._files.active.update(snapshot.at(snapshot.hot["disk_read"] != seen))
        for queue in list(self._files.active):
            if queue.gone:
                self._files.active.discard(queue)
            elif self._may_try(queue, "tidy", now):
                self._guarded(queue, self._sync, "tidy")

    def _sync(self, queue: Queue) -> bool:
        self._files.sync(queue)
        return False

    def _may_try(self, queue: Queue, kind: str, now: float) -> bool:
        """False for a second after an error of this kind of work."""
        return self._states[queue].retry_at.get(kind, 0) <= now

    def _guarded(self, queue: Queue, work: _Work, kind: str) -> bool:
        """Do one kind of work for a queue under its lock. An error of this queue or its disk stops
        no other queue, and no other kind of work."""
        self._files.keep_open(queue)
        state = self._states[queue]
        with queue.lock:
            if queue.gone:
                return False
            try:
                own_files.check_place(queue.disk.data_path)
                if queue.positions != state.checked:
                    salvage.repair_positions(self._broker, queue)
                    state.checked = queue.positions
                moved = work(queue)
                self._health.works(queue, kind)
                return moved
            except (Gone, Busy):
                pass  # removed or emptied meanwhile, or locked by a stopped client
            except OSError as exc:
                state.retry_at[kind] = time.monotonic() + _RETRY_AFTER
                self._health.failed(queue, kind, exc)
            except salvage.BROKEN as exc:
                state.retry_at[kind] = time.monotonic() + _RETRY_AFTER
                _log.error("%s: cannot move messages between memory and disk: %s", queue, exc)
        return False
