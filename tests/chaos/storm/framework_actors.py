"""Actors that work through Dramatiq, Taskiq and Django's tasks: workers, which are killed, asked to
end and stopped, and programs that send tasks and wait for their outcomes.

A task is an errand (`errand_actors`) whose id is its key, which says of what kind it is too, so
that its outcome is found after its sender's death. `errand_rules` is the verdict: every task that
was sent has run, and has its outcome or is a dead letter.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

from chaos.storm import history
from chaos.storm.actors import Actor
from chaos.storm.aim import Aim
from chaos.storm.errand_actors import FRAMEWORKS, RUN, SUICIDES, Errands, append
from chaos.storm.history import Errand, What, key_of, part_of, read_files, record
from support import recount

from shmq import sources
from shmq.errors import Full, Gone, NotRunning

#: How the names of their topics begin.
PREFIXES = ("dramatiq.", "taskiq", "django.")
STORES = frozenset({"dramatiq-results", "taskiq-results", "django"})
KINDS = ("plain", "later", "fails", "retries")
WEIGHTS = (12, 2, 1, 1)
REASON = "it was asked to"
ATTEMPTS = 30  # more than the workers that a task can meet in a round
GIVE_UP = 20.0  # seconds in which nothing waits or runs until what is missing is lost

if "dramatiq" in FRAMEWORKS:
    import dramatiq
    from dramatiq.errors import ConnectionError as DramatiqAway
    from dramatiq.middleware import default_middleware
    from dramatiq.results import ResultFailure, Results, ResultTimeout

    from shmq.integrations import dramatiq as shmq_dramatiq
    from shmq.integrations.dramatiq.consumer import Consumer as DramatiqConsumer
if "taskiq" in FRAMEWORKS:
    import taskiq
    from taskiq.api import run_receiver_task

    from shmq.integrations import taskiq as shmq_taskiq
    from shmq.integrations.taskiq.broker import _Ack
if "django" in FRAMEWORKS:
    import django
    from django.conf import settings as django_settings
if FRAMEWORKS:
    from shmq.integrations.link import Link


def kind_of(key: int) -> str:
    return KINDS[part_of(key)]


def value_of(key: int) -> int:
    return 2 * key + 1


class Late(Exception):
    """There is no outcome yet."""


class Refused(Exception):
    """The task failed, with this text."""


def chance() -> float:
    """Not the same in all processes, which inherit the state of `random`."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


class Application:
    """The program that a framework's workers and those who send tasks have in common."""

    name: ClassVar[str]
    away: ClassVar[tuple[type[Exception], ...]] = (Gone, NotRunning, Full)
    kinds: ClassVar[tuple[str, ...]] = KINDS

    def __init__(self, actor: Actor) -> None:
        self.actor, self.main = actor, os.getpid()
        self.define()

    def define(self) -> None:
        """The tasks."""
        raise NotImplementedError

    def send(self, key: int, delay: float) -> None:
        raise NotImplementedError

    def outcome(self, key: int, seconds: float) -> Any:
        """Wait for a task's value. Raises Late, Refused, and `away`."""
        raise NotImplementedError

    def serve(self, beat: Callable[[], bool]) -> None:
        """Be a worker, until `beat`, which is called again and again, returns True."""
        raise NotImplementedError

    def run(self, key: int) -> int:
        """The work of a task: it says that it runs, and ends as it should."""
        fate, in_pool = chance(), os.getpid() != self.main
        if in_pool and fate < SUICIDES / 2:
            os.kill(os.getpid(), signal.SIGKILL)
        append(self.actor.place.directory / f"{self.name}.runs", RUN.pack(key))
        if in_pool and fate < SUICIDES:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind_of(key) == "fails" or (kind_of(key) == "retries" and chance() < 0.5):
            raise ValueError(REASON)
        return value_of(key)

    def aim(self) -> list[tuple[Any, str]]:
        """The methods in one of which a worker dies that is told to."""
        return []

    def dead(self) -> set[int]:
        """The tasks that are dead letters now, which go."""
        return set()


