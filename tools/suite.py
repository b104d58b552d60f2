"""Runs the parts of a tier of the tests and prints a line for each. `tools/dev check`, `tools/dev
test` and `tools/dev test --all` call it after they have installed what the parts need.

Three parts run side by side: two that mostly wait (tests with processes), and one that computes
(compilers, the C tests, exhaustive searches) in the time of the processors that they leave. When
one of the two has no part left, a second one that computes takes its place. Some run alone. Each
part is a few commands that anybody can run by hand. A part that fails prints them after its log;
the other parts still run. The line of a part has its seconds, and in brackets the seconds of
processors that its processes took.

The few tests of a part that failed run again at the end, with nothing beside them, as CPython's
regrtest does: once in a part that uses programs of others, which have limits of seconds in them,
and five times in the other parts that pytest runs. Those that always pass then are listed and do
not fail the suite, but build/suspects.txt keeps their names: the next run in this tree begins with
them, and there a failure fails the suite. A name leaves the file when a run of the suite met no
failure of it. In the parts that are commands of tools/dev a failure is a failure.
tests/README.md has a table of the parts and of what each tier leaves out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
LOGS = TOP / "build" / "logs"
#: The tests that passed only when they ran again, each a line: the name of its part, a space, its
#: name.
SUSPECTS = TOP / "build" / "suspects.txt"
CORES = os.cpu_count() or 1
#: Seconds that a part has to end in order when the suite is interrupted.
PATIENCE = 20.0
#: The last line of a log that matches is shown beside the seconds.
SUMMARIES = (
    re.compile(r"^(\d+ (?:passed|failed|error|skipped|deselected).*?)(?: in [\d.]+s.*)?$"),
    re.compile(r"^(\d+% tests passed, .*)$"),
    re.compile(r"^(all .*)$"),
)
#: The status of a pytest that was given the name of a test that is no longer there.
NO_SUCH_TEST = 4
#: A line of pytest's short summary.
FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", re.MULTILINE)
#: With more failed tests than this in a part, none of them runs again: it is not the machine.
AGAIN_MOST = 3
#: Where programs of others have limits of seconds, a failed test must pass once.
ONCE = 1
#: Elsewhere it may have met an order of events that is rare, so one more run would prove little.
OFTEN = 5


@dataclass(frozen=True)
class Part:
    """A line of the suite. lane: `compute`, `wait` or `beside`, the two for parts that mostly wait,
    or `alone`, when nothing runs beside it."""

    name: str
    text: str
    commands: Sequence[Sequence[str]]
    lane: str = "compute"
    again: int = 0
    """How many times its failed tests run again, alone, and must pass."""

    @property
    def gives_way(self) -> bool:
        """Whether it runs only as far as the parts beside it leave room."""
        return self.lane == "compute"


def dev(*words: str) -> list[str]:
    return ["tools/dev", *words]


def pytest(*words: str, workers: int = 2 * CORES, together: bool = True) -> list[str]:
    """Most tests wait for processes, so there are twice as many workers as cores. together: the
    tests of a file stay together, because they share its fixtures; else a worker that has nothing
    left to do takes tests of another."""
    spread = ["-n", str(workers), "--dist", "loadfile" if together else "worksteal"]
    return [sys.executable, "-m", "pytest", "-q", *(spread if workers > 1 else []), *words]


def check() -> list[Part]:
    """Lint and the tests that start no processes, or few."""
    return [
        Part("lint", "lint and types", [dev("lint")], "wait"),
        Part("debug", "C tests", [dev("debug")]),
        unit(deep=False, lane="wait"),
    ]


def unit(deep: bool, lane: str) -> Part:
    words = pytest("tests/unit", "tests/conventions", *depth(deep), workers=CORES)
    return Part("unit", "unit tests and conventions", [words], lane, again=OFTEN)


def depth(deep: bool) -> tuple[str, ...]:
    return ("-m", "not shallow" if deep else "not deep")


def python(
    name: str,
    text: str,
    folders: Sequence[str],
    deep: bool,
    workers: int,
    again: int = OFTEN,
    lane: str = "wait",
    together: bool = True,
) -> Part:
    """A part that is one pytest."""
    command = pytest(*folders, *depth(deep), workers=workers, together=together)
    return Part(name, text, [command], lane, again=again)


def tests(deep: bool, fuzzed: bool) -> list[Part]:
    """The parts of `tools/dev test`, or if `deep` of `tools/dev test --all`; `fuzzed` says that
    libFuzzer is there."""
    many = CORES + 1
    parts = [
        Part("lint", "lint and types", [dev("lint")], "wait"),
        # One at a time: each has a JVM, and Spark's Python workers have ten seconds to start.
        python("spark", "Spark", ["tests/spark"], deep, 1, again=ONCE),
        python(
            "integration",
            "integration",
            ["tests/integration", "tests/arrow", "tests/monitoring"],
            deep,
            many,
            again=ONCE,
        ),
        python("differ", "beside the original", ["tests/differ"], deep, CORES),
        python("limits", "every limit, every way in", ["tests/limits"], deep, CORES),
        python(
            "lifecycle", "every handle, every end", ["tests/lifecycle"], deep, CORES, again=ONCE
        ),
        python("crash", "clients and supervisors killed", ["tests/crash"], deep, many),
        python(
            "nsqd",
            "nsqd's files and protocol, nats-server, Kafka",
            ["tests/nsqd", "tests/forward"],
            deep,
            many,
            again=ONCE,
            lane="beside",
        ),
        python(
            "frameworks",
            "Celery, Django, Dramatiq, Taskiq",
            ["tests/frameworks"],
            deep,
            many,
            again=ONCE,
            lane="beside",
            together=False,
        ),
        python(
            "cpython",
            "CPython's own tests",
            ["tests/cpython"],
            deep,
            many,
            again=ONCE,
            lane="beside",
            together=False,
        ),
        python(
            "page", "the page in a browser", ["tests/page"], deep, CORES, again=ONCE, lane="beside"
        ),
        python("faults", "failing disks", ["tests/fault_injection"], deep, many, lane="beside"),
        Part("asan", "C tests under AddressSanitizer and UBSan", [dev("asan")]),
        Part("kill-native", "the core killed at its killpoints", [dev("killpoints", "--core")]),
        Part(
            "kill",
            "the core killed at instructions, a sample",
            [dev("kill", "--sample", "--share", "2" if deep else "3")],
        ),
        unit(deep, "compute"),
        # They load the machine themselves, and the soak takes samples by the second.
        Part(
            "chaos",
            "storm, soak",
            [pytest("tests/chaos", *depth(deep), workers=1)],
            "alone",
            again=OFTEN,
        ),
    ]
    return parts + (deep_parts(fuzzed) if deep else [])


def deep_parts(fuzzed: bool) -> list[Part]:
    """The parts that only `tools/dev test --all` has; the longest first, so that those side by
    side end at about the same time."""
    parts = [
        Part("packaging", "a wheel", [pytest("tests/packaging", workers=1)], again=ONCE),
        Part(
            "schedule", "the core in every order within small bounds", [dev("schedule", "--some")]
        ),
        Part("tsan", "C tests under ThreadSanitizer", [dev("tsan")]),
        Part(
            "asan-python",
            "Python tests under AddressSanitizer and UBSan",
            [dev("asan-python", "-q", "tests/unit/messages", "tests/unit/test_leases.py")],
        ),
        Part(
            "kill-mutants",
            "the faults of tests/crash/mutants are found",
            [dev("kill", "--mutants"), ["build/kill/test_sight"]],
        ),
    ]
    if fuzzed:
        parts.append(Part("fuzz", "all readers fuzzed for a moment", [dev("fuzz")]))
        mutants = dev("fuzz", "--mutants", "--runs", "200000", "--seconds", "20")
        parts.append(Part("fuzz-mutants", "faults seeded in the readers are found", [mutants]))
    parts.append(Part("scale", "scale", [pytest("tests/scale", workers=1)], "alone", again=OFTEN))
    return parts


# ---- running ----


class Suite:
    """Runs parts, three side by side."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # for printing, and for the two below
        self._running: set[subprocess.Popen[bytes]] = set()
        self._interrupted = False
        self._again: list[tuple[Part, list[str]]] = []
        self.failed: list[str] = []
        self.passed_late: list[str] = []
        """Tests that failed, and passed when they ran again."""
        self._suspects: list[tuple[Part, str]] = []

    def run(self, parts: Sequence[Part]) -> None:
        """Run all of them; KeyboardInterrupt ends those that are running."""
        self._run_suspects(parts)
        computing, waiting, beside, alone = (
            deque(part for part in parts if part.lane == lane)
            for lane in ("compute", "wait", "beside", "alone")
        )
        # not the other way: parts that wait have limits of others in them, and many workers
        lanes = [
            threading.Thread(target=self._run_lane, args=queues)
            for queues in ((computing,), (waiting, computing), (beside, computing))
        ]
        try:
            for thread in lanes:
                thread.start()
            for thread in lanes:
                thread.join()
            self._run_lane(alone)
            for part, tests in self._again:
                self._run_again(part, tests)
            self._keep_suspects(parts)
        except KeyboardInterrupt:
            self._end()
            for thread in lanes:
                thread.join()
            raise

    def _run_lane(self, *queues: deque[Part]) -> None:
        """Run what is in these queues, the first one first; another lane may take from them too."""
        for queue in queues:
            while not self._interrupted:
                try:
                    part = queue.popleft()
                except IndexError:
                    break
                self._run_part(part)

    def _run_part(self, part: Part) -> None:
        began = time.monotonic()
        log = LOGS / f"suite-{part.name}.log"
        with log.open("wb") as file:
            status, worked = 0, 0.0
            for command in part.commands:
                # Tests that wait have limits of others in them: Spark's Python workers must connect
                # within ten seconds. The part that computes gives way to them.
                polite = ["nice", "-n", "10", *command] if part.gives_way else command
                if not status:
                    status, seconds = self._status(polite, file)
                    worked += seconds
        took = time.monotonic() - began
        if self._interrupted:
            return
        text = log.read_text(errors="replace")
        with self._turn:
            if not status:
                print(f"{part.text} ... {took:.0f} s ({worked:.0f} s){summary(text)}", flush=True)
                return
            print(f"{part.text} ... FAILED after {took:.0f} s")
            print(text)
            tests = list(dict.fromkeys(FAILURE.findall(text)))
            if part.again and status == 1 and 0 < len(tests) <= AGAIN_MOST:
                self._again.append((part, tests))
                print(f"{part.text}: {len(tests)} failed, to run again at the end", flush=True)
                return
            self.failed.append(part.name)
            print(f"exit status {status}, log {log.relative_to(TOP)}; again:")
            for command in part.commands:
                print(f"    {' '.join(command)}", flush=True)

    def _run_again(self, part: Part, tests: list[str]) -> None:
        if self._interrupted:
            return
        passed = self._repeat(part, tests)
        with self._turn:
            if passed:
                self.passed_late += tests
                self._suspects += [(part, test) for test in tests]
            words = f"passed {part.again} of {part.again} times" if passed else "FAILED again"
            print(f"{part.text}, run again alone ... {words}: {', '.join(tests)}", flush=True)

    def _repeat(self, part: Part, tests: list[str], gone: int = 0) -> bool:
        """Run tests of a part alone, as often as its failed ones run again; whether all passed, or
        ended with the status `gone`."""
        log = LOGS / f"suite-{part.name}-again.log"
        with log.open("wb") as file:
            passed = all(
                self._status(pytest(*tests, workers=1), file)[0] in (0, gone)
                for _ in range(part.again)
            )
        if not passed:
            self.failed.append(part.name)
            print(log.read_text(errors="replace"))
        return passed

    def _run_suspects(self, parts: Sequence[Part]) -> None:
        """Run the tests that passed only when they ran again in an earlier run of this tree."""
        for part in parts:
            lines = [line.partition(" ") for line in suspect_lines()]
            for test in [test for name, _, test in lines if name == part.name]:
                passed = self._repeat(part, [test], gone=NO_SUCH_TEST)
                if not passed:
                    self._suspects.append((part, test))
                words = "passed" if passed else "FAILED"
                print(f"{part.text}, what failed once before ... {words}: {test}", flush=True)

    def _keep_suspects(self, parts: Sequence[Part]) -> None:
        """Name what passed late for the next run, and what that names for parts not run now."""
        names = {part.name for part in parts}
        kept = [line for line in suspect_lines() if line.partition(" ")[0] not in names]
        kept += [f"{part.name} {test}" for part, test in self._suspects]
        SUSPECTS.write_text("".join(f"{line}\n" for line in kept))

    def _status(self, command: Sequence[str], file: object) -> tuple[int, float]:
        """The exit status of a command, which is a process group of its own, and the seconds of
        processors that it and its children took.

        It stays in the session of the suite: the kernel shares the processors among sessions first
        (sched_autogroup), and niceness counts only within one.
        """
        with self._turn:
            if self._interrupted:
                return 1, 0.0
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,  # type: ignore[call-overload]
                stderr=subprocess.STDOUT,
                cwd=TOP,
                process_group=0,
            )
            self._running.add(process)
        try:
            _, waited, used = os.wait4(process.pid, 0)
        except ChildProcessError:  # _end has waited for it
            return 1, 0.0
        process.returncode = os.waitstatus_to_exitcode(waited)
        with self._turn:
            self._running.discard(process)
        return process.returncode, used.ru_utime + used.ru_stime

    def _end(self) -> None:
        """Let the running commands end in order, then kill them."""
        with self._turn:
            self._interrupted = True
            running = list(self._running)
        for process in running:
            os.killpg(process.pid, signal.SIGINT)
        deadline = time.monotonic() + PATIENCE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def suspect_lines() -> list[str]:
    try:
        return SUSPECTS.read_text().splitlines()
    except FileNotFoundError:
        return []


