"""Random programs on an original and on shmq, side by side: `tools/dev differ KIND --programs N`.

A kind is a module of this package with

* `draw(random)`: a program, of lists and dicts, which `json` can write;
* `plan(program)`: a list of a label for each observation and what a model expects, or raises
  `Unfit` for a program that means nothing;
* `run(side, program, say)`: runs it in a fresh process, and says each observation as its number and
  what was seen; `begin(side)` and `end(side)` run once in the process from which these are forked;
* `smaller(program)`: programs that are a step smaller;
* `WITNESSES`: programs that show the rows of docs/differences.md.

The two sides must see the same at each number. A difference must be in docs/differences.md. Where
the original has lost its state by a documented difference it says `lost`, and shmq is held to the
model from there on. A difference that is not there when the program runs again, alone, is written
to a file, and the next run begins with it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import pprint
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from differ.differences import Row, rows

TOP = Path(__file__).resolve().parents[2]
FOLDER = TOP / "build" / "differ"
KINDS = ("stdlib", "joblib", "nsqd", "celery", "dramatiq")
SIDES = ("original", "shmq")
#: Seconds without a word after which a program hangs: the first time, when it runs again to make
#: sure, and while a finding is made smaller.
SILENCE, PATIENCE, HASTE = 15.0, 45.0, 2.0
#: Programs tried to make a finding smaller, and seconds.
SHRINKING, SHRINKING_SECONDS = 300, 40.0


class Unfit(Exception):
    """A program that means nothing, such as one that uses a process which has ended."""


class Side:
    """The process that runs programs on one side."""

    def __init__(self, kind: str, side: str, fault: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "differ.zygote", kind, side, fault],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=TOP / "tests",
            env=os.environ | {"PYTHONPATH": str(TOP / "tests")},
        )

    def run(self, program: Any, silence: float) -> dict[int, str]:
        """The observation of each number; -1: how the program ended. silence: seconds after which a
        program that says nothing hangs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"program": program, "silence": silence})
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:  # never by a program: those run in children
            raise RuntimeError(f"the process of this side has ended; its program was {program}")
        found = json.loads(answer)
        seen = dict(found["seen"])
        errors = seen.pop("error", None)
        seen[-1] = "hangs" if found["hangs"] else "ends" if errors is None else errors
        return seen

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Pair:
    """The two sides of a kind."""

    def __init__(self, name: str, fault: str = "") -> None:
        self.kind = importlib.import_module(f"differ.{name}")
        self.rows = rows(name)
        self.used: set[Row] = set()
        self.sides = [Side(name, side, fault if side == "shmq" else "") for side in SIDES]

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        for side in self.sides:
            side.close()

    def differ(self, program: Any, silence: float = SILENCE) -> list[tuple[str, str, str]]:
        """Label, original and shmq of each difference that no row allows."""
        plan = self.kind.plan(program)
        original, mine = (side.run(program, silence) for side in self.sides)
        found = []
        for number, label, expected in [*plan, (-1, "the program", "ends")]:
            theirs, ours = original.get(number, "nothing"), mine.get(number, "nothing")
            if theirs == ours and not (number == -1 and theirs != "ends"):
                continue
            row = next((row for row in self.rows if row.covers(label, theirs, ours)), None)
            if row is not None:
                self.used.add(row)
                if theirs.startswith("lost") and ours != expected:
                    found.append((label, f"{theirs}, expected {expected}", ours))
                continue
            found.append((label, theirs, ours))
            if not self.kind.GOES_ON:
                break
        return found


def shrunk(pair: Pair, program: Any, found: list[tuple[str, str, str]]) -> Any:
    """The smallest program that was seen to differ in the same way, in its first difference."""
    tries, ends = 0, time.monotonic() + SHRINKING_SECONDS
    wanted = _shape(found)
    again = True
    while again and wanted:
        again = False
        for each in pair.kind.smaller(program):
            if tries >= SHRINKING or time.monotonic() > ends:
                return program
            try:
                pair.kind.plan(each)
            except Unfit:
                continue
            tries += 1
            found = pair.differ(each, HASTE)
            if found and _shape(found) == wanted:
                program, again = each, True
                break
    return program