class DramatiqApplication(Application):
    name = "dramatiq"

    def define(self) -> None:
        self.away = (*Application.away, DramatiqAway)
        instance = self.actor.place.instance
        self.results = shmq_dramatiq.ResultBackend(instance)
        keep = Results(backend=self.results, result_ttl=3_600_000)
        middleware = [*(make() for make in default_middleware), keep]
        self.broker = shmq_dramatiq.Broker(instance, middleware=middleware)
        dramatiq.set_broker(self.broker)
        how = {"store_results": True, "min_backoff": 20, "max_backoff": 50}
        self.tasks = {
            kind: dramatiq.actor(
                lambda key: self.run(key),
                actor_name=kind,
                max_retries=1000 if kind == "retries" else 0,
                **how,
            )
            for kind in KINDS
        }

    def message(self, key: int) -> Any:
        return self.tasks[kind_of(key)].message(key).copy(message_id=f"{key:x}")

    def send(self, key: int, delay: float) -> None:
        self.broker.enqueue(self.message(key), delay=int(delay * 1000) or None)

    def outcome(self, key: int, seconds: float) -> Any:
        try:
            return self.results.get_result(
                self.message(key), block=True, timeout=int(seconds * 1000)
            )
        except ResultTimeout:
            raise Late from None
        except ResultFailure as exc:
            raise Refused(str(exc)) from None

    def serve(self, beat: Callable[[], bool]) -> None:
        worker = dramatiq.Worker(self.broker, worker_timeout=100, worker_threads=2)
        worker.start()
        while not beat():
            time.sleep(0.1)
        worker.stop()

    def aim(self) -> list[tuple[Any, str]]:
        return [(Link, "retried"), (DramatiqConsumer, "_settle")]

    def dead(self) -> set[int]:
        """Dramatiq stores the outcome of a task that has failed for good when it is a dead letter
        already: a worker may die in between."""
        broker, found = self.broker.attachment, set()
        topic = broker.dead("dramatiq.default", "workers").topic
        with contextlib.closing(broker.consumer(topic, "dead")) as consumer:
            while not recount.is_empty(broker.instance, topic, "dead"):
                letter = consumer.take(1.0)  # some are on disk
                if letter is not None:
                    found.add(dramatiq.Message.decode(letter.body).args[0])
                    letter.finish()
        return found


class TaskiqApplication(Application):
    name = "taskiq"

    def define(self) -> None:
        self.away = (*Application.away, taskiq.SendTaskError)
        self.loop = asyncio.new_event_loop()
        instance = self.actor.place.instance
        self.results: Any = shmq_taskiq.ResultBackend(instance)
        again = taskiq.SmartRetryMiddleware(default_delay=0.02)
        self.broker = shmq_taskiq.Broker(instance).with_result_backend(self.results)
        self.broker = self.broker.with_middlewares(again)

        async def run(key: int) -> int:
            return self.run(key)

        self.tasks = {
            kind: self.broker.register_task(
                run, kind, **({"retry_on_error": True, "max_retries": 1000} if again_ else {})
            )
            for kind in KINDS
            for again_ in [kind == "retries"]
        }
        self.started = False

    def call(self, made: Callable[[], Any]) -> Any:
        async def work() -> Any:
            if not self.started:
                await self.broker.startup()
                self.started = True
            return await made()

        return self.loop.run_until_complete(work())

    def send(self, key: int, delay: float) -> None:
        task = self.tasks[kind_of(key)].kicker().with_task_id(f"{key:x}")
        if delay:
            task = task.with_labels(delay=delay)
        self.call(lambda: task.kiq(key))

    def outcome(self, key: int, seconds: float) -> Any:
        try:
            found = self.call(lambda: self.results.wait_result(f"{key:x}", seconds))
        except taskiq.TaskiqResultTimeoutError:
            raise Late from None
        if found.is_err:
            raise Refused(str(found.error))
        return found.return_value

    def serve(self, beat: Callable[[], bool]) -> None:
        self.broker.is_worker_process = True

        async def work() -> None:
            receiver = asyncio.create_task(
                run_receiver_task(self.broker, max_async_tasks=4, run_startup=True)
            )
            while not beat():
                await asyncio.wait([receiver], timeout=0.1)
                if receiver.done():
                    receiver.result()
            receiver.cancel()
            await asyncio.wait([receiver])
            await self.broker.shutdown()

        asyncio.run(work())

    def aim(self) -> list[tuple[Any, str]]:
        return [(Link, "retried"), (_Ack, "__call__")]


