"""`shmq bench`: print the rates and round trips that `shmq.diagnostics.bench` measures."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import click

from shmq import __version__
from shmq.cli.output import print_json, print_rows, say
from shmq.cli.parameters import json_option
from shmq.cli.status import OK
from shmq.diagnostics.bench import LINES, measure, steps


@click.command()
@json_option
@click.option(
    "--seconds",
    type=click.FloatRange(0.3, 600),
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Duration of all lines together.",
)
@click.option(
    "--size",
    type=click.IntRange(2, 1 << 20),
    default=100,
    show_default=True,
    metavar="BYTES",
    help="Size of a body.",
)
@click.option(
    "--count",
    type=click.IntRange(1, 1000),
    default=200,
    show_default=True,
    metavar="N",
    help="Bodies in a list.",
)
def bench(as_json: bool, seconds: float, size: int, count: int) -> int:
    """Measure throughput and round trips on a private instance. Other instances are not touched.

    One producer and one consumer in processes of their own; every message is acknowledged.
    """
    if not as_json:
        say(
            f"shmq {__version__}, Python {platform.python_version()}, Linux "
            f"{platform.release()}, {len(os.sched_getaffinity(0))} cores; bodies of {size} bytes, "
            f"lists of {count}"
        )
    share = seconds / len(LINES)
    with click.progressbar(
        length=len(LINES) * steps(share),
        label="measuring",
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    ) as bar:
        results = list(measure(share, size, count, bar.update))
    if as_json:
        for result in results:
            print_json(result)
    else:
        print_rows(["LINE", "MESSAGES/S", "MB/S", "P50 us", "P99 us"], [_row(r) for r in results])
    if any(result["spilled"] for result in results):
        say("some messages went to disk: a slow consumer, the rates are lower for it", err=True)
    return OK


_TITLES = {"one": "one at a time", "lists": "lists", "roundtrip": "round trip"}


def _row(result: dict[str, Any]) -> list[str]:
    rate = result["messages_per_second"]
    cells = [_TITLES[result["line"]], f"{rate:,.0f}", f"{rate * result['size'] / 1e6:.1f}"]
    times = [result.get("p50_us"), result.get("p99_us")]
    return cells + ["-" if value is None else f"{value:.1f}" for value in times]
