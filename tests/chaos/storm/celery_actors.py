"""Actors that work through Celery, with shmq as its broker and its result backend: workers, which
are killed, asked to end and stopped, and programs that send tasks and wait for their outcomes.

A task is an errand (`errand_actors`) whose id is its key, which says of what kind it is too. BEGUN
is logged before it is sent, SENT when the call has returned, HAD when its outcome came; each run
adds its key to a file. Every task that was sent runs and has its outcome in the end, whoever was
killed: the one who sent it, its worker, a process of its worker's pool, the supervisor. An outcome
is a value or the task's own error. `errand_rules` is the verdict.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from chaos.storm import history
from chaos.storm.actors import Actor
from chaos.storm.aim import Aim
from chaos.storm.errand_actors import (
    CALL_RUNS,
    CALL_WORKERS,
    CALLS,
    RUN,
    SUICIDES,
    Errands,
    append,
    sign_on,
)
from chaos.storm.history import Errand, What, key_of, part_of, read_files, record
from support import recount

from shmq import sources
from shmq.errors import Gone, NotRunning

INSTALLED = importlib.util.find_spec("celery") is not None

if INSTALLED:
    import celery
    from celery import bootsteps
    from celery.exceptions import TimeoutError as LateError
    from celery.result import AsyncResult
    from celery.signals import worker_process_init
    from kombu.exceptions import OperationalError

    from shmq.integrations.celery import alias, names  # noqa: F401
    from shmq.integrations.celery.backend import STORE as RESULTS
    from shmq.integrations.celery.backend import Backend
    from shmq.integrations.celery.deliveries import Deliveries
    from shmq.integrations.celery.exchanges import STORE as EXCHANGES

    STORES = frozenset({RESULTS, EXCHANGES})
    #: Errors that say that the broker is away.
    AWAY = (OperationalError, Gone, NotRunning)
else:
    STORES = frozenset()

TOPICS = "kombu."  # how the names of Celery's topics begin
TASKS = "kombu.celery"  # the topic of the tasks
KINDS = ("plain", "later", "fails", "retries", "part", "joins", "first", "follows", "long")
#: The tasks of kinds that have another's.
TASK_OF = {"later": "plain", "part": "plain", "first": "plain", "follows": "joins"}
WEIGHTS = {"plain": 12, "later": 2, "fails": 1, "retries": 1, "joins": 1, "follows": 1, "long": 0.2}
PARTS = 3  # of a chord
REASON = "it was asked to"
TOO_LONG = 400_000  # bytes of a result: more than the broker's largest message
PIDBOX = "celery.pidbox"  # how the names of workers' queues of questions end
GIVE_UP = 20.0  # seconds in which nothing waits or runs until what is missing is lost


def kind_of(key: int) -> str:
    return KINDS[part_of(key)]


def value_of(key: int) -> int:
    return 2 * key + 1


class Application:
    """The program that workers and those who call them have in common."""

    def __init__(self, actor: Actor) -> None:
        self._actor, self._main = actor, os.getpid()
        url = f"shmq://{actor.place.instance}"
        app = self.celery = celery.Celery("storm", broker=url, backend=url, set_as_current=True)
        app.conf.update(
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            broker_connection_max_retries=None,
            control_queue_expires=2.0,
            worker_hijack_root_logger=False,
            worker_redirect_stdouts=False,
        )
        self._define(app)

    def _define(self, app: Any) -> None:
        """The tasks, which run in a worker's processes."""

        @app.task(name="storm.plain")
        def plain(key: int) -> int:
            self.ran(key)
            return value_of(key)

        @app.task(name="storm.fails")
        def fails(key: int) -> None:
            self.ran(key)
            raise ValueError(REASON)

        @app.task(name="storm.retries", bind=True)
        def retries(task: Any, key: int) -> int:
            self.ran(key)
            if task.request.retries < 2:
                raise task.retry(countdown=0.02 * task.request.retries)
            return value_of(key)

        @app.task(name="storm.joins")
        def joins(values: Any, keys: list[int], key: int) -> int:
            """After a chord, or as the second of a chain."""
            self.ran(key)
            found = values if isinstance(values, list) else [values]
            assert found == [value_of(each) for each in keys], (values, keys)
            return value_of(key)

        @app.task(name="storm.long")
        def long(key: int) -> str:
            self.ran(key)
            return "x" * TOO_LONG

        self.tasks = {
            "plain": plain,
            "fails": fails,
            "retries": retries,
            "joins": joins,
            "long": long,
        }

    def ran(self, key: int) -> None:
        """A task runs: says so, and sometimes kills its process of the pool before or after."""
        fate = int.from_bytes(os.urandom(4), "big") / 2**32
        in_pool = os.getpid() != self._main
        if in_pool and fate < SUICIDES / 2:
            os.kill(os.getpid(), signal.SIGKILL)
        append(self._actor.place.directory / CALL_RUNS, RUN.pack(key))
        if in_pool and fate < SUICIDES:
            os.kill(os.getpid(), signal.SIGKILL)

    def result(self, key: int) -> Any:
        return AsyncResult(f"{key:x}", app=self.celery)

    def signature(self, kind: str, key: int, *words: Any) -> Any:
        """Of a task that is to be sent."""
        return self.tasks[TASK_OF.get(kind, kind)].s(*words, key).set(task_id=f"{key:x}")


