"""The storm: producers, consumers, operators, a supervisor and its gateway under load, killed at
random instants.

In rounds, each with an instance, a data path and limits of its own: processes of every kind work
(tests/chaos/storm), random ones get SIGKILL, the supervisor and its workers too, random ones
SIGSTOP for a while. Then everything comes to an end, all that waits is taken, and what is left in
shared memory is recounted. The verdict comes from the logs alone (tests/chaos/storm/checker.py). A
round with a violation keeps its logs; its seed gives the same actors, limits and order of blows
again (not the same instants: those are the kernel's).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click
from chaos.storm.verdict import Verdict
from storm_looks import commit
from storm_plants import PLANTS
from storm_round import Round

KILLS_OF_A_ROUND = 250
KILLS_A_SECOND = 10.0


@dataclass
class Total:
    """Of all rounds."""

    verdict: Verdict = field(default_factory=Verdict)
    killed: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    rounds: int = 0

    def run(self, round_: Round, kills: int, show: Callable[[str], None]) -> None:
        """One more round."""
        before = self.killed.total()

        def progress(done: int) -> None:
            found = len(self.verdict.violations)
            show(f"storm: {before + done:,} of {kills:,} kills, {found} violations")

        verdict = round_.run(progress)
        self.rounds += 1
        self.killed += round_.killed
        self.stopped += round_.stopped
        self.verdict.violations += verdict.violations
        self.verdict.counts.update(verdict.counts)
        self.verdict.delays += verdict.delays
        self.verdict.disturbed += verdict.disturbed
        if verdict.violations:
            click.echo(
                f"storm: VIOLATION in the round with seed {round_.seed}\n"
                f"  its history: {round_.directory}\n"
                "  the verdict again: PYTHONPATH=tests .venv/bin/python -m chaos.storm.checker "
                f"{round_.directory}\n"
                f"  such a round again: tools/dev storm --seed {round_.seed} "
                f"--kills {round_.kills_wanted}",
                err=True,
            )

    def show(self) -> str:
        names = sorted(self.killed | self.stopped, key=lambda name: -self.killed[name])
        lines = [f"  {'':28}{'killed':>8}{'stopped':>9}"]
        lines += [f"  {name:28}{self.killed[name]:>8,}{self.stopped[name]:>9,}" for name in names]
        lines.append(f"  {'all':28}{self.killed.total():>8,}{self.stopped.total():>9,}")
        return "\n".join([*lines, self.verdict.show()])

    def as_json(self) -> dict[str, object]:
        return {
            "v": 1,
            "commit": commit(),
            "rounds": self.rounds,
            "killed": dict(self.killed),
            "stopped": dict(self.stopped),
            "counts": dict(self.verdict.counts),
            "delays": self.verdict.delays,
            "disturbed": self.verdict.disturbed,
            "violations": [[found.rule, found.text] for found in self.verdict.violations],
        }


@contextlib.contextmanager
def line() -> Iterator[Callable[[str], None]]:
    """A line on stderr that is written over, where that is a terminal."""
    tty = sys.stderr.isatty()

    def show(text: str) -> None:
        if tty:
            click.echo(f"\r\x1b[K{text}", nl=False, err=True)

    try:
        yield show
    finally:
        if tty:
            click.echo(err=True)


def on_sigterm(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--kills", default=KILLS_OF_A_ROUND, show_default=True, help="How many in all.")
@click.option("--round-kills", default=KILLS_OF_A_ROUND, show_default=True, help="In each round.")
@click.option("--seed", type=int, help="Of the first round; the next one has one more.  [random]")
@click.option("--pace", default=KILLS_A_SECOND, show_default=True, help="Kills a second.")
@click.option(
    "--long-stop",
    default=10.0,
    show_default=True,
    help="Seconds for which one survivor is stopped in each round; 0: none.",
)
@click.option(
    "--late",
    default=1.0,
    show_default=True,
    help="Seconds after a death from which on a redelivery that others wait for is a violation.",
)
@click.option("--seconds", type=float, help="Begin no further round after so long.")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the logs go.  [a new directory under the temporary one]",
)
@click.option(
    "--spark-jobs",
    is_flag=True,
    help="With a driver of Spark that runs batch jobs; for rounds of 1000 kills or more.",
)
@click.option(
    "--plant",
    type=click.Choice(sorted(PLANTS)),
    help="Plant this fault, which the storm must find: exit status 0 if it did.",
)
@click.option("--keep", is_flag=True, help="Keep the logs of every round.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add the result to this file, one object a line.",
)
def main(
    kills: int,
    round_kills: int,
    seed: int | None,
    pace: float,
    long_stop: float,
    late: float,
    seconds: float | None,
    directory: Path | None,
    spark_jobs: bool,
    plant: str | None,
    keep: bool,
    json_file: Path | None,
) -> None:
    """Kill processes of shmq under load at random instants and prove from their logs that nothing
    that was promised was broken. Exit status 1 if something was."""
    signal.signal(signal.SIGTERM, on_sigterm)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    base = directory or Path(tempfile.mkdtemp(prefix="shmq-storm-"))
    base.mkdir(parents=True, exist_ok=True)
    total, began = Total(), time.monotonic()
    Round.spark_jobs = spark_jobs
    if plant is not None:
        PLANTS[plant][0]()
    try:
        with line() as show:
            while (left := kills - total.killed.total()) > 0:
                if seconds is not None and total.rounds and time.monotonic() - began > seconds:
                    break
                home = base / f"seed-{seed + total.rounds}"
                shutil.rmtree(home, ignore_errors=True)
                home.mkdir()
                round_ = Round(
                    seed + total.rounds, min(left, round_kills), home, pace, long_stop, late
                )
                total.run(round_, kills, show)
                if not keep and not round_.verdict.violations:
                    shutil.rmtree(home)
    except KeyboardInterrupt:
        click.echo("storm: interrupted", err=True)
    if directory is None and not keep and not total.verdict.violations:
        shutil.rmtree(base, ignore_errors=True)
    took = time.monotonic() - began
    click.echo(f"storm: {total.rounds} rounds from seed {seed} in {took:.0f} s, commit {commit()}")
    click.echo(total.show())
    if json_file is not None:
        with json_file.open("a") as file:
            file.write(json.dumps(total.as_json()) + "\n")
    if plant is not None:
        rules = {found.rule for found in total.verdict.violations}
        rule = PLANTS[plant][1]
        click.echo(f"storm: {plant}: {'found' if rule in rules else 'NOT FOUND'} ({rule})")
        sys.exit(rule not in rules)
    sys.exit(1 if total.verdict.violations else 0)


if __name__ == "__main__":
    main()
