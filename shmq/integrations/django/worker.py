"""A worker process: takes one task at a time, runs it, stores its result, finishes its message.

A death anywhere in this leaves the message in flight, and it comes back to another worker within
50 ms. A result that was stored before the death is not made again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import format_exception
from types import FrameType
from typing import Any, Final

from django.db import close_old_connections, reset_queries
from django.utils import timezone

import shmq
from shmq.integrations.django import lanes, record
from shmq.integrations.django.api import (
    TaskContext,
    TaskError,
    TaskResultStatus,
    normalize_json,
    signals,
)
from shmq.integrations.django.backend import Backend, delay
from shmq.integrations.django.errors import WorkersDied

_log = logging.getLogger("shmq.integrations.django")

#: The signal by which a parent tells its worker to give its task back and end.
GIVE_BACK: Final = signal.SIGUSR1

#: Seconds between two tries to store a result in a store without room: at first, at most.
_PAUSES: Final = (0.001, 0.5)


class _Stop(BaseException):
    """The worker is to end, and has no task."""


@dataclass(frozen=True)
class Duty:
    """The work of a worker."""

    queues: Sequence[str] | None = None
    """The queues in the order of service; None: all, in turns."""
    max_tasks: int | None = None
    """After so many tasks it ends."""
    burst: bool = False
    """It ends when nothing waits."""


class Worker:
    """One worker of a backend, in the main thread of its process."""

    def __init__(self, backend: Backend, duty: Duty) -> None:
        self._backend = backend
        self._duty = duty
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}"
        """Its name in `TaskResult.worker_ids`."""
        self.done = 0
        """How many tasks it has done."""
        self._idle = False
        self._stopping = False
        self._current: tuple[Any, bytes] | None = None

    def listen(self) -> None:
        """Have SIGTERM end it after the task in hand, and GIVE_BACK at once."""
        signal.signal(signal.SIGTERM, self._told)
        signal.signal(GIVE_BACK, self._told)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes it on

    def run(self) -> None:
        """Work until it is told to stop. While there is no broker it waits for one."""
        try:
            while not self._stopping:
                try:
                    self._backend.retry(self._serve)
                    return
                except (shmq.Gone, shmq.NotRunning) as exc:
                    _log.warning("waiting for the broker: %s", exc)
        except _Stop:
            pass

    # ---- signals ----

    def _told(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        if self._idle:
            self._idle = False
            raise _Stop
        if number == GIVE_BACK:
            self._give_back()

    def _give_back(self) -> None:
        """End at once. The task in hand waits for another worker, and this was no attempt."""
        with contextlib.suppress(shmq.ShmqError):
            broker = self._backend.home.broker()
            if self._current is not None:
                result, before = self._current
                self._backend.store(broker).set(result.id, before)
                _log.info("%s: given back", result.id)
            self._consumer.close()
        os._exit(0)

    # ---- tasks ----

    def _serve(self, broker: shmq.Broker) -> None:
        """Take tasks. Raises Gone if the broker was stopped."""
        duty = self._duty
        topics = lanes.entries(self._backend.alias, duty.queues)
        self._consumer = broker.consumer(topics, lanes.CHANNEL, 1, None, policy="strict")
        with contextlib.closing(self._consumer):
            while not self._stopping:
                message = self._take(0 if duty.burst else None)
                if message is None:
                    return
                self._handle(message, self._backend.store(broker), broker)
                if duty.max_tasks is not None and self.done >= duty.max_tasks:
                    return

    def _take(self, timeout: float | None) -> shmq.Message | None:
        # If the signal comes after the take, closing the consumer gives the message back.
        self._idle = True
        if self._stopping:
            raise _Stop
        message = self._consumer.take(timeout)
        self._idle = False
        return message

    def _handle(self, message: shmq.Message, store: shmq.Results, broker: shmq.Broker) -> None:
        fields = record.parse(message.body)
        fields = record.parse(store.get(fields["id"]) or message.body)
        wait = delay(record.run_after(fields), broker)
        if fields["status"] in ("SUCCESSFUL", "FAILED"):
            pass  # a worker died between the result and the finish
        elif wait is not None:
            message.requeue(wait, failed=False)  # the broker does not defer for so long
            return
        else:
            self._perform(fields, store)
            self.done += 1
        # The broker may have been stopped meanwhile. Then the message comes back, and is finished
        # for its result.
        with contextlib.suppress(shmq.NotInFlight):
            message.finish()

    def _perform(self, fields: dict[str, Any], store: shmq.Results) -> None:
        """Run a task and store its result."""
        began = time.monotonic()
        try:
            result = record.restore(fields)
        except Exception as exc:
            _log.exception("%s %s: cannot be run", fields["id"], fields["task"])
            self._store_failure(fields["id"], record.failed(fields, exc))
            return
        most = self._backend.settings.max_attempts
        if most is not None and result.attempts >= most:
            try:
                raise WorkersDied(most)
            except WorkersDied as exc:
                self._fail(result, exc)
            return
        now = timezone.now()
        before = record.pack(result)
        record.change(
            result,
            status=TaskResultStatus.RUNNING,
            started_at=result.started_at or now,
            last_attempted_at=now,
            worker_ids=[*result.worker_ids, self.name],
        )
        with contextlib.suppress(shmq.Full, shmq.MessageTooBig):
            store.set(result.id, record.pack(result))
        self._current = result, before
        close_old_connections()
        reset_queries()
        try:
            signals.task_started.send(type(self._backend), task_result=result)
            self._call(result)
        finally:
            self._current = None
            close_old_connections()
        took = (time.monotonic() - began) * 1000
        status = result.status.value.lower()
        _log.info("%s %s: %s in %.1f ms", result.id, fields["task"], status, took)

    def _call(self, result: Any) -> None:
        task = result.task
        context = [TaskContext(task_result=result)] if task.takes_context else []
        try:
            value = normalize_json(task.call(*context, *result.args, **result.kwargs))
            record.change(
                result,
                status=TaskResultStatus.SUCCESSFUL,
                finished_at=timezone.now(),
                _return_value=value,
            )
            packed = record.pack(result)
        except BaseException as exc:
            self._fail(result, exc)
            return
        try:
            self._store(result.id, packed)
        except shmq.MessageTooBig as exc:  # it has run, and no further try would fit
            self._fail(result, exc)
        else:
            signals.task_finished.send(type(self._backend), task_result=result)

    def _fail(self, result: Any, exc: BaseException) -> None:
        """Store a failure. It is called while the exception is handled, for loggers."""
        path = f"{type(exc).__module__}.{type(exc).__qualname__}"
        error = TaskError(exception_class_path=path, traceback="".join(format_exception(exc)))
        record.change(
            result,
            status=TaskResultStatus.FAILED,
            finished_at=timezone.now(),
            errors=[*result.errors, error],
            _return_value=None,
        )
        self._store_failure(result.id, record.pack(result))
        signals.task_finished.send(type(self._backend), task_result=result)

    def _store_failure(self, key: str, packed: bytes) -> None:
        """Store a failure, with as much of its traceback as there is room for."""
        most, short = len(packed), packed
        while True:
            try:
                self._store(key, short)
                return
            except shmq.MessageTooBig:
                if not most:
                    raise
            most //= 2
            short = record.shorter(packed, most)

    def _store(self, key: str, packed: bytes) -> None:
        """Store an outcome. Raises MessageTooBig if it can never fit. Waits while the store is
        full, whose room comes back when results expire, and while there is no broker."""
        pause, most = _PAUSES
        while True:
            try:
                self._backend.retry(lambda broker: self._set(broker, key, packed))
                return
            except (shmq.Full, shmq.Gone, shmq.NotRunning) as exc:
                if pause < most:
                    _log.warning("the result of %s waits: %s", key, exc)
                    pause = most
                time.sleep(pause)

    def _set(self, broker: shmq.Broker, key: str, packed: bytes) -> None:
        self._backend.store(broker).set(key, packed, self._backend.settings.result_ttl)
