"""The backend of Django's tasks: enqueues tasks, and finds their results."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.utils import timezone

import shmq
from shmq.integrations.django import lanes, record, testing
from shmq.integrations.django.api import (
    BaseTaskBackend,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    signals,
)
from shmq.integrations.django.checks import check_backend
from shmq.integrations.django.home import Home, home
from shmq.integrations.django.options import Settings

T = TypeVar("T")

#: The results store of an instance.
STORE: Final = "django"
#: Bytes that the record of a task grows by at least, until it is done.
_OUTCOME: Final = 4096
#: Seconds between two tries to reach a broker that was stopped.
_PAUSE: Final = 0.02


class Backend(BaseTaskBackend):
    """Runs tasks in the processes of `manage.py shmq_worker`.

    Without OPTIONS the project has an embedded broker with its files in `BASE_DIR/.shmq`, which
    the first process starts that needs it. docs/django.md lists the OPTIONS.

    A task is done at least once: if its worker dies, another one gets it at once. A task that a
    live worker has is never handed out a second time, however long it takes.
    """

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.settings = Settings.of(params)
        """The choices in OPTIONS."""

    # ---- Django's interface ----

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Enqueue a task, and return its TaskResult. With ENQUEUE_ON_COMMIT it is enqueued when
        the transaction is committed, and never if that is rolled back.

        Raises InvalidTask, TypeError or ValueError for arguments that are not JSON, MessageTooBig,
        Full if there is no room for one more result, and ShmqError if no broker can be reached."""
        self.validate_task(task)
        result = TaskResult(
            task=task,
            id=str(uuid.uuid4()),
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        if self.settings.on_commit:
            # what cannot be enqueued is refused here, and not at the commit
            size = len(record.pack(result))
            self.retry(functools.partial(self._check_size, result, size))
            transaction.on_commit(functools.partial(self._publish, result))
        else:
            self._publish(result)
        return result

    def get_result(self, result_id: str) -> Any:
        """The TaskResult of this id. Raises TaskResultDoesNotExist, also after `result_ttl`."""
        try:
            packed = self.retry(lambda broker: self.store(broker).get(str(result_id)))
        except (shmq.BadArgument, UnicodeError) as exc:  # no id is empty, longer, or not text
            raise TaskResultDoesNotExist(result_id) from exc
        fields = None if packed is None else record.parse(packed)
        if fields is None or fields["backend"] != self.alias:
            raise TaskResultDoesNotExist(result_id)
        return record.restore(fields)

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        """Yield what is wrong with the settings."""
        yield from check_backend(self.alias, self.queues, self.settings)

    # ---- the broker ----

    @property
    def home(self) -> Home:
        """Where the broker is. While tests run it is another one than that of the project."""
        if testing.runs():
            return testing.home(self.settings)
        return self._home

    @functools.cached_property
    def _home(self) -> Home:
        chosen = self._checked
        directory = None if chosen.directory is None else Path(chosen.directory)
        return home(chosen.instance, directory, chosen.owner, chosen.broker)

    @functools.cached_property
    def _checked(self) -> Settings:
        """The settings, for who did not run Django's checks. Raises ImproperlyConfigured."""
        for name, words in self.settings.faults().items():
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]['OPTIONS'][{name!r}] {words}")
        return self.settings

    def retry(self, call: Callable[[shmq.Broker], T]) -> T:
        """Call with the broker. If that was stopped in the middle, or a topic or the store was
        deleted, begin again with new ones, for `timeout` seconds. Raises what `Home.broker` raises,
        and what the call raises."""
        deadline = time.monotonic() + self._checked.timeout
        while True:
            try:
                return call(self.home.broker())
            except (shmq.Gone, shmq.NotRunning):
                self.home.drop()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)

    def store(self, broker: shmq.Broker) -> shmq.Results:
        """The results store."""
        limits = self.settings.max_results, self.settings.max_result_bytes
        return self.home.kept(broker, STORE, lambda: broker.results(STORE, *limits))

    def _producer(self, broker: shmq.Broker, topic: str) -> shmq.Producer:
        def made() -> shmq.Producer:
            broker.create_channel(topic, lanes.CHANNEL)
            return broker.producer(topic)

        return self.home.kept(broker, topic, made)

    def _publish(self, result: Any) -> None:
        now = timezone.now()
        record.change(result, enqueued_at=now)
        packed = record.pack(result)
        topic = lanes.topic(self.alias, result.task.queue_name, result.task.priority)
        self.retry(functools.partial(self._send, topic, result, packed))
        signals.task_enqueued.send(type(self), task_result=result)

    def _check_size(self, result: Any, size: int, broker: shmq.Broker) -> None:
        """Raise MessageTooBig for a task whose record would have no room for its outcome."""
        most = broker.limit("max_msg_size")
        room = min(_OUTCOME, most // 4)
        if size > most - room:
            raise shmq.MessageTooBig(
                f"enqueue {result.task.module_path}: the task and its arguments have {size} bytes, "
                f"and with {room} for its outcome at most max_msg_size, {most}: raise that option "
                "of the broker (--max-msg-size of `shmq serve`, or OPTIONS['broker'])"
            )

    def _send(self, topic: str, result: Any, packed: bytes, broker: shmq.Broker) -> None:
        self._check_size(result, len(packed), broker)
        producer = self._producer(broker, topic)
        store = self.store(broker)
        defer = delay(result.task.run_after, broker)
        # The result first: a worker may be quicker than this process.
        store.set(result.id, packed)
        try:
            producer.publish(packed, defer=defer)
        except BaseException:
            store.delete(result.id)
            raise


def delay(run_after: datetime | None, broker: shmq.Broker) -> float | None:
    """The seconds until a time, at most those that the broker allows; None: it is over."""
    if run_after is None:
        return None
    now = timezone.now() if timezone.is_aware(run_after) else datetime.now()
    left = (run_after - now).total_seconds()
    return min(left, broker.limits["max_req_timeout"] / 1e9) if left > 0 else None