# ---- workers ----


class CeleryWorker(Actor):
    """A worker with a pool, which ends when the storm is over."""

    role = "celery-worker"
    asked = 0.3
    leads_group = True
    pools: ClassVar[dict[str, int]] = {"prefork": 4, "threads": 1, "solo": 1}
    quiet = 0.7  # share of those that neither ask others at their start nor gossip
    until_asked = False

    def attach(self) -> None:
        pass

    def work(self) -> None:
        os.setpgid(0, 0)  # its pool is in it too
        application = Application(self)
        app = application.celery
        self.asked_to_end = False
        app.steps["worker"].add(self.beating())
        self.sign_on()
        worker_process_init.connect(self.sign_on, weak=False)
        self.take_aim()
        pool = self.choice.choices(list(self.pools), list(self.pools.values()))[0]
        words = [f"--pool={pool}", "--concurrency=2", "--loglevel=INFO"]
        words += [f"--prefetch-multiplier={self.choice.choice([1, 4, 20])}"]
        words += [f"--hostname={self.hostname}"]
        if self.choice.random() < self.quiet:
            words += ["--without-gossip", "--without-mingle"]
        try:
            app.worker_main(["worker", *words])
        except SystemExit as exc:
            if exc.code:
                raise RuntimeError(f"the worker ended with {exc.code!r}") from exc

    @property
    def hostname(self) -> str:
        return f"w{self.number}@storm"

    def sign_on(self, **_: Any) -> None:
        """In each of its processes."""
        sign_on(self.place.directory / CALL_WORKERS)
        self.aim = Aim(self.choice)  # a timer is not inherited

    def take_aim(self) -> None:
        """A worker that is told to die does so in one of these calls."""
        for kind, name in ((Deliveries, "hold"), (Deliveries, "_settle"), (Backend, "ensure")):
            setattr(kind, name, self._aimed(getattr(kind, name)))

    def _aimed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def method(*words: Any, **how: Any) -> Any:
            return self.core(lambda: call(*words, **how))

        return method

    def beating(self) -> Any:
        """A part of the worker that writes to the log while its loop turns, and ends it."""

        def beat() -> None:
            self.log.write(record(What.ERRAND, flag=Errand.ASKED))
            if self.over and not self.until_asked and not self.asked_to_end:
                self.asked_to_end = True
                os.kill(os.getpid(), signal.SIGTERM)

        class Beat(bootsteps.StartStopStep):
            requires = ("celery.worker.components:Timer",)

            def start(self, worker: Any) -> None:
                worker.timer.call_repeatedly(0.3, beat)

        return Beat


class LastWorker(CeleryWorker):
    """Ends when it is told to, and tidies."""

    role = "celery-last-worker"
    until_asked = True
    quiet = 1.0
    pools: ClassVar[dict[str, int]] = {"prefork": 1}


# ---- programs ----


