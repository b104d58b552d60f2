"""One round of a storm: its processes, the blows, and what is looked at in the end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import heapq
import itertools
import os
import random
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from chaos.storm import (
    actors,
    celery_actors,
    checker,
    errand_actors,
    framework_actors,
    many_actors,
    operators,
    policy_actors,
    result_actors,
    spark_actors,
)
from chaos.storm.actors import Actor, Control, Place
from chaos.storm.aim import Aim, aimed
from chaos.storm.history import Counter as CounterOf
from chaos.storm.history import Log, Settings, What, record
from chaos.storm.nursery import Born, Nursery
from chaos.storm.verdict import Verdict, Violation
from storm_looks import children_of, commit, describe_queues, free_port, group
from storm_roles import (
    AIM_SECONDS,
    AIMED,
    CHANNELS,
    GATEWAY_WEIGHT,
    ROLES,
    SPARK_ROLES,
    SUPERVISOR_CALLS,
    UNAIMED,
    Role,
    Seat,
    limits,
    policies,
)
from support import processes, recount

import shmq.cli
import shmq.cli.serve  # before the forks
from shmq import shm, sources
from shmq.gateway import worker
from shmq.supervisor import supervisor, workers

STOPS_A_SECOND = 2.0
TICK = 0.003  # seconds between two looks at everything
MANY_WAITING = 20_000  # messages from which on producers publish slowly
STUCK = 45.0  # seconds in which a process that is not stopped must have done something
ASKED_SECONDS = 20.0  # for one that was asked to end
PATIENCE = 60.0  # seconds for each step of a round's end, from when somebody last got on
MOST_PATIENCE = 600.0
PR_SET_PDEATHSIG = 1
#: A process that a killed supervisor was just starting holds the supervisor's locks until it closes
#: them or executes its program, and its gateway the port until it has seen the death. Service
#: managers hardly ever see this.
LOCK_OF_THE_DEAD = re.compile(
    r"FATAL: .*(is already running|failed to lock data path|address already in use)"
)

# ---- processes ----


def fork(work: Callable[[], int | None], said: Path) -> int:
    """A child that does `work`, says what goes wrong to the file, and dies with us."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # it is not the storm that is asked to end
        fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        faulthandler.register(signal.SIGRTMIN, all_threads=True)
        status = work() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def gateways_from(nursery: Nursery) -> Callable[..., Born]:
    """A replacement for Popen in a supervisor: a gateway process without the second that the start
    of a Python takes on a busy machine. No supervisor would live until it serves."""

    def start(argv: list[str], *, stdin: int, **how: Any) -> Born:
        assert argv[-1] == worker.__name__, argv
        return Born(nursery, stdin)

    return start


