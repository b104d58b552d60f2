"""One stream from three instances, over TCP, while everything about it is killed.

Numbers are published to three instances. Each is served by processes of its own in a network
namespace of its own. One query, on a Spark standalone cluster of three workers, writes them to
parquet files. Nemeses come at random: SIGKILL of the driver, its JVM, the process that plans for
it, an executor, an executor's Python, a gateway, a supervisor; an instance that loses its memory; a
network that loses all packets, or those of one direction, or is late with them; a gateway that is
stopped; a driver that is stopped for longer than its leases live; a second driver while the first
is stopped. At the end `chaos.fleet.verdict` compares the files with what was published.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import fleet_mutants
from chaos.fleet.verdict import Files, Loss, Story, judge
from fleet_driver import TTL, FleetDriver, output
from spark_kills import AHEAD, BATCH, DRIVERS, LULL, PAUSE, PER_TRIGGER, Violation
from support import network, processes, recount
from support.fleet import Instance
from support.network import Cable
from support.spark_cluster import SparkCluster
from support.spark_home import spark_home

from shmq.layout import State

INSTANCES = 3
WORKERS = 3
PATIENCE = 900.0  # seconds without progress that are too many
JUDGE_EVERY = 10.0  # seconds
LONGEST_AWAY = 6.0  # seconds that an instance without a supervisor is away
LONGEST_PAUSE = 8.0  # seconds that a gateway or the network stands still: more than hostTimeout
LONGEST_DELAY = 1.0  # seconds that a packet is late
COMMANDS = (b"LEASE t", b"LEASE t", b"LFIN t", b"LHOLD t", b"LLOOK t", b"LREAD t")
SHORT_TTL = 10.0  # seconds that leases live of a driver that is stopped for longer


class Remote(Instance):
    """An instance in a namespace. log: the numbers that were published, by id."""

    def __init__(self, name: str, directory: Path, log: dict[int, int]) -> None:
        self._log, self.cable = log, Cable()
        super().__init__(name, directory, f"{self.cable.address}:4150", self.cable.nsenter)

    def publish_numbers(self, numbers: range) -> None:
        """One message for each."""
        ids = self.broker.producer("t").publish_many([b"%d" % number for number in numbers])
        self._log.update(zip(ids, numbers, strict=True))

    @property
    def held(self) -> int:
        """How many messages wait or are leased."""
        stats = self.broker.channel_stats("t", "c")
        return int(stats.depth + stats.leased)

    def leased(self) -> dict[int, set[int]]:
        """The numbers of each lease."""
        found = self._recount()
        slots = found.slots[found.of[State.LEASED]]
        leases: dict[int, set[int]] = {}
        for lease, number in zip(slots["move"].tolist(), slots["id"].tolist(), strict=True):
            leases.setdefault(lease, set()).add(self._log[number])
        return leases

    def _recount(self) -> recount.Recount:
        return recount.recount(self.name, "t", "c", undecided=True)

    def kill_supervisor(self, seconds: float) -> None:
        """Kill it, and start another after some seconds."""
        self.child.close()
        time.sleep(seconds)
        self.start()

    def lose_memory(self, seconds: float) -> Loss:
        """Kill all processes, remove the memory, and start again after some seconds."""
        gateways = self.gateways()
        self.child.close()
        for pid in gateways:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            processes.wait_ended(pid)
        waiting = {self._log[int(number, 16)] for number in self._recount().waiting}
        loss = Loss(self.address, waiting, self.leased())
        self.broker.close()
        processes.remove_instance(self.name)
        time.sleep(seconds)
        self.begin()
        return loss

    def close(self) -> None:
        super().close()
        processes.remove_instance(self.name)
        self.cable.close()


class Storm:
    """The instances, what is published to them and what came."""

    def __init__(self, fleet: list[Remote], story: Story, driver: FleetDriver, to: Path) -> None:
        self.fleet, self.story, self.driver = fleet, story, driver
        self._files = Files(to)

    @property
    def published(self) -> int:
        """How many numbers were published."""
        return len(self.story.published)

    @property
    def came(self) -> int:
        """How many rows have come."""
        return self._files.read()

    def publish(self) -> None:
        """Some numbers to each instance, unless many have not come yet."""
        if self.held < AHEAD:
            for one in self.fleet:
                one.publish_numbers(range(self.published, self.published + BATCH))

    def wait(
        self,
        condition: Callable[[], bool],
        what: str,
        publish: bool = True,
        risky: bool = False,
    ) -> None:
        """Until it holds, with a driver that lives. risky: leases may end meanwhile. Raises
        Violation also if what has come is wrong already."""
        deadline, drivers = time.monotonic() + PATIENCE, len(self.driver.statuses) + DRIVERS
        look = time.monotonic() + JUDGE_EVERY
        while not condition():
            if time.monotonic() > look:
                self.judge(ended=False)
                look = time.monotonic() + JUDGE_EVERY
            if time.monotonic() > deadline or len(self.driver.statuses) > drivers:
                raise Violation(
                    f"{self.came} of {self.published} have come, {self.held} are held; not so "
                    f"after {PATIENCE:.0f} s or {DRIVERS} drivers: {what}"
                )
            if publish:
                self.publish()
            if risky or self.driver.ttl == SHORT_TTL:
                self.note_risks()
            self.driver.revive()
            time.sleep(PAUSE)

    def more(self, after: str, risky: bool = False) -> None:
        """Until more have come than were on their way."""
        beyond = self.came + PER_TRIGGER
        self.wait(lambda: self.came > beyond, f"more came after {after}", risky=risky)
        self.judge(ended=False)

    def note_risks(self) -> None:
        """Remember what is leased now, because its leases may end."""
        for one in self.fleet:
            self.story.risked.update(*one.leased().values())

    @property
    def held(self) -> int:
        """How many messages wait or are leased."""
        return sum(one.held for one in self.fleet)

    def leased(self) -> bool:
        """Whether there is a lease anywhere."""
        return any(one.broker.channel_stats("t", "c").leases for one in self.fleet)

    def judge(self, ended: bool = True) -> None:
        """Raises Violation. ended: nothing more is to come."""
        self._files.read()
        problems = judge(self.story, self._files.rows, self.driver.named(), ended)
        if problems:
            raise Violation(f"{len(problems)} problems: " + "\n".join(problems[:20]))


class Nemeses:
    """The blows to a storm, each kind once before any comes again."""

    def __init__(
        self, storm: Storm, cluster: SparkCluster, choice: random.Random, kinds: Sequence[str]
    ) -> None:
        """kinds: which; all if there are none."""
        self._storm, self._cluster, self._choice = storm, cluster, choice
        driver = storm.driver
        known: dict[str, Callable[[], bool]] = {
            "driver": lambda: self._killed([driver.process.pid]),
            "JVM": lambda: self._killed([child.pid for child in driver.children()]),
            "planner": lambda: self._found("python_streaming_source_runner"),
            "executor": lambda: self._killed(cluster.executors()),
            "worker": lambda: self._killed(cluster.python_workers()),
            "gateway": lambda: self._killed(self._one.gateways()),
            "supervisor": self._supervisor,
            "memory": self._memory,
            "partition": self._partition,
            "halved": self._halved,
            "answer": self._answer,
            "delay": self._delay,
            "pause": self._pause,
            "stall": self._stall,
            "second": self._second,
        }
        self.kinds = {name: known[name] for name in kinds or known}

    def turns(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        """Each name with what does it; that returns False if there was nobody to do it to."""
        while True:
            names = list(self.kinds)
            self._choice.shuffle(names)
            for name in names:
                yield name, self.kinds[name]

    @property
    def _one(self) -> Remote:
        return self._choice.choice(self._storm.fleet)

    def _killed(self, pids: Sequence[int]) -> bool:
        with contextlib.suppress(ProcessLookupError):
            if pids:
                os.kill(self._choice.choice(pids), signal.SIGKILL)
                return True
        return False

    def _found(self, word: str) -> bool:
        return self._killed([process.pid for process in self._storm.driver.processes(word)])

    def _supervisor(self) -> bool:
        self._one.kill_supervisor(self._choice.uniform(0, LONGEST_AWAY))
        return True

    def _memory(self) -> bool:
        """Readers of an instance in shared memory are on its host, and die with it."""
        driver = self._storm.driver
        if driver.transport == "auto":
            driver.signal_all(signal.SIGKILL)
            for pid in (*self._cluster.executors(), *self._cluster.python_workers()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                processes.wait_ended(pid)
        away = self._choice.uniform(0, LONGEST_AWAY)
        self._storm.story.losses.append(self._one.lose_memory(away))
        return True

    def _for_a_while(self, cable: Cable) -> bool:
        time.sleep(self._choice.uniform(0, LONGEST_PAUSE))
        cable.heal()
        return True

    def _partition(self) -> bool:
        cable = self._one.cable
        cable.there.passes = cable.back.passes = False
        return self._for_a_while(cable)

    def _halved(self) -> bool:
        cable = self._one.cable
        self._choice.choice((cable.there, cable.back)).passes = False
        return self._for_a_while(cable)

    def _answer(self) -> bool:
        """A command is executed and its answer is lost."""
        cable = self._one.cable
        cable.lose_answer(self._choice.choice(COMMANDS))
        cable.halved(LONGEST_PAUSE)
        return self._for_a_while(cable)

    def _delay(self) -> bool:
        cable = self._one.cable
        cable.there.delay, cable.back.delay = (
            self._choice.uniform(0, LONGEST_DELAY) for _ in range(2)
        )
        return self._for_a_while(cable)

    def _pause(self) -> bool:
        pids = self._one.gateways()
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(self._choice.uniform(0, LONGEST_PAUSE))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        return bool(pids)

    def _stall(self) -> bool:
        """A driver whose leases do not live long is stopped until none of them is left."""
        storm, driver = self._storm, self._storm.driver
        driver.order(SHORT_TTL)
        storm.wait(driver.obeys, "leases do not live long")
        storm.more("a query began whose leases do not live long")
        storm.wait(lambda: storm.leased() and driver.process.poll() is None, "it has leases")
        storm.story.stalls += 1
        driver.signal_all(signal.SIGSTOP)
        deadline = time.monotonic() + PATIENCE
        while storm.leased():
            storm.note_risks()
            if time.monotonic() > deadline:
                raise Violation("leases of a driver that is stopped do not end")
            time.sleep(PAUSE)
        driver.signal_all(signal.SIGCONT)
        storm.more("its leases had ended")
        driver.order(TTL)
        storm.wait(driver.obeys, "leases live long again", risky=True)
        storm.more("a query began whose leases live long", risky=True)
        return True

    def _second(self) -> bool:
        """The driver is stopped, another one reads on, and the first finds itself fenced."""
        storm = self._storm
        if not storm.leased() or storm.driver.process.poll() is not None:
            return False
        storm.driver.signal_all(signal.SIGSTOP)
        older = storm.driver.replace()
        storm.more("another driver was started beside one that is stopped")
        storm.driver.resume(older)
        storm.wait(lambda: older.poll() is not None, "a driver ends if there is a newer one")
        return True


@contextlib.contextmanager
def _told(storm: Storm) -> Iterator[None]:
    """After a violation say how everything stands, before it is cleared away."""
    try:
        yield
    except (Violation, AssertionError):
        for one in storm.fleet:
            found = one.broker.channel_stats("t", "c")
            click.echo(
                f"{one.address}: {found.message_count} came, {found.depth} wait, leases "
                f"{found.leases}"
            )
        click.echo(f"exit statuses of the drivers before this one: {storm.driver.statuses}")
        click.echo(storm.driver.standing())
        raise


def storm(kills: int, choice: random.Random, kinds: Sequence[str]) -> None:
    """All of it. Raises Violation."""
    name = f"fleet-{os.getpid()}"
    scratch = Path(tempfile.mkdtemp(prefix="shmq-fleet-"))
    done: Counter[str] = Counter()
    good, story, began = False, Story(), time.monotonic()
    try:
        with contextlib.ExitStack() as stack:

            def kept(thing: object) -> None:
                stack.callback(thing.close)  # type: ignore[attr-defined]

            fleet: list[Remote] = []
            for number in range(INSTANCES):
                fleet.append(Remote(f"{name}-{number}", scratch / str(number), story.published))
                kept(fleet[-1])
            cluster = SparkCluster(spark_home(scratch / "home"), scratch, WORKERS, {})
            kept(cluster)
            driver = FleetDriver([one.address for one in fleet], cluster.master, scratch)
            kept(driver)
            storm = Storm(fleet, story, driver, output(scratch))
            stack.enter_context(_told(storm))
            storm.wait(lambda: storm.came > 0, "the first have come")
            turns = Nemeses(storm, cluster, choice, kinds).turns()
            while done.total() < kills:
                time.sleep(choice.uniform(0, LULL))
                kind, strike = next(turns)
                if not strike():
                    continue  # between two queries
                done[kind] += 1
                storm.more(kind)
                click.echo(
                    f"{time.monotonic() - began:7.1f} s  {done.total()}: {kind}; {storm.came} of "
                    f"{storm.published}"
                )
            storm.wait(lambda: not storm.held, "all have come", publish=False)
            driver.end()
            storm.judge()
        good = True
        lost = sum(len(loss.waiting) for loss in story.losses)
        errors = Counter(name for name, _ in driver.named())
        click.secho(
            f"{storm.published} messages of {INSTANCES} instances, {done.total()} nemeses "
            f"({', '.join(f'{kind} {n}' for kind, n in sorted(done.items()))}), "
            f"{len(driver.statuses) + 1} drivers; {lost} messages waited in memory that was lost; "
            f"queries ended with {dict(errors)}: each of the others came once, in its first "
            "attempt, or the query has said so, and no lease is left",
            fg="green",
        )
    finally:
        if good:
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            click.secho(f"what the drivers said: {scratch}/drivers.log", fg="red", err=True)


@click.command()
@click.option("--kills", default=50, show_default=True, help="How many nemeses.")
@click.option("--seed", default=None, type=int, help="Of the choices; else a random one.")
@click.option("--kinds", default="", help="Which nemeses, with commas between; else all.")
@click.option("--mutants", is_flag=True, help="Find the faults in tests/chaos/fleet/mutants.")
def main(kills: int, seed: int | None, kinds: str, mutants: bool) -> None:
    """Kill what Spark and three instances consist of while a stream reads these."""
    if mutants:
        sys.exit(bool(fleet_mutants.find_all(["--kills", str(kills)])))
    seed = random.randrange(1 << 32) if seed is None else seed
    click.echo(f"seed {seed}")
    if (reason := network.why_not()) is not None:
        click.secho(f"no storm: {reason}", fg="red", err=True)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it clears away what it has started
    try:
        storm(kills, random.Random(seed), kinds.split(",") if kinds else ())
    except (Violation, AssertionError) as exc:
        click.secho(str(exc), fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