def summary(text: str) -> str:
    """The end of a log in a few words, with a comma before it."""

    def found() -> Iterator[str]:
        for line in reversed(text.splitlines()[-60:]):
            for pattern in SUMMARIES:
                if match := pattern.match(line):
                    yield match[1]

    return next((f", {words}" for words in found()), "")


def on_sigterm(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("tier", choices=["check", "test", "all"])
    parser.add_argument("--no-fuzz", action="store_true", help="there is no libFuzzer")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, on_sigterm)
    # the seed makes all workers of a pytest collect the same tests
    os.environ["PYTHONHASHSEED"] = "0"
    LOGS.mkdir(parents=True, exist_ok=True)
    deep = arguments.tier == "all"
    parts = check() if arguments.tier == "check" else tests(deep, not arguments.no_fuzz)
    suite, began = Suite(), time.monotonic()
    try:
        suite.run(parts)
    except KeyboardInterrupt:
        print("interrupted")
        return 130
    took = divmod(round(time.monotonic() - began), 60)
    result = f"FAILED: {', '.join(suite.failed)}" if suite.failed else "all passed"
    if suite.passed_late:
        result += f", {len(suite.passed_late)} only when run again"
    print(f"{result} ({took[0]} min {took[1]} s)")
    return 1 if suite.failed else 0


if __name__ == "__main__":
    sys.exit(main())
