"""One stream from three instances, over TCP, while everything about it is killed.

Numbers are published to three instances. Each is served by processes of its own in a network
namespace of its own. One query, on a Spark standalone cluster of three workers, writes them to
parquet files, or to a topic of the three instances. It has their addresses or asks a real
nsqlookupd for them, and it uses TLS and AUTH or neither: each round draws this. Nemeses come at
random (`fleet_nemeses.py`). At the end `chaos.fleet.verdict` compares the rows with what was
published.
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
from typing import Any

import click
import fleet_mutants
from chaos.fleet.verdict import Files, Story, judge
from fleet_driver import FleetDriver, output
from fleet_instances import Fleet, Round, Topics
from fleet_nemeses import PATIENCE, SHORT_TTL, Nemeses
from spark_kills import AHEAD, BATCH, DRIVERS, LULL, PAUSE, PER_TRIGGER, Violation
from support import network
from support.external_programs import found
from support.spark_cluster import SparkCluster
from support.spark_home import spark_home

WORKERS = 3
JUDGE_EVERY = 10.0  # seconds


class Storm:
    """The instances, what is published to them and what came."""

    def __init__(
        self, fleet: Fleet, story: Story, driver: FleetDriver, came: Files | Topics
    ) -> None:
        """came: where the query writes."""
        self.fleet, self.story, self.driver = fleet.instances, story, driver
        self._came = came

    @property
    def published(self) -> int:
        """How many numbers were published."""
        return len(self.story.published)

    @property
    def came(self) -> int:
        """How many rows have come."""
        return self._came.read()

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
        self._came.read()
        problems = judge(self.story, self._came.rows, self.driver.named(), ended)
        if problems:
            raise Violation(f"{len(problems)} problems: " + "\n".join(problems[:20]))


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


def _judge_rest(fleet: Fleet) -> None:
    """No commit has begun and not ended."""
    for one in fleet.instances:
        if begun := [name for name in one.staged() if "manifest" in name]:
            raise Violation(f"{one.address} has commits that have not ended: {begun}")


def storm(kills: int, choice: random.Random, kinds: Sequence[str], round_: Round) -> None:
    """All of it. Raises Violation."""
    scratch = Path(tempfile.mkdtemp(prefix="shmq-fleet-"))
    done: Counter[str] = Counter()
    good, story, began = False, Story(), time.monotonic()
    try:
        with contextlib.ExitStack() as stack:

            def kept(thing: Any) -> Any:
                stack.callback(thing.close)
                return thing

            fleet = kept(Fleet.begin(round_, f"fleet-{os.getpid()}", scratch, story.published))
            cluster = kept(SparkCluster(spark_home(scratch / "home"), scratch, WORKERS, {}))
            driver = kept(FleetDriver(fleet.reading, fleet.writing, cluster.master, scratch))
            came = Topics(fleet.instances) if round_.writes else Files(output(scratch))
            storm = Storm(fleet, story, driver, came)
            stack.enter_context(_told(storm))
            storm.wait(lambda: storm.came > 0, "the first have come")
            turns = Nemeses(storm, fleet, cluster, choice, kinds).turns()
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
            _judge_rest(fleet)
        good = True
        lost = sum(len(loss.waiting) for loss in story.losses)
        errors = Counter(name for name, _ in driver.named())
        click.secho(
            f"{storm.published} messages {round_}, {done.total()} nemeses "
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


def _drawn(choice: random.Random, writes: bool | None, **access: bool | None) -> Round:
    """A round with these properties; those that are None are drawn."""
    drawn = {name: choice.random() < 0.5 for name in ("writes", "tls", "lookupd")}
    for name, program in (("tls", "openssl"), ("lookupd", "nsqlookupd")):
        drawn[name] = drawn[name] and found(program) is not None
    given = {"writes": writes, **access}
    return Round(**drawn | {name: each for name, each in given.items() if each is not None})


@click.command()
@click.option("--kills", default=50, show_default=True, help="How many nemeses.")
@click.option("--seed", default=None, type=int, help="Of the choices; else a random one.")
@click.option("--kinds", default="", help="Which nemeses, with commas between; else all.")
@click.option("--write/--no-write", "writes", default=None, help="Write to topics, not to files.")
@click.option("--tls/--no-tls", default=None, help="Reach the instances with TLS and AUTH.")
@click.option("--lookupd/--no-lookupd", default=None, help="Find them by a real nsqlookupd.")
@click.option("--mutants", is_flag=True, help="Find the faults in tests/chaos/fleet/mutants.")
def main(
    kills: int, seed: int | None, kinds: str, writes: bool | None, mutants: bool, **access: Any
) -> None:
    """Kill what Spark and three instances consist of while a stream reads these. Properties of the
    round that are not given are drawn."""
    if mutants:
        sys.exit(bool(fleet_mutants.find_all(["--kills", str(kills)])))
    seed = random.randrange(1 << 32) if seed is None else seed
    if (reason := network.why_not()) is not None:
        click.secho(f"no storm: {reason}", fg="red", err=True)
        sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # it clears away what it has started
    choice = random.Random(seed)
    round_ = _drawn(choice, writes, **access)
    click.echo(f"seed {seed}: {round_}")
    try:
        storm(kills, choice, kinds.split(",") if kinds else (), round_)
    except (Violation, AssertionError) as exc:
        click.secho(str(exc), fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
