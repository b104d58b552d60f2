"""Runs the fuzzers one after the other: `tools/dev fuzz [TARGET...] [--runs N] [--seconds S]`.

use, open    shared memory: a live queue that is overwritten, segments as they are opened
store        a results store that is overwritten
core-record  disk records, in C
core-properties  blocks of properties and their envelopes, in C
record, meta, chunk, metadata, reserve   the same and the other files' readers, in Python
settings, results   the settings in shmq.dat, the file of a results store
properties   blocks of properties and their envelopes, as Python programs read them
session      nsqd's TCP protocol, whole and in pieces
access, requests   commands of TCP, requests of HTTP, by users whose access rules are drawn: nothing
             is done or told that the rules do not allow
wire         those parts of it that the core reads, in C

New inputs that they find are kept in build/fuzz/corpus. Exit status 1 if anything is found; the
input that shows it is named."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shmq import shm

TOP = Path(__file__).resolve().parents[2]
BUILD = TOP / "build" / "fuzz"
CORE = {
    "use": "use",
    "open": "open",
    "store": "store",
    "core-record": "record",
    "core-properties": "properties",
    "wire": "wire",
}
READERS = (
    "record",
    "meta",
    "chunk",
    "metadata",
    "reserve",
    "settings",
    "results",
    "properties",
    "session",
    "access",
    "requests",
)
SOME = 4000  # runs where no number is given: a moment each
LONGEST = {
    "use": 125,
    "store": 130,
    "settings": 600,
    "session": 200,
}  # bytes: all that counts of a program; a few commands


def command(target: str, mutant: bool) -> list[str]:
    """The program that fuzzes a target."""
    if target in CORE:
        return [str(BUILD / f"fuzz_{CORE[target]}{'_mutant' if mutant else ''}")]
    options = ["--mutant"] if mutant else []
    return [sys.executable, str(Path(__file__).parent / "readers.py"), target, *options]


def fuzz(target: str, runs: int, seconds: int, mutant: bool) -> tuple[bool, int]:
    """Whether it found something, and how many inputs it tried."""
    kept = BUILD / "corpus" / (target + ("-mutant" if mutant else ""))
    kept.mkdir(parents=True, exist_ok=True)
    corpus = Path(__file__).parent / "corpus" / CORE.get(target, target)
    words = [
        *command(target, mutant),
        str(kept),
        str(corpus),
        f"-runs={runs}",
        f"-max_len={LONGEST.get(target, 400)}",
        "-timeout=30",
        f"-artifact_prefix={BUILD}/{target}-",
        "-print_final_stats=1",
        "-entropic=0",  # to weigh inputs by how rare they are takes longer than to run them
    ]
    words += [
        f"-dict={path}" for path in [Path(__file__).parent / f"{target}.dict"] if path.exists()
    ]
    if seconds:
        words.append(f"-max_total_time={seconds}")
    instance = f"fuzz-{os.getpid()}"
    # A fuzzer ends without cleaning up. fsync is quick there.
    with tempfile.TemporaryDirectory(prefix="shmq-fuzz-", dir="/dev/shm") as directory:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": str(TOP / "tests"),
                "TMPDIR": directory,
                "FUZZ_INSTANCE": instance,
            },
        )
    shm.unlink_instance(instance)
    said = done.stderr + done.stdout
    count = re.search(r"number_of_executed_units: (\d+)|Done (\d+) runs", said)
    if done.returncode and not mutant:
        print(said[-6000:])
    return done.returncode != 0, int(next(filter(None, count.groups()))) if count else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/dev fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--runs", type=int, default=SOME, help=f"of each (default {SOME})")
    parser.add_argument("--seconds", type=int, default=0, help="at most, of each")
    parser.add_argument(
        "--mutants", action="store_true", help="fuzz readers with a seeded fault: it must be found"
    )
    arguments = parser.parse_args()
    known = [*CORE, *READERS]
    wrong = [name for name in arguments.targets if name not in known]
    if wrong:
        parser.error(f"no target {wrong[0]!r}: there are {', '.join(known)}")
    bad = 0
    for target in arguments.targets or known:
        began = time.monotonic()
        found, count = fuzz(target, arguments.runs, arguments.seconds, arguments.mutants)
        seconds = time.monotonic() - began
        right = found == arguments.mutants and count > 0
        bad += not right
        words = "found" if found else "nothing found"
        print(f"{target:12} {count:>10} inputs {seconds:6.1f} s  {words}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