class Round:
    """One round."""

    spark_jobs = False  # whether a driver of Spark's is among the actors

    def __init__(
        self, seed: int, kills: int, directory: Path, pace: float, long_stop: float, late: float
    ) -> None:
        self.seed, self.kills_wanted, self.pace, self.long_stop = seed, kills, pace, long_stop
        self.choice = random.Random(seed)
        self.directory = directory
        self.data_path = directory / "data"
        self.data_path.mkdir()
        self.instance = f"storm-{os.getpid()}-{seed}"
        self.control = Control()
        self.filler = random.Random(0).randbytes(1 << 20)
        self.numbers = itertools.count(1)
        self.journal = Log(directory / "000000.storm.log")
        self.port = free_port()
        self.policies = policies(self.choice)
        self.promises = [*CHANNELS, *self.policies.channels]
        self.options = {
            **limits(self.choice),
            "tcp_address": f"127.0.0.1:{self.port}",
            "http_address": "",
        }
        self.killed: Counter[str] = Counter()
        self.stopped: Counter[str] = Counter()
        self.problems: list[Violation] = []
        self.repairs: Counter[str] = Counter()
        self.verdict = Verdict()
        self.supervisor = Seat(0, None, True)
        self.serving = False
        self.serves_since = 0.0
        self.seats = [self.supervisor]
        for role in [*ROLES, *self.policies.roles, *(SPARK_ROLES if self.spark_jobs else ())]:
            for place in range(role.seats):
                self.seats.append(Seat(len(self.seats), role, place >= role.survivors))
        #: The processes that are left of the groups of those who have ended.
        self.orphans: list[psutil.Process] = []
        self.continues: list[tuple[float, int, Seat, int]] = []
        Settings(
            seed,
            self.promises,
            commit(),
            {**self.options, "late_seconds": late, "native": os.environ.get("SHMQ_NATIVE", "")},
            self.policies.palette,
            self.policies.tuned,
        ).save(directory)

    # -- starting

    def start_supervisor(self) -> None:
        words = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        words += [f"--instance={self.instance}", f"--data-path={self.data_path}"]
        number = self.supervisor.number = next(self.numbers)
        said = self.directory / f"{number:06d}.supervisor.err"
        # an empty log, so that the checker knows what it was
        (self.directory / f"{number:06d}.supervisor.log").touch()
        self.control.doom(0, False)
        self.supervisor.pid = fork(lambda: self.serve(words), said)
        self.supervisor.moved_at = time.monotonic()
        self.serving = self.supervisor.blow = self.supervisor.stopped = False

    def serve(self, words: list[str]) -> int:
        """In the child: `shmq serve`, whose calls into the core can be aimed at."""
        nursery = Nursery(worker.main)  # while there is one thread
        workers.subprocess.Popen = gateways_from(nursery)
        workers._LAST_PAUSE = workers._FIRST_PAUSE  # however often one is killed
        choice = random.Random(self.supervisor.number)
        supervisor.Broker = aimed(
            supervisor.Broker,
            SUPERVISOR_CALLS,
            lambda: self.control.doomed(0),
            Aim(choice, slow=True),
            choice.randrange(1, 60),
        )
        return shmq.cli.main(["serve", *words])

    def start(self, seat: Seat, channel: str = "") -> None:
        role = seat.role
        assert role is not None
        seat.number = next(self.numbers)
        self.launch(seat, role.kind, role.topic, role.channel or channel)

    def launch(self, seat: Seat, kind: type[Actor], topic: str, channel: str = "") -> None:
        place = Place(
            self.instance,
            self.directory,
            self.control,
            self.filler,
            topic,
            channel,
            seat.place,
            self.port,
        )
        self.control.doom(seat.place, False)
        number, seed = seat.number, self.choice.getrandbits(63)
        said = self.directory / f"{number:06d}.{kind.role}.err"
        seat.pid = fork(lambda: kind(place, number, seed).run(), said)
        seat.blow, seat.stopped, seat.size = False, False, 0
        seat.moved_at = time.monotonic()

    def fill(self, now: float) -> None:
        """Start the processes that are missing."""
        for seat in self.seats:
            if seat.pid or now < seat.start_at:
                continue
            if seat.role is None:
                self.start_supervisor()
            elif seat.role.kind is operators.Wanderer:
                found = operators.side_channels(self.instance, seat.role.topic)
                if found:
                    self.start(seat, self.choice.choice(found))
            else:
                self.start(seat)

    # -- blows

    def kill(self, seat: Seat) -> None:
        """Now, or in one of its next calls into the core."""
        aim = self.choice.random() < AIMED and seat.role not in UNAIMED and not seat.stopped
        self.journal.write(record(What.KILL, key=seat.number, flag=aim))
        seat.blow = True
        asked = seat.role.kind.asked if seat.role and not seat.stopped else 0.0
        if not aim and self.choice.random() < asked:
            seat.dies_by = time.monotonic() + ASKED_SECONDS
            os.kill(seat.pid, signal.SIGTERM)
        elif aim:
            seat.dies_by = time.monotonic() + AIM_SECONDS
            self.control.doom(seat.place, True)
        else:
            os.kill(seat.pid, signal.SIGKILL)
        self.killed[seat.name] += 1
        if seat.role is None:
            self.serving = False

    def strike(self) -> None:
        """Kill one or a few at once."""
        count = 1 if self.choice.random() < 0.85 else self.choice.randrange(2, 4)
        for _ in range(count):
            alive = [seat for seat in self.seats if seat.pid and seat.may_die and not seat.blow]
            weights = [seat.weight for seat in alive]
            # one that begins has a nursery that has not got its name yet
            gateways = children_of(self.supervisor.pid) if self.serving else []
            if gateways and self.choice.random() * (sum(weights) + GATEWAY_WEIGHT) < GATEWAY_WEIGHT:
                self.journal.write(record(What.GATEWAY))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.choice.choice(gateways), signal.SIGKILL)
                    self.killed["gateway"] += 1
                self.journal.write(record(What.GATEWAY, flag=1))
            elif alive:
                self.kill(self.choice.choices(alive, weights)[0])

    def stop(self, now: float, seconds: float, seat: Seat | None = None) -> None:
        """SIGSTOP somebody for so long."""
        alive = [each for each in self.seats if each.pid and not each.blow and not each.stopped]
        if seat is None and alive:
            seat = self.choice.choice(alive)
        if seat is None or seat not in alive:
            return
        self.note(What.STOP, seat)
        os.kill(seat.pid, signal.SIGSTOP)
        seat.stopped = True
        self.stopped[seat.name] += 1
        heapq.heappush(self.continues, (now + seconds, seat.number, seat, seat.pid))

    def go_on(self, now: float) -> None:
        """SIGCONT for whose time has come."""
        while self.continues and self.continues[0][0] <= now:
            _, number, seat, pid = heapq.heappop(self.continues)
            if seat.pid == pid and seat.number == number and not seat.blow:
                os.kill(pid, signal.SIGCONT)
                self.note(What.CONTINUED, seat)
                seat.stopped, seat.moved_at = False, now

    def note(self, what: What, seat: Seat) -> None:
        self.journal.write(record(what, key=seat.number))

    # -- looking

    def wait(self) -> None:
        """Reap the processes that have ended."""
        for seat in self.seats:
            if not seat.pid:
                continue
            pid, status = os.waitpid(seat.pid, os.WNOHANG)
            if pid:
                self.ended(seat, os.waitstatus_to_exitcode(status))
            elif seat.blow and time.monotonic() > seat.dies_by:
                os.kill(seat.pid, signal.SIGKILL)

    def ended(self, seat: Seat, status: int) -> None:
        self.note(What.DEAD, seat)
        if seat.role is not None and seat.role.kind.leads_group:
            self.orphans += group(seat.pid)
            if self.choice.random() < 0.5:  # else they may do what they are at
                self.end_orphans()
        name, blow, seat.pid = f"{seat.number:06d}.{seat.name}", seat.blow, 0
        if seat.role is None:
            self.serving = False
            # sometimes at once, sometimes as late as a service manager
            seat.start_at = time.monotonic() + self.choice.choice([0.0, 0.0, 0.1, 0.5])
        endings = {-signal.SIGKILL}
        if seat.role is not None and seat.role.kind.asked:
            endings |= {-signal.SIGTERM, 0}
        if blow and status in endings:
            return
        if seat.role is None and status == 1 and LOCK_OF_THE_DEAD.search(self.said(name)):
            self.repairs["supervisors that came before the last one's lock was gone"] += 1
            return
        if status or seat.role is None:
            self.problem("error", f"{name} ended with status {status}: {self.said(name)}")
        elif seat.role.kind is not operators.Wanderer and not self.control.ending:
            self.problem("error", f"{name} ended by itself: {self.said(name)}")

    def end_orphans(self) -> None:
        """As a service manager ends what is left of a service."""
        for orphan in self.orphans:
            with contextlib.suppress(psutil.NoSuchProcess):
                orphan.kill()
        self.orphans.clear()

    def said(self, name: str) -> str:
        path = self.directory / f"{name}.err"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def look_at_supervisor(self) -> None:
        pid = self.supervisor.pid
        alive = pid and not self.supervisor.blow
        if alive and not self.serving and processes.answers(self.instance, pid):
            self.serving, self.serves_since = True, time.monotonic()
            self.note(What.SERVING, self.supervisor)

    def look_for_stuck(self, now: float) -> None:
        """Everybody's log must grow; what has been stopped may have stopped others."""
        if any(seat.stopped for seat in self.seats):
            for seat in self.seats:
                seat.moved_at = now
        for seat in self.seats:
            if not seat.pid or seat.role is None:
                continue
            for path in self.directory.glob(f"{seat.number:06d}.*.log"):
                size = path.stat().st_size
                if size != seat.size:
                    seat.size, seat.moved_at = size, now
            if now - seat.moved_at > STUCK:
                self.dump()
                self.problem(
                    "stuck",
                    f"{seat.number:06d}.{seat.name} has done nothing for "
                    f"{STUCK:g} s: {self.said(f'{seat.number:06d}.{seat.name}')}",
                )
                raise Stuck

    def dump(self) -> None:
        """Where is everybody, and everything? Into files."""
        for seat in self.seats:
            if seat.pid:
                os.kill(seat.pid, signal.SIGRTMIN)
        (self.directory / "queues.txt").write_text("\n".join(describe_queues(self.instance)) + "\n")
        time.sleep(0.5)

    def problem(self, rule: str, text: str) -> None:
        self.problems.append(Violation(rule, text))

    # -- the round

    def run(self, progress: Callable[[int], None]) -> Verdict:
        """Storm, end, verdict."""
        try:
            self.fill_first()
            self.storm(progress)
            self.end()
        except Stuck:
            pass
        finally:
            self.clear()
        verdict = self.verdict = checker.check(self.directory)
        verdict.violations += self.problems
        verdict.counts.update(self.repairs)
        return verdict

    def fill_first(self) -> None:
        """A supervisor and the channels that are there from the beginning; then everybody."""
        self.start_supervisor()
        self.until("a supervisor answers", lambda: self.serving)

        def create() -> None:
            with shmq.attach(self.instance, timeout=60) as broker:
                for promise in self.promises:
                    if promise.topic == actors.LATE:
                        broker.create_topic(promise.topic)
                    elif promise.topic != many_actors.LATER:
                        broker.create_channel(promise.topic, promise.channel)
                    if promise.settings:
                        words = operators.whole(self.policies.palette[promise.settings])
                        broker.configure(promise.topic, promise.channel, **words)

        pid = fork(create, self.directory / "creator.err")
        _, status = os.waitpid(pid, 0)
        if status:
            raise AssertionError((self.directory / "creator.err").read_text())
        now = time.monotonic()
        for seat in self.seats:
            seat.start_at = now + (seat.role.after if seat.role else 0)

    def storm(self, progress: Callable[[int], None]) -> None:
        now = time.monotonic()
        next_kill, next_stop, next_look = now + 1.0, now + 1.0, now
        long_stop = now + self.choice.uniform(1, 5) if self.long_stop else float("inf")
        quick = float("inf")  # a supervisor that has just come up
        while self.killed.total() < self.kills_wanted:
            now = time.monotonic()
            self.wait()
            self.fill(now)
            self.look_at_supervisor()
            self.go_on(now)
            if now >= next_kill:
                had, served = self.supervisor.number, self.serving
                self.strike()
                next_kill = now + self.choice.expovariate(self.pace)
                progress(self.killed.total())
                if served and not self.serving and self.choice.random() < 0.4:
                    quick = now + self.choice.uniform(0.0, 0.6)
                assert self.supervisor.number == had
            if now >= quick and self.supervisor.pid and not self.supervisor.blow:
                self.kill(self.supervisor)
                quick = float("inf")
            if now >= next_stop:
                self.stop(now, min(self.choice.expovariate(1 / 0.05), 1.0))
                next_stop = now + self.choice.expovariate(STOPS_A_SECOND)
            if now >= long_stop:
                self.stop(now, self.long_stop, self.victim_of_long_stop())
                long_stop = float("inf")
            if now >= next_look:
                next_look = now + 0.1
                self.control.throttle = actors.waiting(self.instance) > MANY_WAITING
                self.look_for_stuck(now)
            time.sleep(TICK)

    def victim_of_long_stop(self) -> Seat | None:
        """Of whom nothing may be taken: one that is not killed meanwhile."""
        survivors = [seat for seat in self.seats if not seat.may_die and seat.pid]
        return self.choice.choice(survivors) if survivors else None

    def end(self) -> None:
        """Everybody goes home; then all that is left is taken."""
        self.until("who is stopped goes on", lambda: not self.continues)
        self.until("a supervisor answers", lambda: self.serving)
        if self.choice.random() < 0.5:
            self.flush()  # in the middle of the work
        self.control.ending = True
        working = [seat for seat in self.seats if seat.role is not None]
        self.until("everybody ends", lambda: not any(seat.pid for seat in working), fill=False)
        self.until("a supervisor answers", lambda: self.serving)
        self.seats = [self.supervisor]
        self.end_orphans()
        self.everything_is_back()
        self.employ([(topic, "") for topic in errand_actors.QUEUES], errand_actors.Sweeper)
        self.employ([(errand_actors.POOL, "")], errand_actors.Finisher)
        if celery_actors.INSTALLED:
            self.employ([(errand_actors.CALLS, "")], celery_actors.CeleryFinisher)
        callers = [(name, "") for name in errand_actors.FRAMEWORKS]
        self.employ(callers, framework_actors.FrameworkFinisher)
        if self.spark_jobs:
            self.end_spark()
        self.everything_is_back()
        self.employ([("work", "")], operators.Unpauser)
        if self.choice.random() < 0.3:
            self.flush()
            self.until("a supervisor answers", lambda: self.serving)
        errands = (*errand_actors.QUEUES, celery_actors.TOPICS, spark_actors.TOPICS)
        errands = (errand_actors.POOL, *errands, *framework_actors.PREFIXES)
        places = [place for place in self.channels() if not place[0].startswith(errands)]
        dead = {promise.dead for promise in self.promises}
        self.employ([place for place in places if place[0] not in dead], actors.Drainer)
        self.employ([place for place in places if place[0] in dead], policy_actors.LetterDrainer)
        self.employ([("", "")], result_actors.Auditor)
        for name, found in self.recounted().items():
            if found.waiting:
                self.problem("left", f"{name} still has {len(found.waiting)} messages")
        self.flush()
        if left := shm.list_objects(self.instance):
            self.problem("left", f"in shared memory: {left}")

    def end_spark(self) -> None:
        """Leases of the dead go back by themselves; what they staged goes with the next commit."""
        topics = [(spark_actors.FEED, ""), (spark_actors.OUT, "")]
        self.employ(topics, spark_actors.SparkSweeper)
        if left := spark_actors.staged(self.instance):
            self.problem("left", f"staged rows: {left}")

    def everything_is_back(self) -> None:
        """Nobody is at work, so every place is free but the supervisor's and its gateway's, the
        workers of pools are gone, and there are the stores of those that last."""
        directory, instance = self.directory, self.instance

        def back() -> bool:
            with sources.open_readonly(instance) as source:
                clients = source.directory.clients
                free = source.directory.free_clients
                pids = set(clients["pid"][clients["state"] != 0].tolist())
                with contextlib.closing(shm.Permits(instance)) as permits:
                    return permits.free == free and pids <= ours()

        def ours() -> set[int]:
            return {self.supervisor.pid, *children_of(self.supervisor.pid)}

        self.until("every place is free", back, fill=False)
        for workers_ in (errand_actors.WORKERS, errand_actors.CALL_WORKERS):
            self.until(
                f"the processes in {workers_} end",
                lambda name=workers_: not errand_actors.living_workers(directory, name),
                fill=False,
            )
        with sources.open_readonly(instance) as source:
            stores = {store.name for store in source.directory.live_stores()}
        pool = {name for name in stores if name.startswith(errand_actors.POOL)}
        lasting = celery_actors.STORES | framework_actors.STORES
        if left := stores - {result_actors.STORE} - pool - lasting:
            self.problem("left", f"results stores: {sorted(left)}")

    def recounted(self) -> dict[tuple[str, str | None], recount.Recount]:
        try:
            return recount.recount_all(self.instance)
        except AssertionError as exc:
            self.problem("recount", str(exc))
            return {}

    def channels(self) -> list[tuple[str, str]]:
        with sources.open_readonly(self.instance) as source:
            topics = {topic.index: topic.name for topic in source.directory.live_topics()}
            found = {
                (topics[queue.topic], queue.channel)
                for queue in source.directory.live_queues()
                if queue.channel
            }
        # one that nobody has consumed from yet is made now, and gets what its topic kept
        return sorted(found | {(promise.topic, promise.channel) for promise in self.promises})

    def employ(self, places: list[tuple[str, str]], kind: type[Actor]) -> None:
        """One of this kind at each place, until they have ended."""
        seats = []
        for topic, channel in places:
            seat = Seat(
                len(seats) + 1, Role(kind, topic, channel), False, number=next(self.numbers)
            )
            self.launch(seat, kind, topic, channel)
            seats.append(seat)
        self.seats += seats
        self.until(f"each {kind.role} ends", lambda: not any(s.pid for s in seats), fill=False)
        self.seats = [self.supervisor]

    def flush(self) -> None:
        """A supervisor's orderly end: everything to disk."""
        self.count_repairs()
        self.note(What.ENDING, self.supervisor)
        pid = self.supervisor.pid
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + PATIENCE
        while True:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() > deadline:
                self.dump()
                self.problem(
                    "stuck",
                    f"the supervisor does not end: "
                    f"{self.said(f'{self.supervisor.number:06d}.supervisor')}",
                )
                raise Stuck
            time.sleep(TICK)
        self.supervisor.pid, self.serving, self.supervisor.start_at = 0, False, 0.0
        self.note(What.DEAD, self.supervisor)
        if os.waitstatus_to_exitcode(status):
            self.problem(
                "error",
                f"the supervisor ended with status {status}: "
                f"{self.said(f'{self.supervisor.number:06d}.supervisor')}",
            )

    def count(self) -> None:
        """The counters of channels with settings, before they go."""
        quiet = not any(seat.pid for seat in self.seats if seat.role is not None)
        with sources.open_readonly(self.instance) as source:
            for place, promise in enumerate(self.promises):
                topic = source.directory.find_topic(promise.topic)
                queue = topic and source.directory.find_queue(topic.index, promise.channel)
                if not promise.settings or queue is None:
                    continue
                view = source.queue(queue)
                files = self.data_path.glob(f"{promise.topic}:{promise.channel}.diskqueue*.dat")
                values = {
                    CounterOf.DROPPED: view.read("dropped"),
                    CounterOf.DROPPED_OLDEST: view.read("dropped_oldest"),
                    CounterOf.EXPIRED: view.read("expired"),
                    CounterOf.DEAD_LETTERED: view.read("dead_lettered"),
                    CounterOf.REJECTED: view.read("rejected"),
                    CounterOf.SPILLED: view.read("spilled"),
                    CounterOf.BYTES_ON_DISK: sum(
                        path.stat().st_size for path in files if ".meta." not in path.name
                    ),
                }
                waiting = view.ring_length("ready") + view.ring_length("requeue")
                waiting += view.read("deferred_len")
                for counter, value in values.items():
                    self.journal.write(
                        record(
                            What.COUNTED,
                            flag=counter,
                            count=place,
                            key=value,
                            op=quiet,
                            id=waiting,
                        )
                    )

    def count_repairs(self) -> None:
        """Before the directory goes."""
        self.count()
        with sources.open_readonly(self.instance) as source:
            directory = source.directory
            self.repairs["queues rebuilt after a death under a lock"] += directory.read("rebuilt")
            self.repairs["clients reaped"] += directory.read("reaped")

    def until(self, what: str, condition: Callable[[], bool], fill: bool = True) -> None:
        """Go on without blows until it is so, as long as anybody gets on."""
        began = time.monotonic()
        deadline, next_look, written = began + PATIENCE, began, 0
        while not condition():
            now = time.monotonic()
            if now >= next_look:
                next_look, size = now + 1.0, sum(self.log_sizes())
                if size != written and now < began + MOST_PATIENCE:
                    deadline, written = now + PATIENCE, size
            self.wait()
            if fill or not self.supervisor.pid:
                self.fill_supervisor(now)
            self.look_at_supervisor()
            self.go_on(now)
            if now > deadline:
                self.dump()
                alive = [f"{seat.number:06d}.{seat.name}" for seat in self.seats if seat.pid]
                words = "\n".join(f"{name}: {self.said(name)}" for name in alive)
                self.problem("stuck", f"not so in {now - began:.0f} s: {what}; there are {words}")
                raise Stuck
            time.sleep(TICK)

    def log_sizes(self) -> Iterator[int]:
        """Of those who live."""
        for seat in self.seats:
            if seat.pid and seat.role is not None:
                for path in self.directory.glob(f"{seat.number:06d}.*.log"):
                    yield path.stat().st_size

    def fill_supervisor(self, now: float) -> None:
        if not self.supervisor.pid and now >= self.supervisor.start_at:
            self.start_supervisor()

    def clear(self) -> None:
        """Nothing of it outlives the round but its logs."""
        for seat in self.seats:
            if seat.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seat.pid, signal.SIGKILL)
                if seat.role is not None and seat.role.kind.leads_group:
                    self.orphans += group(seat.pid)
                os.waitpid(seat.pid, 0)
                seat.pid = 0
        self.end_orphans()
        shm.unlink_instance(self.instance)
        shutil.rmtree(self.data_path, ignore_errors=True)


class Stuck(Exception):
    """The round cannot be ended in order."""
