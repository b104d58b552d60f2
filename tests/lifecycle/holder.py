"""Processes that make one handle and end it: `python -m lifecycle.holder MODULE...`.

That is a process which has imported shmq and the modules that have the rows, and nothing is open in
it. For each request at its descriptor 3 it starts a process, so that an import is paid once. The
new process says "ready" when it holds the handle, and waits for a line. Where it outlives the end,
it says what of its own is left, waits for another line, and goes on with the next end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from lifecycle.ends import Where, stays
from lifecycle.handles import ROWS, Held, Site

import shmq

REQUESTS = 3  # the descriptor
SETTLES = 20.0  # seconds
FORKS = 5


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def heard() -> None:
    """Wait for a line; without one this process is no longer wanted."""
    if not sys.stdin.readline():
        os._exit(1)


def own() -> dict[str, list[str]]:
    """The threads, the descriptors and the blocked signals of this process."""
    gc.collect()
    threads = [thread.name for thread in threading.enumerate() if thread.is_alive()]
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            files.append(re.sub(r"(:\[|#|-)\w+.*", r"\1N", name))
    blocked = [signal.Signals(each).name for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    return {"threads": sorted(threads), "descriptors": sorted(files), "blocked": sorted(blocked)}


def more(some: list[str], others: list[str]) -> list[str]:
    """The names in `some` that are not, or not as often, in `others`."""
    rest, found = list(others), []
    for each in some:
        if each in rest:
            rest.remove(each)
        else:
            found.append(each)
    return found


def close(held: Held) -> None:
    """End the handle as a program does, then its owner."""
    if held.close is not None:
        held.close()
    elif hasattr(held.handle, "close"):
        held.handle.close()
    if held.owner is not None:
        held.owner.close()


class Holder:
    """The process."""

    def __init__(self, row: str, ends: list[str], site: Site) -> None:
        self._row, self._ends, self._site = ROWS[row], ends, site
        self.held: Held | None = None

    def run(self) -> None:
        where = Where.of(self._ends[0])
        if where is Where.INSIDE:
            self._show()
            for end in self._ends:
                before = own()
                getattr(self, end)()
                self._tell(end, before)
        elif where is Where.OUTSIDE:
            for _ in self._ends:
                held = self._make()
                self._ready()
                with contextlib.suppress(shmq.ShmqError, OSError, ValueError):
                    close(held)
                say("ended", "{}")
                heard()
        else:
            held = self._make()
            self._ready()
            getattr(self, self._ends[0])(held)
            return
        os._exit(0)

    def _show(self) -> None:
        """Make the handle to be seen. Later all is there that stays for good."""
        heard()
        held = self._make()
        say("made")
        heard()
        close(held)

    def _make(self) -> Held:
        return self._row.make(self._site)

    def _ready(self) -> None:
        say("ready")
        heard()

    def _may(self, end: str, name: str) -> bool:
        return stays(self._row, end, name)

    def _tell(self, end: str, before: dict[str, list[str]]) -> None:
        """Say what is left, when it has settled or after a while."""
        until = time.monotonic() + SETTLES
        while True:
            now = own()
            left = {
                what: [
                    name
                    for name in more(now[what], before[what])
                    if not stays(self._row, end, name)
                ]
                for what in now
            }
            if not any(left.values()) or time.monotonic() > until:
                break
            time.sleep(0.02)
        say("ended", json.dumps({what: names for what, names in left.items() if names}))
        while not select.select([0], [], [], 0.1)[0]:
            gc.collect()  # the garbage of threads that have ended just now
        heard()
        self.held = None

    # ---- ends inside of the process, which goes on ----

    def close(self) -> None:
        held = self._make()
        self._ready()
        close(held)

    def owner(self) -> None:
        held = self._make()
        self._ready()
        if held.owner is None:
            close(held)
        else:
            held.owner.close()
        self.held = held  # the handle is there, and is not closed

    def collected(self) -> None:
        held = self._make()
        self._ready()
        del held

    def thread(self) -> None:
        def work() -> None:
            self.held = self._make()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        self._ready()
        assert self.held is not None
        close(self.held)

    def exception(self) -> None:
        def fails() -> None:
            held = self._make()
            self._ready()
            raise ValueError(held)

        with contextlib.suppress(ValueError):
            fails()

    def second(self) -> None:
        """Another one of its kind is made and closed; this one still works."""
        held = self._make()
        self._ready()
        other = self._make()
        close(other)
        assert held.handle.submit(len, "abc").result() == 3
        close(held)

    # ---- ends of the process ----

    def returned(self, held: Held) -> None:
        self.held = held

    def raised(self, held: Held) -> None:
        self.held = held
        sys.stderr = None
        raise RuntimeError

    def at_once(self, held: Held) -> None:
        os._exit(0)

    def with_threads(self, held: Held) -> None:
        """The interpreter ends while threads use it, of which some may wait."""
        self.held = held
        self._use(held)

    def _use(self, held: Held) -> None:
        began = threading.Semaphore(0)

        def use() -> None:
            began.release()
            with contextlib.suppress(Exception):
                while True:
                    for name in ("take", "get", "stats", "publish"):
                        call = getattr(held.handle, name, None)
                        if call is not None:
                            call(b"x") if name == "publish" else call()
                    time.sleep(0.001)

        for _ in range(3):
            threading.Thread(target=use, daemon=True).start()
            began.acquire()

    def fork_ends(self, held: Held) -> None:
        """A child is forked and ends in order; then the handle is closed."""
        self._fork(lambda: None)
        close(held)

    def fork_closes(self, held: Held) -> None:
        """A child is forked and closes what it has of the handle, while threads of this process
        use it."""
        self._use(held)

        def ends() -> None:
            with contextlib.suppress(shmq.ShmqError):
                close(held)

        for _ in range(FORKS):
            self._fork(ends)
        close(held)

    @staticmethod
    def _fork(does: Callable[[], None]) -> None:
        """Wait for a child that does this and ends in order."""
        pid = os.fork()
        if not pid:
            does()
            sys.exit(0)
        _, status = os.waitpid(pid, 0)
        assert not status, f"the forked child ended with {status}"

    def fork_stays(self, held: Held) -> None:
        """A child is forked, and outlives this process, which ends in order."""
        if not os.fork():
            say("stays", os.getpid())
            signal.pause()
        self.held = held

    def killed_beside_fork(self, held: Held) -> None:
        """A child is forked and outlives this process, which is killed."""
        if not os.fork():
            say("stays", os.getpid())
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)

    def replaced(self, held: Held) -> None:
        say("stays", os.getpid())
        os.execv("/bin/sleep", ["sleep", "1000"])


# ---- the process that starts them ----


def started() -> list[str]:
    """Start processes as they are asked for; returns in each of them, with its words."""
    with socket.socket(fileno=REQUESTS) as requests:
        while True:
            asked, files, _, _ = socket.recv_fds(requests, 1 << 16, 3)
            if not asked:
                os._exit(0)
            ours, theirs = os.pipe()
            # twice: it is to be a child of the machine, which waits for it
            between = os.fork()
            if not between:
                pid = os.fork()
                if pid:
                    os.write(theirs, str(pid).encode())
                    os._exit(0)
                break
            os.waitpid(between, 0)
            requests.send(os.read(ours, 100))
            for file in (ours, theirs, *files):
                os.close(file)
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in (ours, theirs, *files):
        os.close(file)
    words: list[str] = json.loads(asked)
    return words


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    row, ends, *place = started()
    Holder(row, ends.split(), Site(*place)).run()


if __name__ == "__main__":
    main()
