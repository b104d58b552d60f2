"""A process that is forked for one with threads does not wait for a lock that a thread held."""

from __future__ import annotations

from support.processes import ROOT, python_child, say

ROUNDS = 5


def bear_while_a_thread_has_the_lock(tests: str, rounds: int) -> None:
    """In a child: the handler of its log has a lock, which a thread takes and never gives back."""
    import logging
    import os
    import sys
    import threading

    sys.path.insert(0, tests)
    from chaos.storm.nursery import Born, Nursery

    class Locked(logging.StreamHandler):  # type: ignore[type-arg]
        mine = threading.Lock()  # Python resets its own locks after a fork, but not others

        def emit(self, record: logging.LogRecord) -> None:
            with self.mine:
                super().emit(record)

    def work() -> None:
        logging.info("said %s", sys.stdin.readline().strip())

    logging.basicConfig(level=logging.INFO, handlers=[Locked()])
    nursery = Nursery(work)
    thread = threading.Thread(target=Locked.mine.acquire)
    thread.start()
    thread.join()
    for number in range(rounds):
        read, write = os.pipe()
        born = Born(nursery, read)
        os.close(read)
        assert born.poll() is None  # it waits for its line
        os.write(write, b"%d\n" % number)
        os.close(write)
        assert born.wait() == 1
    say("all")


def test_a_lock_that_a_thread_holds_is_not_forked() -> None:
    child = python_child(bear_while_a_thread_has_the_lock, str(ROOT / "tests"), ROUNDS)
    try:
        assert child.succeed() == ["all"]
        for number in range(ROUNDS):
            assert f"said {number}\n" in child.errors
    finally:
        child.close()
