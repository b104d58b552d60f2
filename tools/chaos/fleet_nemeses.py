"""The nemeses of fleet_kills.py, which befall a query and the instances it reads and writes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fleet_driver import TTL
from fleet_instances import OUT, Fleet, Remote
from spark_kills import PAUSE, Violation
from support import processes
from support.network import Cable
from support.spark_cluster import SparkCluster

PATIENCE = 900.0  # seconds without progress that are too many
LONGEST_AWAY = 6.0  # seconds that a server that was killed is away
LONGEST_PAUSE = 8.0  # seconds that a gateway or the network stands still: more than hostTimeout
LONGEST_DELAY = 1.0  # seconds that a packet is late
SILENCE = (16.0, 24.0)  # seconds without an answer, after which a COMMIT has failed
SHORT_TTL = 10.0  # seconds that leases live of a driver that is stopped for longer
READS = (b"LEASE t", b"LEASE t", b"LFIN t", b"LHOLD t", b"LLOOK t", b"LREAD t")
COMMIT = f"COMMIT {OUT}\n".encode()
COMMITTED = b'"published":'  # of its answer
WRITES = (f"STAGE {OUT}\n".encode(), COMMIT)
ENCRYPTED = b"\x17\x03\x03"  # how a record of TLS with data begins

#: Words of the command lines of the driver, its JVM, and the process that commits.
_COMMITTERS = ("fleet_driver.py", "java", "python_streaming_sink_runner")
#: After these a micro-batch that was committed on one instance is not computed again with the same
#: rows for the others.
_NOT_FOR_WRITES = ("memory", "stall")


class Nemeses:
    """The blows to a storm, each kind once before any comes again. storm: a `fleet_kills.Storm`."""

    def __init__(
        self,
        storm: Any,
        fleet: Fleet,
        cluster: SparkCluster,
        choice: random.Random,
        kinds: Sequence[str],
    ) -> None:
        """kinds: which; all that a round can have if there are none. Raises ValueError for one that
        it cannot have."""
        self._storm, self._fleet, self._cluster, self._choice = storm, fleet, cluster, choice
        known = self._known()
        if wrong := [name for name in kinds if name not in known]:
            raise ValueError(
                f"no nemesis of this round: {', '.join(wrong)}; it has {', '.join(known)}"
            )
        self.kinds = {name: known[name] for name in kinds or known}

    def _known(self) -> dict[str, Callable[[], bool]]:
        driver, cluster = self._storm.driver, self._cluster
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
        if self._fleet.lookupd is not None:
            known["lookupd"] = self._lookupd
        if self._fleet.round.writes:
            for name in _NOT_FOR_WRITES:
                del known[name]
            known["committer"] = self._committer
            if not self._fleet.round.tls:
                known["uncommitted"] = self._uncommitted
                known["unanswered"] = self._unanswered
                known["half"] = self._half
        return known

    def turns(self) -> Iterator[tuple[str, Callable[[], bool]]]:
        """Each name with what does it; that returns False if there was nobody to do it to."""
        while True:
            names = list(self.kinds)
            self._choice.shuffle(names)
            for name in names:
                yield name, self.kinds[name]

    @property
    def _one(self) -> Remote:
        return self._choice.choice(self._fleet.instances)

    # ---- processes that die ----

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

    def _lookupd(self) -> bool:
        """It forgets what it knew, and the instances tell the next one."""
        assert self._fleet.lookupd is not None
        self._fleet.lookupd.kill()
        time.sleep(self._choice.uniform(0, LONGEST_AWAY))
        self._fleet.lookupd.start()
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

    # ---- networks ----

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
        cable, round_ = self._one.cable, self._fleet.round
        words = (*READS, *WRITES) if round_.writes else READS
        cable.lose_answer(ENCRYPTED if round_.tls else self._choice.choice(words))
        cable.caught(LONGEST_PAUSE)
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

    # ---- commits ----

    def _uncommitted(self) -> bool:
        """Rows are staged everywhere, one COMMIT does not arrive, and its host counts as away."""
        cable = self._one.cable
        cable.lose_from(COMMIT)
        self._await_commit(cable)
        time.sleep(self._choice.uniform(*SILENCE))
        cable.heal()
        return True

    def _unanswered(self) -> bool:
        """A COMMIT is executed, its answer is lost, and its connection breaks."""
        one = self._one
        one.cable.lose_from(COMMITTED)
        self._await_commit(one.cable)
        one.kill_gateway()
        return self._for_a_while(one.cable)

    def _half(self) -> bool:
        """The driver, its JVM or the process that commits dies when an instance has committed a
        micro-batch and another one has not."""
        later = sorted(self._fleet.instances, key=lambda one: one.address)[1:]
        cable = self._choice.choice(later).cable  # they are committed in this order
        cable.lose_from(COMMIT)
        try:
            self._await_commit(cable)
            return self._found(self._choice.choice(_COMMITTERS))
        finally:
            cable.heal()

    def _await_commit(self, cable: Cable) -> None:
        self._storm.wait(lambda: cable.caught(PAUSE, last=False), "a micro-batch is committed")

    def _committer(self) -> bool:
        return self._found(_COMMITTERS[-1])

    # ---- drivers that stand still ----

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
        """The driver is stopped, another one reads on, and the first finds itself fenced. If a task
        of the first finds its lease ended before that, its next query may fence the other one."""
        storm = self._storm
        if not storm.leased() or storm.driver.process.poll() is not None:
            return False
        storm.story.seconds += 1
        storm.driver.signal_all(signal.SIGSTOP)
        older = storm.driver.replace()
        storm.more("another driver was started beside one that is stopped")
        storm.driver.resume(older)
        storm.wait(lambda: older.poll() is not None, "a driver ends if there is a newer one")
        return True
