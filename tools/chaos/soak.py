"""Is a broker that works for an hour, or a day, the same at its end as at its beginning?

Clients of every kind work on one `shmq serve`: shared memory, TCP, HTTP, leases, deferral, bursts
that overflow to disk, topics and channels that come and go. They are killed all the time, gateway
processes too, the supervisor in the first quarter and at the end: the one that comes up last in
that quarter, and the gateway process that has lived longest, are those whose memory is measured, so
that a leak has three quarters of the time to show. Then everything is taken, and what was published
must have come.

    tools/dev soak --hours 1
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click
from chaos.soak import judge
from chaos.soak.actors import PLACES, ROLES, TOPICS, Actor, Emptier, Place, Tally, log_of
from chaos.soak.judge import Finding, Measure, Sample
from chaos.soak.ledger import Ledger
from support import processes

import shmq
from shmq import procfs, shm, sources, stats
from shmq.layout import ClientState

MIB: Final = float(1 << 20)
#: The measures, and how much each may grow. A process's private memory is the strict one: what else
#: it has mapped are segments, whose pages it touches one after the other.
MEASURES: Final = {
    "supervisor: private memory": Measure("MiB", 0.05, 2.0, MIB),
    "supervisor: memory (PSS)": Measure("MiB", 0.10, 6.0, MIB),
    "supervisor: memory (RSS)": Measure("MiB", 0.15, 24.0, MIB),
    "supervisor: descriptors": Measure("", 0.10, 3),
    "supervisor: threads": Measure("", 0.10, 1),
    "supervisor: mappings": Measure("", 0.10, 8),
    "gateway: private memory": Measure("MiB", 0.05, 3.0, MIB),
    "gateway: memory (PSS)": Measure("MiB", 0.10, 6.0, MIB),
    "gateway: memory (RSS)": Measure("MiB", 0.15, 24.0, MIB),
    "gateway: descriptors": Measure("", 0.10, 4),
    "gateway: threads": Measure("", 0.10, 3),
    "gateway: mappings": Measure("", 0.10, 8),
    "segments": Measure("", 0.10, 3),
    "memory of the segments": Measure("MiB", 0.10, 16.0, MIB),
    "other objects in /dev/shm": Measure("", 0.0, 0.5),
    "topics": Measure("", 0.10, 3),
    "attached clients": Measure("", 0.10, 2),
    "files of the data path": Measure("", 0.10, 8),
    "bytes of the data path": Measure("MiB", 0.10, 16.0, MIB),
}

OPTIONS: Final = {
    "mem-queue-size": 2000,
    "max-bytes-per-file": 1 << 20,
    "arena-size": 16 << 20,
    "gateway-workers": 2,
}
EARLY: Final = 0.25  # of the time: the supervisor is killed
SETTLE: Final = 0.10  # of the time: what comes up after that has it to get warm
STUCK: Final = 180.0  # seconds in which every client must have done something
PATIENCE: Final = 180.0  # seconds for each step of the end
TICK: Final = 0.05
PR_SET_PDEATHSIG: Final = 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """In a child: the kernel sends this signal when the soak is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@dataclass
class Seat:
    """A client's place; a dead one is followed by another."""

    kind: type[Actor]
    make: Callable[[int], Actor]
    pid: int = 0
    number: int = 0
    killed: bool = False
    start_at: float = 0.0
    moved_at: float = 0.0


@dataclass
class Pace:
    """Mean seconds between two deaths, and seconds between two samples, for a length."""

    client: float
    gateway: float
    supervisor: float
    sample: float

    @classmethod
    def of(cls, seconds: float) -> Pace:
        """A short soak has its share of everything."""
        return cls(
            client=min(5.0, max(0.5, seconds / 30)),
            gateway=min(60.0, max(3.0, seconds / 8)),
            supervisor=min(90.0, max(2.0, seconds / 12)),
            sample=min(5.0, max(0.2, seconds / 300)),
        )


class Stop(Exception):
    """It cannot go on: why is among the problems."""


