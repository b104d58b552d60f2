"""Writes the log of deaths: what a dead client held is read before the core takes it back."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from shmq import deaths, layout, procfs
from shmq.chronicle import Chronicle
from shmq.deaths import Held, How, Lock, Report
from shmq.layout import Array, ClientKind, EntryState
from shmq.supervisor.registry import Queue, Registry

_OWNER_DIED = 0x40000000  # FUTEX_OWNER_DIED: the kernel sets it in a lock whose holder has died
_TOPIC: Any = layout.dtype("topic")
_PUBLISH: np.dtype[Any] = np.dtype(
    {
        "names": ["word"],
        "formats": ["<u4"],
        "offsets": [_TOPIC.fields["publish"][1]],
        "itemsize": _TOPIC.itemsize,
    }
)
_LOOK = 0.003  # seconds for what a dead client held; the repair waits for it

_log = logging.getLogger(__name__)


class DeathLog:
    """The log of deaths. Without a chronicle it does nothing."""

    def __init__(self, chronicle: Chronicle | None, registry: Registry) -> None:
        self._chronicle = chronicle
        self._registry = registry
        self._directory = registry.directory
        self._number = 0 if chronicle is None else deaths.last_number(chronicle)
        self._rebuilt = self._directory.read("rebuilt")
        self._open: dict[tuple[int, int], tuple[Report, float]] = {}
        self._adopted = 0  # pid of the supervisor before this one, if it died

    def notice(self, client: int, generation: int, how: How) -> None:
        """Note that a client has died, before anything of it is taken back. A repeated notice
        changes nothing."""
        if self._chronicle is None or (client, generation) in self._open:
            return
        began = time.monotonic()
        entry = self._directory.clients[client]
        report = Report(time.time_ns(), int(entry["pid"]), int(entry["kind"]), how=how)
        report.uid = int(entry["uid"])
        if how != How.EXEC:
            report.how, report.status = _end(report.pid, int(entry["start_time"]), how)
            report.program = procfs.short_name(report.pid)
        self._open[client, generation] = report, began
        report.locks = self._left_locks()
        for queue in self._touched(entry):
            if (found := _holds(queue, client)) > 0:
                report.held.append(Held(queue.topic.name, queue.channel, found))
            if _has_died(queue.view.header["deliver"]):
                report.locks |= Lock.DELIVER
            if time.monotonic() - began > _LOOK:
                break

    def forget(self, client: int, generation: int) -> None:
        """Note that the client detached after all."""
        self._open.pop((client, generation), None)

    def record(self, client: int, generation: int, program: str, messages: int) -> None:
        """Record a death that was noticed, now that it is repaired. messages: those returned."""
        report, began = self._open.pop((client, generation), (None, 0.0))
        if report is None:
            return
        if report.kind == ClientKind.SUPERVISOR and report.pid == self._adopted:
            self._adopted = 0  # it was recorded when this one took over
            return
        report.program, report.messages = program or report.program, messages
        report.repair = time.monotonic() - began
        self._write(report)

    def record_adoption(self, pid: int, uid: int, began: float) -> None:
        """Record that this supervisor took over from one that had died. began: monotonic seconds
        when it began to."""
        self._adopted = pid
        report = Report(time.time_ns(), pid, ClientKind.SUPERVISOR, uid=uid)
        report.repair = time.monotonic() - began
        report.time -= int(report.repair * 1e9)
        self._write(report)

    def _write(self, report: Report) -> None:
        if self._chronicle is None:
            return
        rebuilt = self._directory.read("rebuilt")
        report.rebuilt, self._rebuilt = max(rebuilt - self._rebuilt, 0), rebuilt
        self._number += 1
        try:
            deaths.write(self._chronicle, self._number, report)
        except OSError as exc:
            _log.warning("cannot write the log of deaths: %s", exc)

    def _left_locks(self) -> Lock:
        """The registry lock and the topics' publish locks that nobody has taken since a death."""
        found = Lock(0)
        if _has_died(self._directory.header["registry"]):
            found |= Lock.REGISTRY
        topics = self._directory.topics
        live = topics["state"] == EntryState.LIVE
        words = topics.view(_PUBLISH)["word"]
        if np.any(words[live] & _OWNER_DIED):
            found |= Lock.PUBLISH
        return found

    def _touched(self, entry: Array) -> Iterator[Queue]:
        bits = np.unpackbits(
            np.ascontiguousarray(entry["touched"]).view(np.uint8), bitorder="little"
        )
        for index in np.flatnonzero(bits).tolist():
            queue = self._registry.queue(index)
            if queue is not None and not queue.gone:
                yield queue


def _holds(queue: Queue, client: int) -> int:
    """How many messages the consumers of a client hold."""
    sessions = queue.view.sessions
    mine = sessions["client"] == client + 1
    return int(sessions["in_flight"][mine].sum()) if mine.any() else 0


def _has_died(lock: Array) -> bool:
    return bool(int.from_bytes(bytes(lock)[:4], "little") & _OWNER_DIED)


def _end(pid: int, start_time: int, how: How) -> tuple[How, int]:
    """How a process ended, and its signal or status, as long as /proc shows it."""
    with contextlib.suppress(OSError):
        code = procfs.exit_code(pid, start_time)
        if code is not None:
            return (How.KILLED, code & 0x7F) if code & 0x7F else (How.EXITED, code >> 8)
    return how, 0