class DjangoApplication(Application):
    """Its tasks are not retried; its workers' processes may die of them."""

    name = "django"
    kinds = ("plain", "later", "fails")

    def define(self) -> None:
        global django_application
        options = {"instance": self.actor.place.instance, "max_attempts": ATTEMPTS}
        kind = "shmq.integrations.django.Backend"
        packages = ["django_tasks"] if importlib.util.find_spec("django_tasks") else []
        django_settings.configure(
            INSTALLED_APPS=[*packages, "shmq.integrations.django"],
            TASKS={"default": {"BACKEND": kind, "OPTIONS": options}},
            USE_TZ=True,
        )
        django.setup()
        from shmq.integrations.django import api, backend

        django_application = self
        self.task: Any = api.tasks.task(django_task)
        globals()[django_task.__name__] = self.task  # workers find it by its name
        self.api, self.made = api, backend
        self.backend: Any = api.tasks.task_backends["default"]

    def id_of(self, key: int) -> str:
        return f"{key:x}"

    def send(self, key: int, delay: float) -> None:
        from django.utils import timezone

        # its id is to be known before it is sent
        self.made.uuid = SimpleNamespace(uuid4=lambda: self.id_of(key))
        task = self.task
        if delay:
            task = task.using(run_after=timezone.now() + timedelta(seconds=delay))
        task.enqueue(key)

    def outcome(self, key: int, seconds: float) -> Any:
        late = time.monotonic() + seconds
        while True:
            found = None
            with contextlib.suppress(self.api.TaskResultDoesNotExist):
                found = self.backend.get_result(self.id_of(key))
            if found is not None and found.status.value == "SUCCESSFUL":
                return found.return_value
            if found is not None and found.status.value == "FAILED":
                raise Refused(found.errors[-1].traceback)
            if time.monotonic() > late:
                raise Late
            time.sleep(0.02)

    def serve(self, beat: Callable[[], bool]) -> None:
        from shmq.integrations.django.crew import Crew
        from shmq.integrations.django.worker import Duty

        os.setpgid(0, 0)  # its processes are in it too

        def watch() -> None:
            while not beat():
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=watch, daemon=True).start()
        Crew(self.backend, Duty(), 2).run()


def django_task(key: int) -> int:
    return django_application.run(key)


django_application: Any = None

APPLICATIONS: dict[str, type[Application]] = {
    kind.name: kind for kind in (DramatiqApplication, TaskiqApplication, DjangoApplication)
}


# ---- workers ----


class FrameworkWorker(Actor):
    """A worker, which ends when the storm is over, or when it is asked to."""

    asked = 0.3
    until_asked = False

    def attach(self) -> None:
        pass

    def work(self) -> None:
        self.told = False
        signal.signal(signal.SIGTERM, self.on_sigterm)
        application = APPLICATIONS[self.place.topic](self)
        self.aim = Aim(self.choice)
        for kind, name in application.aim():
            setattr(kind, name, self.aimed(getattr(kind, name)))
        while not self.told and not (self.over and not self.until_asked):
            try:
                application.serve(self.beat)
                return
            except application.away as exc:
                print(f"again: {exc!r}", flush=True)
                self.beat()
                time.sleep(0.1)

    def on_sigterm(self, number: int, frame: object) -> None:
        self.told = True

    def aimed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(*words: Any, **how: Any) -> Any:
            return self.core(lambda: call(*words, **how))

        return method

    def beat(self) -> bool:
        """Write to the log while its loop turns. Returns whether it is to end."""
        self.log.write(record(What.ERRAND, flag=Errand.ASKED))
        return self.told or (self.over and not self.until_asked)


class DramatiqWorker(FrameworkWorker):
    role = "dramatiq-worker"


class TaskiqWorker(FrameworkWorker):
    role = "taskiq-worker"


class DjangoWorker(FrameworkWorker):
    role = "django-worker"
    leads_group = True


