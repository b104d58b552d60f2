"""Is a page that stays open for an hour, under load, the same at its end as at its beginning?

`shmq page` runs on a broker with many channels, some of them busy. A headless Chromium opens it and
goes from view to view, as a person does who leaves it on a screen. The memory of the page's server
and of the browser's tab is sampled: a server that keeps what it has sent, or a view that leaves its
charts behind, shows as growth.

    tools/dev watch --hours 1
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import click
from chaos.soak import judge
from chaos.soak.judge import Measure, Sample
from soak import process
from support import browser
from support.processes import Child, python_child

import shmq

MIB: Final = float(1 << 20)
#: The measures, and how much each may grow. Chromium keeps pages of its heap that it may need
#: again, so what its scripts hold, after a collection, is the strict measure of the tab.
MEASURES: Final = {
    "server: private memory": Measure("MiB", 0.05, 2.0, MIB),
    "server: memory (PSS)": Measure("MiB", 0.10, 6.0, MIB),
    "server: descriptors": Measure("", 0.10, 3),
    "server: threads": Measure("", 0.10, 1),
    "tab: memory of scripts": Measure("MiB", 0.10, 1.5, MIB),
    "tab: nodes": Measure("", 0.10, 500),
    "tab: listeners": Measure("", 0.10, 50),
    "tab: private memory": Measure("MiB", 0.15, 16.0, MIB),
}
#: Of the time: the page fills its hour of history, Python and the browser warm up.
WARM: Final = 0.25
VIEWS: Final = ("#/", "#/channel/topic-0000/channel", "#/", "#/dead", "#/processes", "#/deaths")


def load(instance: str, busy: int, rate: float) -> None:
    """In a child: publish to the busy channels and take from them, a burst at a time."""
    with shmq.attach(instance) as broker:
        topics = [f"topic-{number:04}" for number in range(busy)]
        producers = [broker.producer(topic) for topic in topics]
        consumers = [broker.consumer(topic, "channel") for topic in topics]
        began, rounds = time.monotonic(), 0
        while True:
            count = max(1, round(rate / busy / 5))
            for place in range(busy):
                producers[place].publish_list([b"x" * 200] * count, None, 1)
                # depths go up and down
                most = 2 * count if (rounds // 50 + place) % 2 else count // 2
                for message in consumers[place].take_many(max(most, 1), 0):
                    message.finish()
            rounds += 1
            time.sleep(max(began + rounds / 5 - time.monotonic(), 0))


@contextmanager
def watched(directory: Path, channels: int, busy: int, rate: float) -> Iterator[tuple[str, int]]:
    """A broker under load and its page: the page's address and the pid of its server."""
    instance = f"watch-{os.getpid()}"
    with shmq.Broker(directory / "data", instance, mem_queue_size=64, in_flight_slots=64) as broker:
        for number in range(channels):
            broker.create_channel(f"topic-{number:04}", "channel")
        argv = [sys.executable, "-m", "shmq", "page", f"--instance={instance}", "--port=0"]
        children: list[Child] = []
        try:
            children.append(python_child(load, instance, busy, rate))
            children.append(page := Child(argv))
            yield page.said("instance").split()[-1], page.pid
        finally:
            for child in children:
                child.close()


class Watch:
    """One run."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.every = max(1.0, min(10.0, seconds / 120))
        self.samples: list[Sample] = []
        self.errors: list[str] = []
        self.cpu = 0.0
        self.began = time.monotonic()

    async def run(self, directory: Path, url: str, server: int, channels: int) -> None:
        """Look at the page until the time is over."""
        async with browser.opened(directory) as opened:
            tab = await opened.tab()
            await tab.window(1200)
            await tab.tell("Network.disable")  # else the browser keeps every tick for us
            await tab.go(url)
            await tab.shows("OK", f"{channels:,} queues")
            self.began = time.monotonic()
            cpu = _cpu(server)
            number = 0
            while time.monotonic() < self.began + self.seconds:
                await asyncio.sleep(self.every)
                if number % 6 == 0:
                    view = VIEWS[number // 6 % len(VIEWS)]
                    await tab.run(f"location.hash = {json.dumps(view)}")
                number += 1
                await self._sample(tab, server)
            self.cpu = (_cpu(server) - cpu) / (time.monotonic() - self.began)
            self.errors = tab.page.errors

    async def _sample(self, tab: browser.Tab, server: int) -> None:
        values: dict[str, float] = {}
        for name, value in process(server).items():
            values[f"server: {name}"] = value
        await tab.tell("HeapProfiler.collectGarbage")
        heap = await tab.tell("Runtime.getHeapUsage")
        counted = await tab.tell("Memory.getDOMCounters")
        values["tab: memory of scripts"] = heap["usedSize"]
        values["tab: nodes"] = counted["nodes"]
        values["tab: listeners"] = counted["jsEventListeners"]
        for pid in await tab.renderers():
            found = process(pid).get("private memory", 0.0)
            values["tab: private memory"] = max(values.get("tab: private memory", 0.0), found)
        wanted = {name: value for name, value in values.items() if name in MEASURES}
        self.samples.append(Sample(time.monotonic() - self.began, wanted, {}))

    def warm(self) -> list[Sample]:
        """The samples after the warm-up."""
        return [sample for sample in self.samples if sample.time > WARM * self.seconds]


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def report(watch: Watch, findings: list[judge.Finding]) -> str:
    """For people."""
    lines = [
        f"watched for {watch.seconds / 3600:.2f} h, {len(watch.samples)} samples; the server used "
        f"{watch.cpu:.1%} of a core",
        judge.table(findings),
        *(f"  error in the browser: {error[:300]}" for error in watch.errors[:10]),
        "flat" if _good(watch, findings) else "NOT FLAT, or the page failed",
    ]
    return "\n".join(lines)


def _good(watch: Watch, findings: list[judge.Finding]) -> bool:
    return not watch.errors and all(finding.flat for finding in findings)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--hours", type=click.FloatRange(min=0.002), default=1.0, show_default=True)
@click.option("--channels", type=click.IntRange(1, 10_000), default=1000, show_default=True)
@click.option("--busy", type=click.IntRange(1), default=50, show_default=True)
@click.option(
    "--rate", type=float, default=2000.0, show_default=True, help="Messages a second, together."
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the result with all samples to this file.",
)
def main(hours: float, channels: int, busy: int, rate: float, json_file: Path | None) -> None:
    """Keep the page open in a browser, under load: do the server's memory and the tab's stay what
    they are? Medians of the first and the last third of what follows a warm-up (the first quarter
    of the time) are compared. Exit status 1 if not."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    directory = Path(tempfile.mkdtemp(prefix="shmq-watch-"))
    watch = Watch(hours * 3600)
    try:
        with watched(directory, channels, min(busy, channels), rate) as (url, server):
            asyncio.run(watch.run(directory, url, server, channels))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    findings = judge.judge(watch.warm(), MEASURES)
    click.echo(report(watch, findings))
    if json_file is not None:
        result: dict[str, Any] = {
            "errors": watch.errors,
            "cpu": watch.cpu,
            "findings": [{**vars(finding), "flat": finding.flat} for finding in findings],
            "samples": [{"time": each.time, **each.values} for each in watch.samples],
        }
        json_file.write_text(json.dumps(result))
    sys.exit(not _good(watch, findings))


if __name__ == "__main__":
    main()
