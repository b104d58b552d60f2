"""How long a start takes until the first answers: over TCP, over HTTP, and until nsqlookupd knows.

    tools/dev bench start [--starts 20] [--json FILE] [COMMAND ...]

COMMAND is what to start instead of this Python's `shmq serve`, such as another installation's or
`build/peers/bin/nsqd`; it gets nsqd's flags. Medians, in milliseconds since the process was made.
Nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from support.fake_lookupd import Lookupd

PATIENCE = 60.0
PAUSE = 0.001  # between two tries


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def published(port: int) -> bool:
    """Whether a PUB is answered."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(b"  V2PUB started\n\0\0\0\1x")
        return sock.recv(64).endswith(b"OK")


def pinged(port: int) -> bool:
    """Whether /ping is answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", "/ping")
        return connection.getresponse().read() == b"OK"
    finally:
        connection.close()


def start(command: list[str], instance: str) -> dict[str, float]:
    """One start: what -> milliseconds."""
    tcp, web = free_port(), free_port()
    took: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as data, Lookupd() as lookupd:
        flags = [
            f"--data-path={data}",
            f"--tcp-address=127.0.0.1:{tcp}",
            f"--http-address=127.0.0.1:{web}",
            lookupd.flag,
        ]
        env = {**os.environ, "SHMQ_INSTANCE": instance}
        began = time.monotonic()
        process = subprocess.Popen([*command, *flags], stderr=subprocess.DEVNULL, cwd=data, env=env)
        waits: dict[str, Callable[[], object]] = {
            "TCP": lambda: published(tcp),
            "HTTP": lambda: pinged(web),
            "nsqlookupd": lambda: lookupd.identities,
        }

        def wait(what: str) -> None:
            while what not in took and process.poll() is None:
                with contextlib.suppress(ConnectionError):
                    if waits[what]():
                        took[what] = (time.monotonic() - began) * 1e3
                time.sleep(PAUSE)

        threads = [threading.Thread(target=wait, args=(what,)) for what in waits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        process.send_signal(signal.SIGTERM)
        process.wait()
        for thread in threads:
            thread.join()
    assert took.keys() == waits.keys(), f"{command} answered {[*took]} in {PATIENCE:g} s"
    return {what: took[what] for what in waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    told = parser.parse_args()
    command = told.command or [sys.executable, "-m", "shmq", "serve"]
    if Path(command[0]).exists():
        command[0] = os.path.abspath(command[0])
    instance = f"start-{os.getpid()}"
    start(command, instance)  # what the disk has to be read for once
    all_of = [start(command, instance) for _ in range(told.starts)]
    medians = {what: statistics.median(one[what] for one in all_of) for what in all_of[0]}
    for what, median in medians.items():
        print(f"{what:12}{median:8.0f} ms   best {min(one[what] for one in all_of):.0f}")
    if told.json:
        told.json.write_text(json.dumps({"command": command, "starts": all_of}, indent=1))


if __name__ == "__main__":
    main()