class Soak:
    """One run."""

    def __init__(
        self, seconds: float, rate: float, seed: int, directory: Path, plant: bool
    ) -> None:
        self.seconds, self.seed, self.directory = seconds, seed, directory
        self.choice = random.Random(seed)
        self.pace = Pace.of(seconds)
        self.instance = f"soak-{os.getpid()}"
        self.data_path = directory / "data"
        self.data_path.mkdir(parents=True)
        tcp, http = free_ports(2)
        self.place = Place(self.instance, directory, tcp, http, rate, plant)
        self.ledger = Ledger(TOPICS, PLACES)
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.deaths: Counter[str] = Counter()
        self.ended_actors: list[int] = []
        self.spilled = self.restored = 0
        self.numbers = 0
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.serving = False
        self.spared = 0  # the gateway process that is measured
        self.dying: deque[int] = deque(maxlen=20)  # gateway processes that were killed
        self.seats = [Seat(kind, self._maker(kind)) for kind in ROLES]
        self.began = time.monotonic()

    def _maker(self, kind: type[Actor]) -> Callable[[int], Actor]:
        return lambda number: kind(self.place, number, self.seed + number)

    # ---- processes ----

    def start_supervisor(self) -> None:
        options = {
            **OPTIONS,
            "tcp-address": f"127.0.0.1:{self.place.tcp}",
            "http-address": f"127.0.0.1:{self.place.http}",
            "instance": self.instance,
            "data-path": self.data_path,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        with open(self.directory / "supervisor.err", "ab") as said:
            self.supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "shmq", "serve", *words],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )
        self.serving, self.spared = False, 0

    def look_at_supervisor(self) -> None:
        assert self.supervisor is not None
        status = self.supervisor.poll()
        if status is not None:
            self.problem(f"the supervisor ended by itself, status {status}: {self.last_words()}")
            self.start_supervisor()
        elif not self.serving:
            self.serving = processes.answers(self.instance, self.supervisor.pid)

    def last_words(self, name: str = "supervisor") -> str:
        """The end of what it wrote."""
        path = self.directory / f"{name}.err"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""

    def kill_supervisor(self) -> None:
        assert self.supervisor is not None
        self.supervisor.kill()
        self.supervisor.wait()
        self.deaths["supervisor"] += 1
        self.start_supervisor()

    def gateways(self) -> list[int]:
        """The gateway processes, the oldest first."""
        assert self.supervisor is not None
        found = []
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.supervisor.pid}/task").glob("*/children"):
                found += [int(word) for word in task.read_text().split()]
        living = (pid for pid in found if pid not in self.dying)
        return sorted(living, key=lambda pid: (procfs.start_time(pid) or 0, pid))

    def kill_gateway(self, early: bool) -> None:
        living = [pid for pid in self.gateways() if early or pid != self.spared]
        if living:
            pid = self.choice.choice(living)
            self.dying.append(pid)
            if pid == self.spared:
                self.spared = 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.deaths["gateway"] += 1

    def start(self, seat: Seat) -> None:
        self.numbers += 1
        number = seat.number = self.numbers
        parent, said = os.getpid(), self.directory / f"{number:06d}.{seat.kind.role}.err"
        log_of(self.directory, number, seat.kind.role).touch()
        seat.killed, seat.moved_at = False, time.monotonic()
        seat.pid = os.fork()
        if seat.pid:
            return
        status = 1
        try:
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
            status = seat.make(number).run()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def wait(self, ending: bool = False) -> None:
        """Reap the clients that have ended, and start others in their place."""
        now = time.monotonic()
        for seat in self.seats:
            if seat.pid:
                pid, status = os.waitpid(seat.pid, os.WNOHANG)
                if pid:
                    self.ended(seat, os.waitstatus_to_exitcode(status), ending)
            elif not ending and now >= seat.start_at:
                self.start(seat)

    def ended(self, seat: Seat, status: int, ending: bool) -> None:
        name = f"{seat.number:06d}.{seat.kind.role}"
        if not (seat.killed and status == -signal.SIGKILL) and (status or not ending):
            self.problem(f"{name} ended by itself, status {status}: {self.last_words(name)}")
        else:
            (self.directory / f"{name}.err").unlink(missing_ok=True)
        self.ledger.close(log_of(self.directory, seat.number, seat.kind.role))
        self.ended_actors.append(seat.number)
        seat.pid, seat.start_at = 0, time.monotonic() + self.choice.choice([0.0, 0.2, 1.0])

    def kill_client(self) -> None:
        living = [seat for seat in self.seats if seat.pid and not seat.killed]
        if living:
            seat = self.choice.choice(living)
            seat.killed = True
            os.kill(seat.pid, signal.SIGKILL)
            self.deaths[seat.kind.role] += 1

    # ---- looking ----

    def read_logs(self) -> None:
        now = time.monotonic()
        for seat in self.seats:
            if seat.pid and self.ledger.read(log_of(self.directory, seat.number, seat.kind.role)):
                seat.moved_at = now
            elif seat.pid and now - seat.moved_at > STUCK:
                self.problem(f"{seat.kind.role} (pid {seat.pid}) did nothing for {STUCK:g} s")
                raise Stop
        # one that ended long ago: its messages have most likely come
        numbers, self.ended_actors = self.ended_actors[:-20], self.ended_actors[-20:]
        for number in numbers:
            self.ledger.forget(range(number << 10, (number + 1) << 10))

    def sample(self) -> None:
        """One look at everything; nothing is known while there is no supervisor."""
        if not self.serving or self.supervisor is None:
            return
        values: dict[str, float] = {}
        lives: dict[str, int] = {}
        gateways = self.gateways()
        if self.spared not in gateways:
            if self.spared:
                self.problem(f"gateway process {self.spared} ended by itself: {self.last_words()}")
            self.spared = gateways[0] if gateways else 0
        for name, pid in (("supervisor", self.supervisor.pid), ("gateway", self.spared)):
            measured = process(pid) if pid else {}
            values |= {f"{name}: {what}": value for what, value in measured.items()}
            lives |= {f"{name}: {what}": pid for what in measured}
        values |= self.objects() | self.files()
        with contextlib.suppress(shmq.ShmqError, OSError, ValueError):
            values |= self.inside()
        self.samples.append(Sample(time.monotonic() - self.began, values, lives))

    def objects(self) -> dict[str, float]:
        """Of the instance in /dev/shm."""
        count, blocks, others = 0, 0, 0
        for entry in os.scandir("/dev/shm"):
            if self.instance not in entry.name:
                continue
            if re.fullmatch(re.escape(f"shmq.{self.instance}") + r"(\.[0-9]+)?", entry.name):
                with contextlib.suppress(FileNotFoundError):
                    blocks += entry.stat().st_blocks * 512
                    count += 1
            else:
                others += 1
        return {
            "segments": count,
            "memory of the segments": blocks,
            "other objects in /dev/shm": others,
        }

    def files(self) -> dict[str, float]:
        count, size = 0, 0
        for entry in os.scandir(self.data_path):
            with contextlib.suppress(FileNotFoundError):
                size += entry.stat().st_size
                count += 1
        return {"files of the data path": count, "bytes of the data path": size}

    def inside(self) -> dict[str, float]:
        with sources.open_readonly(self.instance) as source:
            directory = source.directory
            clients = int((directory.clients["state"] == ClientState.LIVE).sum())
            found = {"attached clients": float(clients)}
            found["topics"] = float(len(list(directory.live_topics())))
            burst = next(t.index for t in directory.live_topics() if t.name == "burst")
            for entry in directory.live_queues():
                if entry.topic == burst and entry.channel == "c":
                    seen = stats.read_queue("c", source.queue(entry))
                    self.spilled = max(self.spilled, seen.spilled)
                    self.restored = max(self.restored, seen.restored)
        return found

    def problem(self, text: str) -> None:
        self.problems.append(f"at {time.monotonic() - self.began:.0f} s: {text}")

    # ---- the run ----

    def run(self, show: Callable[[str], None]) -> None:
        """All of it. KeyboardInterrupt ends it in order."""
        try:
            self.begin()
            self.work(show)
            self.end(show)
        except Stop:
            pass
        finally:
            self.clear()

    def begin(self) -> None:
        self.start_supervisor()
        self.until("a supervisor answers", lambda: self.serving)
        with shmq.attach(self.instance, timeout=10) as broker:
            for place in PLACES:
                broker.create_channel(*place)
        self.began = time.monotonic()

    def work(self, show: Callable[[str], None]) -> None:
        chance, pace = self.choice.expovariate, self.pace
        now = self.began
        early, end = now + EARLY * self.seconds, now + self.seconds
        due = {
            "client": now + 1,
            "gateway": now + 2,
            "supervisor": now + pace.supervisor,
            "sample": now,
            "logs": now,
            "show": now,
        }
        while (now := time.monotonic()) < end:
            self.wait()
            self.look_at_supervisor()
            if now >= due["client"]:
                due["client"] = now + chance(1 / pace.client)
                self.kill_client()
            if now >= due["gateway"]:
                due["gateway"] = now + chance(1 / pace.gateway)
                self.kill_gateway(now < early)
            if due["supervisor"] <= now < early:
                due["supervisor"] = now + max(chance(1 / pace.supervisor), 1.0)
                self.kill_supervisor()
            if now >= due["sample"]:
                due["sample"] = now + pace.sample
                self.sample()
            if now >= due["logs"]:
                due["logs"] = now + 0.5
                self.read_logs()
            if now >= due["show"]:
                due["show"] = now + min(30.0, max(2.0, self.seconds / 60))
                show(self.progress())
            time.sleep(TICK)

    def progress(self) -> str:
        last = self.samples[-1].values if self.samples else {}
        memory = last.get("supervisor: memory (PSS)", 0) / MIB
        gateway = last.get("gateway: memory (PSS)", 0) / MIB
        shared = last.get("memory of the segments", 0) / MIB
        return (
            f"soak: {time.monotonic() - self.began:5.0f} of {self.seconds:.0f} s, "
            f"{self.ledger.published:,} published, {self.ledger.came:,} came, "
            f"{self.deaths.total():,} deaths, supervisor {memory:.0f} MiB, gateway {gateway:.0f} "
            f"MiB, {last.get('segments', 0):.0f} segments of {shared:.0f} MiB, "
            f"{len(self.problems)} problems"
        )

    def end(self, show: Callable[[str], None]) -> None:
        """Everybody goes home, the supervisor dies once more, then all that is left is taken."""
        show("soak: everybody goes home, then all that is left is taken")
        for seat in self.seats:
            if seat.pid and not seat.killed:
                os.kill(seat.pid, signal.SIGTERM)
        self.until("every client ends", lambda: not any(seat.pid for seat in self.seats), True)
        self.kill_supervisor()
        self.until("a supervisor answers", lambda: self.serving)
        self.seats = [Seat(Emptier, self._emptier(at)) for at in range(len(PLACES))]
        for seat in self.seats:
            self.start(seat)
        self.until("all is taken", lambda: not any(seat.pid for seat in self.seats), True)
        self.ledger.forget(
            publisher
            for number in self.ended_actors
            for publisher in range(number << 10, (number + 1) << 10)
        )
        for where, publisher, count in self.ledger.missing():
            self.problem(f"LOST in {where}: {count} messages of publisher {publisher}")
        for name, count in (("spilled", self.spilled), ("restored", self.restored)):
            if not count:
                self.problem(f"nothing was {name}: this soak says nothing about the disk")
        assert self.supervisor is not None
        self.supervisor.terminate()
        status = self.supervisor.wait(PATIENCE)
        self.supervisor = None
        if status:
            self.problem(f"the supervisor ended with status {status}: {self.last_words()}")
        if left := shm.list_objects(self.instance):
            self.problem(f"left in /dev/shm: {', '.join(item.name for item in left)}")

    def _emptier(self, at: int) -> Callable[[int], Actor]:
        return lambda number: Emptier(self.place, number, self.seed, at)

    def until(self, what: str, condition: Callable[[], bool], ending: bool = False) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self.look_at_supervisor()
            if ending:
                self.wait(True)
                self.read_logs()
            if time.monotonic() > deadline:
                self.problem(f"not so in {PATIENCE:g} s: {what}: {self.last_words()}")
                raise Stop
            time.sleep(TICK)

    def clear(self) -> None:
        """Nothing outlives it but the directory."""
        for seat in self.seats:
            if seat.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(seat.pid, signal.SIGKILL)
                os.waitpid(seat.pid, 0)
                seat.pid = 0
        if self.supervisor is not None:
            self.supervisor.terminate()
            try:
                self.supervisor.wait(30)
            except subprocess.TimeoutExpired:
                self.problem("the supervisor did not end within 30 s of SIGTERM")
                self.supervisor.kill()
                self.supervisor.wait()
        shm.unlink_instance(self.instance)
        shutil.rmtree(self.data_path, ignore_errors=True)

    # ---- what came of it ----

    def judged(self) -> list[Sample]:
        """The samples since the last supervisor and gateway got warm."""
        since = (EARLY + SETTLE) * self.seconds
        return [sample for sample in self.samples if sample.time >= since]


