"""nsqd's own bench_writer and bench_reader against a real nsqd and shmq's gateway, interleaved.

    .venv/bin/python tools/bench_gateway.py --rounds 5 --json FILE

200-byte messages; what is shown are medians and quartiles of thousand messages a second. Both
servers run at the same time and keep everything in memory; who is measured has the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

BIN = Path(__file__).parents[1] / "build" / "peers" / "bin"
SIZE = 200
MEMORY = ("--mem-queue-size=4000000", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
KINDS = ("nsqd", "shmq")
RATE = re.compile(r"([0-9.]+)ops/s")


@contextlib.contextmanager
def server(kind: str, scratch: Path) -> Iterator[str]:
    """Its TCP address."""
    data = scratch / kind
    data.mkdir()
    words = [str(BIN / "nsqd")]
    if kind == "shmq":
        words = [sys.executable, "-m", "shmq", "serve", f"--instance=bench-{time.time_ns():x}"]
        words.append(f"--arena-size={4 << 30}")
    with open(scratch / f"{kind}.log", "w+") as log:
        process = subprocess.Popen([*words, *MEMORY, f"--data-path={data}"], stderr=log)
        try:
            yield _address(scratch / f"{kind}.log", process)
        finally:
            process.terminate()
            process.wait()


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        found = re.search(r"TCP: listening on (\S+)", log.read_text())
        if found:
            return found[1]
        time.sleep(0.05)
    raise SystemExit(f"{process.args}: ended\n{log.read_text()}")


def rate(tool: str, address: str, topic: str, seconds: float, *words: str) -> float:
    """Messages a second."""
    argv = [str(BIN / tool), f"-nsqd-tcp-address={address}", f"-topic={topic}", f"-size={SIZE}"]
    done = subprocess.run(
        [*argv, f"-runfor={seconds}s", *words], capture_output=True, text=True, check=True
    )
    found = RATE.search(done.stderr + done.stdout)
    assert found, done.stderr
    return float(found[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not (BIN / "bench_writer").exists():
        raise SystemExit("nsqd's tools are missing: tools/dev peers installs them")
    results: dict[str, dict[str, list[float]]] = {}

    def measure(line: str, kind: str, value: float) -> None:
        results.setdefault(line, {}).setdefault(kind, []).append(value)

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        where = {kind: stack.enter_context(server(kind, Path(name))) for kind in KINDS}
        time.sleep(1.0)
        for number in range(options.rounds):
            for kind in KINDS if number % 2 else reversed(KINDS):
                at, seconds = where[kind], options.seconds
                many, one = f"many{number}", f"one{number}"
                measure(
                    "publish, batches of 200", kind,
                    rate("bench_writer", at, many, seconds / 2, "-batch-size=200"),
                )  # fmt: skip
                measure(
                    "take and finish", kind, rate("bench_reader", at, many, seconds, "-rdy=2500")
                )
                measure(
                    "publish one at a time", kind,
                    rate("bench_writer", at, one, seconds, "-batch-size=1"),
                )  # fmt: skip
    print("| thousand messages a second | nsqd | shmq | ratio |\n|---|---|---|---|")
    for line, kinds in results.items():
        low, middle, high = zip(*(_quartiles(kinds[kind]) for kind in KINDS), strict=True)
        shown = [f"{m / 1e3:.1f} ({a / 1e3:.1f} to {b / 1e3:.1f})"
                 for a, m, b in zip(low, middle, high, strict=True)]  # fmt: skip
        print(f"| {line} | {shown[0]} | {shown[1]} | {middle[1] / middle[0]:.2f} |")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


if __name__ == "__main__":
    main()