def _shape(found: list[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    return found[0] if found else None


def text_of(name: str, program: Any, found: list[tuple[str, str, str]], seed: str) -> str:
    """A finding as a program that anybody can run."""
    lines = [f"# {label}: original {theirs!r}, shmq {ours!r}" for label, theirs, ours in found[:1]]
    return "\n".join(
        [
            f"# found by tools/dev differ {name}, program {seed}; run it with",
            "#     PYTHONPATH=tests .venv/bin/python FILE",
            *lines,
            "from differ.machine import show",
            "",
            f"show({name!r}, {pprint.pformat(program, width=98, sort_dicts=False)})",
            "",
        ]
    )


def show(name: str, program: Any, fault: str = "") -> None:
    """Run one program on both sides and print what each has seen."""
    with Pair(name, fault) as pair:
        original, mine = (side.run(program, SILENCE) for side in pair.sides)
        for number, label, expected in [*pair.kind.plan(program), (-1, "the program", "ends")]:
            theirs, ours = original.get(number, "nothing"), mine.get(number, "nothing")
            sign = " " if theirs == ours else "!"
            print(f"{sign} {number:3} {label}: {theirs} | {ours} | {expected}")


class Run:
    """Many programs of one kind."""

    def __init__(self, name: str, seed: str, fault: str = "", jobs: int = 1) -> None:
        self.name, self.seed, self.fault, self.jobs = name, seed, fault, jobs
        self.done = 0
        self.findings: list[str] = []
        self.passed_alone = 0
        self._used: set[Row] = set()
        self._lock = threading.Lock()
        self._numbers: Iterator[int] = iter(())
        self._stop = False
        self._retried = FOLDER / f"{name}-again.json"

    def earlier(self) -> list[Any]:
        """Programs that differed in a run before, but not when they ran again."""
        try:
            return list(json.loads(self._retried.read_text()))
        except (OSError, ValueError):
            return []

    def run(self, programs: int, seconds: float | None = None, first: int = 0) -> None:
        """Run so many programs, or as many as there is time for."""
        FOLDER.mkdir(parents=True, exist_ok=True)
        self._numbers = iter(range(first, first + programs))
        self._ends = None if seconds is None else time.monotonic() + seconds
        began = time.monotonic()
        earlier = self.earlier()
        self._retried.unlink(missing_ok=True)
        threads = [
            threading.Thread(target=self._work, args=(job, earlier)) for job in range(self.jobs)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(30 / len(threads))
            took = time.monotonic() - began
            print(f"differ {self.name}: {self.done} programs, {took:.0f} s", flush=True)

    def _work(self, job: int, earlier: list[Any]) -> None:
        with Pair(self.name, self.fault) as pair:
            if job == 0 and not self.fault:
                for program in earlier:
                    self._one(pair, program, "of an earlier run")
            if job == 0:
                for number, program in enumerate(pair.kind.WITNESSES):
                    self._one(pair, program, f"witness {number}")
                self._name_unused(pair)
            while not self._stop:
                with self._lock:
                    number = next(self._numbers, None)
                if number is None or (self._ends and time.monotonic() > self._ends):
                    return
                name = f"{self.seed}:{number}"
                program = drawn(pair.kind, name)
                self._one(pair, program, name)

    def _name_unused(self, pair: Pair) -> None:
        """Name the rows whose difference is no more."""
        if self.fault or pair.used >= set(pair.rows):
            return
        missed = [str(row) for row in pair.rows if row not in pair.used]
        print(f"differ {self.name}: no witness has shown {missed}; again", flush=True)
        with self._lock:
            self.passed_alone += 1
        for program in pair.kind.WITNESSES:
            pair.differ(program, PATIENCE)
        unused = [str(row) for row in pair.rows if row not in pair.used]
        self.findings += [f"no witness shows {row}: does it differ?" for row in unused]

    def _one(self, pair: Pair, program: Any, name: str) -> None:
        try:
            # Workers of others' take longer to start than programs of the standard library take.
            quick = self.fault and not pair.kind.GOES_ON
            found = pair.differ(program, 2 * HASTE if quick else SILENCE)
            self.done += 1
            if not found:
                return
            if self.fault:
                self.findings.append(f"{name}: {found[0]}")
                self._stop = True
                return
            again = pair.differ(program, PATIENCE)
            if not again:
                with self._lock:
                    self.passed_alone += 1
                    kept = [*self.earlier(), program]
                    self._retried.write_text(json.dumps(kept))
                print(f"differ {self.name}: {name} passed when run again: {found[0]}", flush=True)
                return
            small = shrunk(pair, program, again)
            text = text_of(self.name, small, again, name)
        except Exception as exc:
            text = f"{name}: {type(exc).__name__}: {exc}"
            self._stop = True
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        path = FOLDER / f"{self.name}-{digest}.py"
        path.write_text(text)
        print(f"{text}\n# in {path.relative_to(TOP)}", flush=True)
        self.findings.append(text)


def drawn(kind: Any, name: str) -> Any:
    """The program of this seed."""
    return kind.draw(random.Random(name))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("kind", nargs="?", choices=KINDS, default="stdlib")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--seconds", type=float, help="begin no program after so long")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="pairs of processes")
    parser.add_argument("--fault", default="", help="plant one of tests/differ/planted.py")
    parser.add_argument("--show", action="store_true", help="print the first program, and run it")
    given = parser.parse_args()
    if given.show:
        kind = importlib.import_module(f"differ.{given.kind}")
        program = drawn(kind, f"{given.seed}:{given.first}")
        print(text_of(given.kind, program, [], given.seed))
        show(given.kind, program, given.fault)
        return 0
    run = Run(given.kind, given.seed, given.fault, given.jobs)
    run.run(given.programs, given.seconds, given.first)
    print(
        f"differ {given.kind}: {run.done} programs, seed {given.seed}, {len(run.findings)} "
        f"findings, {run.passed_alone} that passed when run again"
    )
    for finding in run.findings:
        print(finding.splitlines()[0])
    return 1 if run.findings else 0