@dataclass
class Result:
    """For the table and for JSON."""

    seconds: float
    seed: int
    interrupted: bool
    findings: list[Finding]
    problems: list[str]
    published: int
    came: int
    again: int
    deaths: dict[str, int]
    counts: dict[str, int]
    samples: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, soak: Soak, took: float, interrupted: bool) -> Result:
        """Of a soak that has ended."""
        counts = {tally.name.lower(): soak.ledger.counts[tally] for tally in Tally}
        counts |= {"spilled": soak.spilled, "restored": soak.restored}
        return cls(
            took,
            soak.seed,
            interrupted,
            judge.judge(soak.judged(), MEASURES),
            soak.problems,
            soak.ledger.published,
            soak.ledger.came,
            soak.ledger.again,
            dict(soak.deaths),
            counts,
            [{"time": s.time, **s.values} for s in soak.samples],
        )

    @property
    def good(self) -> bool:
        return not self.problems and all(finding.flat for finding in self.findings)

    def show(self) -> str:
        deaths = ", ".join(f"{name} {count}" for name, count in sorted(self.deaths.items()))
        counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        verdict = "flat, and nothing is lost" if self.good else "NOT as it should be"
        return "\n".join(
            [
                judge.table(self.findings),
                f"  messages: {self.published:,} publishes owed, {self.came:,} came, "
                f"{self.again:,} of them again",
                f"  deaths: {deaths}",
                f"  counts: {counts}",
                *(f"  PROBLEM {problem}" for problem in self.problems),
                f"soak: {'interrupted; ' if self.interrupted else ''}{verdict}",
            ]
        )

    def as_json(self) -> dict[str, Any]:
        findings = [
            {**asdict(each), "growth": each.growth, "flat": each.flat} for each in self.findings
        ]
        return {"v": 1, **asdict(self), "findings": findings, "good": self.good}


