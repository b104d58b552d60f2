"""Two processes and a broker in a third: an installed shmq must be able to do this. It needs
nothing but shmq. tools/packaging/wheels.py runs it where there is no compiler.

The parent publishes numbers, the child answers each with its square, and a child that is killed
with a message in hand loses none.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile

import shmq

COUNT = 200
WAIT = float(os.environ.get("PAIR_WAIT", 120))  # seconds; an emulated machine is slow
GIL_MAY_BE_OFF = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def check_gil() -> None:
    """All that is imported must leave the GIL off where the Python can."""
    assert not (GIL_MAY_BE_OFF and sys._is_gil_enabled()), "something switched the GIL on"


def answer(instance: str) -> None:
    """The child: squares until it is told to die with a message in hand."""
    with shmq.attach(instance) as broker:
        numbers = broker.consumer("numbers", "squares")
        squares = broker.producer("squares")
        while (message := numbers.take(WAIT)) is not None:
            if message.body == b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            squares.publish(str(int(message.body) ** 2).encode())
            message.finish()
            check_gil()


def main() -> None:
    instance = f"pair-{os.getpid()}"
    with tempfile.TemporaryDirectory() as data:
        words = ["serve", "--instance", instance, "--data-path", data]
        command = [sys.executable, "-m", "shmq", *words, "--tcp-address=", "--http-address="]
        supervisor = subprocess.Popen(command)
        try:
            exchange(instance)
        finally:
            supervisor.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(WAIT)
    python = f"Python {sys.version.split()[0]}{' without the GIL' if GIL_MAY_BE_OFF else ''}"
    print(f"shmq {shmq.__version__}, {python}: {COUNT} answers, none lost")


def exchange(instance: str) -> None:
    with shmq.attach(instance, timeout=WAIT) as broker:
        numbers, squares = broker.producer("numbers"), broker.consumer("squares", "all")
        broker.consumer("numbers", "squares").close()  # makes the channel
        first = child(instance)
        found = set()
        for number in range(COUNT):
            numbers.publish(str(number).encode())
            with squares.take(WAIT) as message:
                found.add(int(message.body))
        numbers.publish(b"die")
        assert first.wait(WAIT) == -signal.SIGKILL
        left = broker.consumer("numbers", "squares")
        with left.take(WAIT) as message:
            assert (message.body, message.attempts) == (b"die", 2), message
        assert found == {number**2 for number in range(COUNT)}
        check_gil()


def child(instance: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, instance])


if __name__ == "__main__":
    answer(sys.argv[1]) if len(sys.argv) > 1 else main()
