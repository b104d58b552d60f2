"""The cost of `shmq page` with many channels, some of them busy, and several browsers that watch.

    tools/dev bench page [--channels 10000] [--busy 50] [--viewers 5] [--seconds 60] [--json FILE]

Memory is the server's private memory: first of its imports alone (Python with asyncio, numpy and
aiohttp, which no server of this kind can be below), then when all viewers have all rows. The
segments that it reads are shared and do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from support.processes import Child, python_child

import shmq

_IMPORTS = "import asyncio, numpy; from aiohttp import web; {more}; print(1, flush=True); input()"


def private(pid: int) -> float:
    """MiB of a process's own memory, without what it has mapped."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(dict(re.findall(r"^(\w+): +(\d+) kB", text, re.M))["Pss_Anon"]) / 1024


def cpu(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def imports(more: str = "pass") -> float:
    """MiB of a Python that has imported what a server needs, and no more."""
    code = _IMPORTS.format(more=more)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = private(child.pid)
        child.communicate(b"\n")
    return found


def load(instance: str, busy: int) -> None:
    """In a child: publish to the busy channels and take from them, five times a second."""
    with shmq.attach(instance) as broker:
        topics = [f"topic-{number:05}" for number in range(busy)]
        producers = [broker.producer(topic) for topic in topics]
        consumers = [broker.consumer(topic, "channel") for topic in topics]
        while True:
            for producer, consumer in zip(producers, consumers, strict=True):
                producer.publish_list([b"x" * 200] * 8, None, 1)
                for message in consumer.take_many(8, 0):
                    message.finish()
            time.sleep(0.2)


async def watch(url: str, viewers: int, channels: int, seconds: float, server: int) -> Any:
    """Watch with so many viewers: (MiB, share of a core, bytes of a tick), when all rows came."""
    ticks: list[int] = []
    have_all = asyncio.Event()

    async def view(session: aiohttp.ClientSession) -> None:
        rows: set[str] = set()
        async with session.get(url.partition("?")[0] + "ticks") as answer:
            async for line in answer.content:
                if line.startswith(b"data: "):
                    rows.update(json.loads(line[6:])["rows"])
                    ticks.append(len(line))
                    if len(rows) >= channels:
                        have_all.set()

    jar = aiohttp.CookieJar(unsafe=True)
    async with aiohttp.ClientSession(cookie_jar=jar, read_bufsize=1 << 24) as session:
        await session.get(url)
        tasks = [asyncio.create_task(view(session)) for _ in range(viewers)]
        await have_all.wait()
        await asyncio.sleep(3)
        ticks.clear()
        before, began = cpu(server), time.monotonic()
        await asyncio.sleep(seconds)
        share = (cpu(server) - before) / (time.monotonic() - began)
        found = private(server), share, statistics.mean(ticks)
        for task in tasks:
            task.cancel()
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channels", type=int, default=10_000)
    parser.add_argument("--busy", type=int, default=50)
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {
        "imports, MiB": imports(),
        "imports of the page, MiB": imports("import shmq.page.server"),
    }
    instance = f"page-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as directory,
        shmq.Broker(
            Path(directory) / "data", instance, mem_queue_size=16, in_flight_slots=16
        ) as broker,
    ):
        for number in range(given.channels):
            broker.create_channel(f"topic-{number:05}", "channel")
        argv = [sys.executable, "-m", "shmq", "page", f"--instance={instance}", "--port=0"]
        page, busy = Child(argv), python_child(load, instance, given.busy)
        try:
            url = page.said("instance").split()[-1]
            watching = watch(url, given.viewers, given.channels, given.seconds, page.pid)
            memory, share, tick = asyncio.run(watching)
        finally:
            page.close()
            busy.close()
    found |= {"memory, MiB": memory, "share of a core": share, "bytes of a tick": tick}
    for name, value in found.items():
        print(f"{name:28}{value:12,.3f}")
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