def process(pid: int) -> dict[str, float]:
    """The resources of one process; {} if it is gone."""
    base = Path(f"/proc/{pid}")
    try:
        rollup = dict(re.findall(r"^(\w+): +(\d+) kB", (base / "smaps_rollup").read_text(), re.M))
        threads = re.search(r"^Threads:\s+(\d+)", (base / "status").read_text(), re.M)
        assert threads is not None
        return {
            "private memory": float(rollup["Pss_Anon"]) * 1024,
            "memory (PSS)": float(rollup["Pss"]) * 1024,
            "memory (RSS)": float(rollup["Rss"]) * 1024,
            "descriptors": len(os.listdir(base / "fd")),
            "threads": int(threads[1]),
            "mappings": (base / "maps").read_text().count("\n"),
        }
    except (OSError, KeyError):
        return {}


def free_ports(count: int) -> list[int]:
    """Below those that connections are given for their own ends: the next supervisor must get it
    again."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(max(given - 20_000, 1024), given)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


def on_sigterm(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--hours",
    type=click.FloatRange(min=0.002),
    default=1.0,
    show_default=True,
    help="How long the clients work.",
)
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=100.0,
    show_default=True,
    help="Messages a second that each publisher aims at.",
)
@click.option("--seed", type=int, help="Of what is killed when.  [random]")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where data and logs are meanwhile.  [the temporary one]",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result with all samples to this file.",
)
@click.option(
    "--plant", is_flag=True, help="Leave topics behind on purpose, to see that it is found."
)
def main(
    hours: float,
    rate: float,
    seed: int | None,
    directory: Path | None,
    json_file: Path | None,
    plant: bool,
) -> None:
    """Mixed traffic with churn and deaths for hours: do memory, descriptors, threads, segments and
    files stay what they are, and is nothing lost? Medians of the first and the last third of what
    follows a warm-up (the first 35 % of the time) are compared. Exit status 1 if not; 130 after
    Ctrl-C."""
    signal.signal(signal.SIGTERM, on_sigterm)
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    base = Path(tempfile.mkdtemp(prefix="shmq-soak-", dir=directory))
    soak = Soak(hours * 3600, rate, seed, base, plant)
    click.echo(f"soak: seed {seed}, instance {soak.instance}, files in {base}", err=True)
    interrupted = False
    try:
        soak.run(lambda text: click.echo(text, err=True))
    except KeyboardInterrupt:
        interrupted = True
    result = Result.of(soak, time.monotonic() - soak.began, interrupted)
    click.echo(result.show())
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_json()))
    if not result.problems:
        shutil.rmtree(base, ignore_errors=True)
    sys.exit(130 if interrupted else not result.good)


if __name__ == "__main__":
    main()
