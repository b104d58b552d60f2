"""Aeron and Chronicle Queue from Java beside shmq: the ceiling of transports that poll.

Each end is a JVM that runs java/Peers.java, warm before the run begins. Bodies are copied in and
out, nothing is acknowledged, and nothing of a process that died comes back. Their files are in
/dev/shm. The libraries: `tools/peers java`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
from runs import (
    ONE,
    PATIENCE,
    ROUND_TRIPS,
    Contestant,
    Ends,
    Lacking,
    Outcome,
    Plan,
    run_pair,
)

LIBRARIES = Path(__file__).parents[2] / "build" / "peers" / "java"
SOURCE = Path(__file__).with_name("java") / "Peers.java"
#: Packages of Java that both libraries must be let into.
OPENED = (
    "java.base/java.io",
    "java.base/java.lang",
    "java.base/java.lang.reflect",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.zip",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "jdk.compiler/com.sun.tools.javac",
    "jdk.compiler/com.sun.tools.javac.file",
)
QUIETLY = ("-Dchronicle.analytics.disable=true", "-Dorg.slf4j.simpleLogger.defaultLogLevel=off")


@dataclass(frozen=True)
class JavaLink:
    """kind: aeron or chronicle. directory: of the files of one run."""

    kind: str
    classes: Path
    directory: Path = field(
        default_factory=lambda: Path(tempfile.mkdtemp(prefix="shmq-bench-java-", dir="/dev/shm"))
    )

    def play(self, role: str, ends: Ends) -> dict[str, float]:
        """One end. It ends with this process, which its stdin tells."""
        words = [f"--add-opens={package}=ALL-UNNAMED" for package in OPENED]
        words += [*QUIETLY, "-Xmx1g", "-cp", f"{self.classes}:{LIBRARIES}/*", "Peers"]
        words += [self.kind, role, str(self.directory), str(ends.plan.size), str(ends.plan.seconds)]
        process: Any = subprocess.Popen(
            ["java", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for line in process.stdout:
            if line == "ready\n":
                break
        else:
            raise RuntimeError(f"{self.kind} in Java ended with {process.wait()} before it began")
        began = ends.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                report: dict[str, float] = json.loads(line)
                return {"began": began, **report} if role in ("send", "call") else report
        raise RuntimeError(f"{self.kind} in Java ended with {process.wait()}")

    def remove(self) -> None:
        """Wait until both ends are gone, or end them, and remove the files."""
        deadline = time.monotonic() + PATIENCE
        for path in self.directory.glob("pid-*"):
            try:
                process = psutil.Process(int(path.read_text()))
                process.wait(max(0.1, deadline - time.monotonic()))
            except psutil.TimeoutExpired:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        shutil.rmtree(self.directory, ignore_errors=True)


def java_send(link: JavaLink, ends: Ends) -> dict[str, float]:
    return link.play("send", ends)


def java_receive(link: JavaLink, ends: Ends) -> dict[str, float]:
    return link.play("receive", ends)


def java_call(link: JavaLink, ends: Ends) -> dict[str, float]:
    return link.play("call", ends)


def java_answer(link: JavaLink, ends: Ends) -> dict[str, float]:
    return link.play("answer", ends)


class JavaPeer(Contestant):
    lines: ClassVar[tuple[str, ...]] = (ONE, *ROUND_TRIPS)
    note = "from Java; polls; nothing is acknowledged"
    kind: ClassVar[str]
    library: ClassVar[str]

    def __init__(self, scratch: Path) -> None:
        self._classes = scratch / "java"

    def version(self) -> str:
        found = sorted(LIBRARIES.glob(f"{self.library}-*.jar"))
        if not found:
            raise Lacking(f"there is no {self.library}: tools/peers java")
        if not self._classes.exists():
            _compile(self._classes)
        return found[-1].stem.removeprefix(f"{self.library}-")

    def run(self, plan: Plan) -> Outcome:
        link = JavaLink(self.kind, self._classes)
        ends = (java_call, java_answer) if plan.line in ROUND_TRIPS else (java_send, java_receive)
        try:
            return run_pair(*ends, link, plan)
        finally:
            link.remove()


class AeronIpc(JavaPeer):
    name = "Aeron IPC"
    kind, library = "aeron", "aeron-all"


class ChronicleQueue(JavaPeer):
    name = "Chronicle Queue"
    note = "from Java; files in /dev/shm; polls; nothing is acknowledged"
    kind, library = "chronicle", "chronicle-queue"


def _compile(classes: Path) -> None:
    """Raises Lacking if there is no javac, or if it finds a fault."""
    command = ["javac", "-cp", f"{LIBRARIES}/*", "-d", os.fspath(classes), os.fspath(SOURCE)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except OSError as error:
        raise Lacking(f"javac does not run: {error}") from None
    except subprocess.CalledProcessError as error:
        raise Lacking(f"{SOURCE.name} does not compile: {error.stderr[-300:]}") from None