class LastFrameworkWorker(FrameworkWorker):
    role = "last-worker"
    until_asked = True


# ---- programs ----


class FrameworkCaller(Errands):
    """Sends tasks and waits for outcomes."""

    lead = 30  # tasks that are not waited for yet

    def attach(self) -> None:
        pass

    def work(self) -> None:
        self.turns = itertools.count(1)
        self.application = APPLICATIONS[self.place.topic](self)
        self.sent: deque[int] = deque()
        while not self.over:
            with contextlib.suppress(*self.application.away):
                self.one()
            while len(self.sent) > self.lead and not self.over:
                self.collect()
            if self.choice.random() < 0.1:
                self.rest()

    def one(self) -> None:
        kinds = self.application.kinds
        kind = self.choice.choices(kinds, WEIGHTS[: len(kinds)])[0]
        key = key_of(self.number, next(self.turns), KINDS.index(kind))
        delay = self.choice.expovariate(1 / 0.2) if kind == "later" else 0.0
        self.note(Errand.BEGUN, key)
        self.core(lambda: self.application.send(key, delay))
        self.note(Errand.SENT, key)
        self.sent.append(key)

    def collect(self) -> None:
        """Wait for the first of those that were sent. The log grows meanwhile."""
        key = self.sent.popleft()
        while not self.over and not self.had(key, 2.0):
            self.note(Errand.ASKED, key)

    def had(self, key: int, seconds: float) -> bool:
        """Wait for the outcome. False if it has not come."""
        try:
            good = self.core(lambda: self.application.outcome(key, seconds)) == value_of(key)
        except Late:
            return False
        except self.application.away:
            time.sleep(0.05)
            return False
        except Refused as exc:
            good = kind_of(key) == "fails" and REASON in str(exc)
            if not good:
                print(f"{history.describe_key(key)}, {kind_of(key)}: {exc}", flush=True)
        self.note(Errand.HAD, key, good)
        return True


class DramatiqCaller(FrameworkCaller):
    role = "dramatiq-caller"


class TaskiqCaller(FrameworkCaller):
    role = "taskiq-caller"


class DjangoCaller(FrameworkCaller):
    role = "django-caller"


class FrameworkFinisher(FrameworkCaller):
    """At the end: has the tasks that are left done by a worker, and looks for the outcome of each
    that was sent."""

    role = "framework-finisher"

    def work(self) -> None:
        worker = LastFrameworkWorker(self.place, self.number, self.choice.getrandbits(60))
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                worker.work()
                os._exit(0)
            traceback.print_exc()
            os._exit(1)
        self.application = APPLICATIONS[self.place.topic](self)
        self.missing = self.sent_by_anybody()
        idle_until = time.monotonic() + GIVE_UP
        while self.look() and time.monotonic() < idle_until:
            self.note(Errand.ASKED)
            time.sleep(0.05)
            if not self.is_idle():
                idle_until = time.monotonic() + GIVE_UP
        while not self.is_idle():  # what ran twice
            self.note(Errand.ASKED)
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert not status, f"the last worker ended with status {status}"
        for key in self.application.dead():
            assert kind_of(key) == "fails", f"a dead letter: {history.describe_key(key)}"
            self.note(Errand.HAD, key)

    def sent_by_anybody(self) -> set[int]:
        """The tasks whose outcome is to come."""
        found = set()
        for file in read_files(self.place.directory):
            if file.topic == self.place.topic:
                rows = file.records[file.records["what"] == What.ERRAND]
                found.update(rows["key"][rows["flag"] == Errand.SENT].tolist())
        return found

    def look(self) -> set[int]:
        """The tasks that have no outcome yet."""
        self.missing = {key for key in self.missing if not self.had(key, 0.001)}
        return self.missing

    def is_idle(self) -> bool:
        """No task waits, and none runs."""
        with sources.open_readonly(self.place.instance) as source:
            topics = [topic.name for topic in source.directory.live_topics()]
        mine = [name for name in topics if name.startswith(self.place.topic)]
        return all(
            recount.is_empty(self.place.instance, name, "workers")
            for name in mine
            if not name.endswith(".dead")
        )