class CeleryCaller(Errands):
    """Sends tasks, chains and chords, asks workers, waits for outcomes."""

    role = "celery-caller"
    lead = 30  # tasks that are not waited for yet

    def attach(self) -> None:
        pass

    def work(self) -> None:
        self.turns = itertools.count(1)
        self.application = Application(self)
        self.sent: deque[int] = deque()
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while not self.over:
            with contextlib.suppress(*AWAY):
                if self.choice.random() < 0.01:
                    self.core(lambda: self.application.celery.control.ping(timeout=0.2))
                else:
                    self.one(self.choice.choices(kinds, weights)[0])
            while len(self.sent) > self.lead and not self.over:
                self.collect()
            if self.choice.random() < 0.1:
                self.rest()

    def key(self, kind: str) -> int:
        return key_of(self.number, next(self.turns), KINDS.index(kind))

    def one(self, kind: str) -> None:
        """Send a task, or several that belong together."""
        key, make = self.key(kind), self.application.signature
        keys, how = [key], {}
        if kind == "joins":
            keys = [self.key("part") for _ in range(PARTS)]
            body = make(kind, key, keys)
            task = celery.chord([make("part", each) for each in keys], body)
            keys = [*keys, key]
        elif kind == "follows":
            keys = [self.key("first"), key]
            task = celery.chain(make("first", keys[0]), make(kind, key, keys[:1]))
        else:
            task = make(kind, key)
            how = {"countdown": self.choice.expovariate(1 / 0.2)} if kind == "later" else {}
            if self.choice.random() < 0.2:
                how["priority"] = self.choice.randrange(10)
        for each in keys:
            self.note(Errand.BEGUN, each)
        self.core(lambda: task.apply_async(**how))
        for each in keys:
            self.note(Errand.SENT, each)
        self.sent += keys

    def collect(self) -> None:
        """Wait for the first of those that were sent. The log grows meanwhile."""
        key = self.sent.popleft()
        while not self.over and not self.had(key, 2.0):
            self.note(Errand.ASKED, key)

    def had(self, key: int, seconds: float) -> bool:
        """Wait for the outcome. False if it has not come."""
        try:
            value = self.core(lambda: self.application.result(key).get(timeout=seconds))
        except LateError:
            return False
        except AWAY:
            time.sleep(0.05)
            return False
        except Exception as exc:
            good = {
                "fails": isinstance(exc, ValueError) and str(exc) == REASON,
                "long": "max_msg_size" in str(exc),
            }
            if not good.get(kind_of(key)):
                print(f"{history.describe_key(key)}, {kind_of(key)}: {exc!r}", flush=True)
            self.note(Errand.HAD, key, good.get(kind_of(key), False))
        else:
            self.note(Errand.HAD, key, value == value_of(key))
        return True


class CeleryFinisher(CeleryCaller):
    """At the end: has the tasks that are left done by a worker, looks for the outcome of each that
    was sent, and sees that no queue of replies is left of those that died."""

    role = "celery-finisher"

    def work(self) -> None:
        worker = LastWorker(self.place, self.number, self.choice.getrandbits(60))
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException):
                worker.work()
                os._exit(0)
            traceback.print_exc()
            os._exit(1)
        self.application = Application(self)
        self.missing = self.sent_by_anybody()
        self.wait(lambda: bool(self.look()))
        self.wait(lambda: bool(self.queues_of_the_dead(worker.hostname)))
        left = self.queues_of_the_dead(worker.hostname)
        os.kill(pid, signal.SIGTERM)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert not left, f"queues of programs that have ended: {left}"
        assert not status, f"the last worker ended with status {status}"

    def wait(self, lacks: Callable[[], bool]) -> None:
        """Until nothing is lacking, or nothing will come any more."""
        idle_until = time.monotonic() + GIVE_UP
        while lacks() and time.monotonic() < idle_until:
            self.note(Errand.ASKED)
            time.sleep(0.05)
            if not self.is_idle():
                idle_until = time.monotonic() + GIVE_UP

    def sent_by_anybody(self) -> set[int]:
        """The tasks whose outcome is to come."""
        found = set()
        for file in read_files(self.place.directory):
            if file.topic == CALLS:
                rows = file.records[file.records["what"] == What.ERRAND]
                found.update(rows["key"][rows["flag"] == Errand.SENT].tolist())
        return found

    def look(self) -> set[int]:
        """The tasks that have no outcome yet."""
        with contextlib.suppress(*AWAY):
            for key in list(self.missing):
                if self.application.result(key).ready() and self.had(key, 5.0):
                    self.missing.discard(key)
        return self.missing

    def is_idle(self) -> bool:
        """No task waits, and none runs."""
        with sources.open_readonly(self.place.instance) as source:
            topics = [topic.name for topic in source.directory.live_topics()]
        tasks = [name for name in topics if name.startswith(TASKS) and names.EPHEMERAL not in name]
        return all(recount.is_empty(self.place.instance, name, names.CHANNEL) for name in tasks)

    def queues_of_the_dead(self, hostname: str) -> list[str]:
        """Queues that were to end with their consumer, and are there or known."""
        mine = f"{hostname}.{PIDBOX}"
        with self.application.celery.connection_for_read() as connection:
            known = connection.transport.queues.exchanges.ephemeral_queues()
        with sources.open_readonly(self.place.instance) as source:
            topics = [topic.name for topic in source.directory.live_topics()]
        there = {name for name in topics if name.endswith(names.EPHEMERAL)}
        there.discard(names.topic_of(mine, True))
        return sorted(there | (set(known) - {mine}))
