"""Draw the pictures of docs/performance.md from the files that `tools/dev bench --json FILE` wrote.

    tools/dev bench plot FILE... [--into docs]

Each picture has a panel for each line, and each panel a bar for each contestant: its median, and by
which factor shmq is better. Of a line that several files have, the last one counts. A picture with
no line in any file is not drawn."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import (
    APART,
    KILL,
    LINES,
    MADE,
    ONE,
    POST,
    POSTS,
    PUB,
    PUB_2,
    PUB_8,
    PUBS,
    PUBS_NEW,
    SUB,
    TAILS,
    Outcome,
)

TOP = Path(__file__).resolve().parents[2]
# One card of paper colour, so that a picture is as readable on a dark page as on a light one.
PAPER, INK, FAINT, GRID = "#fbfbf9", "#1d2126", "#5c646d", "#dcdfe2"
OURS, CORE, THEIRS = "#1f6fc4", "#8fb8e3", "#a3a9b0"
ROW, HEAD, FOOT = 0.27, 0.7, 0.12  # inches: of a bar, of a panel beside them, below all
WIDTH = 8.0
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "shmq",  # the same figures make the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Bar:
    """name, length (None: no figure), and the words behind it."""

    name: str
    length: float | None
    words: str
    low: float | None = None
    high: float | None = None


@dataclass
class Run:
    """The results of one line."""

    line: str
    results: list[dict[str, Any]]
    machine: dict[str, Any]
    rounds: int

    def outcomes(self, contestant: str) -> list[Outcome]:
        """Of all rounds, the failed ones left out."""
        found = [item for item in self.results if item["contestant"] == contestant]
        return [Outcome(**outcome) for item in found for outcome in item["outcomes"]]

    def value(self, contestant: str) -> float | None:
        """The median, in the line's unit; None: there is none."""
        size = next(item["size"] for item in self.results if item["contestant"] == contestant)
        line = LINES[self.line]
        outcomes = [each for each in self.outcomes(contestant) if each.messages or not each.lost]
        values = [line.value(each, size) for each in outcomes]
        return statistics.median(values) if values else None

    def conditions(self) -> str:
        """The machine, as the picture's foot has it."""
        machine = self.machine
        real_time = ", real-time class" if machine.get("real_time") else ""
        return (
            f"{machine.get('date', '')}, {machine['cores']} cores of {machine['cpu']}, load "
            f"{machine['load']:.0f}{real_time}; medians of {self.rounds} rounds"
        )


def runs_of(paths: Sequence[Path]) -> dict[str, Run]:
    """Line -> its results in the last file that has them."""
    found = {}
    for path in paths:
        document = json.loads(path.read_text())
        for line in {item["line"] for item in document["results"]}:
            results = [item for item in document["results"] if item["line"] == line]
            found[line] = Run(line, results, document["machine"], document["plan"]["rounds"])
    return found


# ---- bars ----------------------------------------------------------------------------------------


def number(value: float) -> str:
    """With as many digits as a reader wants."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.{1 if value >= 10 else 2}f}"


def beside_shmq(run: Run) -> list[Bar]:
    """All contestants, the best one first, and by which factor shmq is better than a peer."""
    line, mine = LINES[run.line], run.value("shmq")
    bars = []
    for name in [result["contestant"] for result in run.results]:
        value, outcomes = run.value(name), run.outcomes(name)
        lost = sum(outcome.lost for outcome in outcomes)
        words = []
        if value is not None:
            words = [f"{number(value)} {line.unit}"]
            if run.line in TAILS:
                words.append(f"{TAILS[run.line]} {number(line.tail(outcomes))}")
            if mine is not None and not lost and not name.startswith("shmq"):
                times = value / mine if line.less_is_better else mine / value
                words[-1] += f"   ({number(times)}x)"
        if lost:
            words.append(f"{lost} of {lost} LOST")
        bars.append(Bar(name, value, ", ".join(words) or "failed"))
    there = [bar for bar in bars if bar.length is not None]
    there.sort(key=lambda bar: bar.length or 0.0, reverse=not line.less_is_better)
    return there + [bar for bar in bars if bar.length is None]


def beside_nsqd(runs: Sequence[Run]) -> list[Bar]:
    """One bar for each line: the gateway's rate beside nsqd's in the same round."""
    bars = []
    for run in runs:
        line, mine, theirs = LINES[run.line], run.value("shmq gateway"), run.value("nsqd")
        pairs = zip(run.outcomes("shmq gateway"), run.outcomes("nsqd"), strict=False)
        ratios = [ours.rate / nsqds.rate for ours, nsqds in pairs]
        if mine is not None and theirs is not None:
            ratio = statistics.median(ratios)
            words = f"{ratio:.2f}x   ({number(mine)} and {number(theirs)} {line.unit})"
            name = line.title.replace("over TCP: ", "").replace("over HTTP: ", "HTTP ")
            bars.append(Bar(name, ratio, words, min(ratios), max(ratios)))
    return bars


# ---- pictures ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Panel:
    """around_one: the bars are ratios, and begin at 1."""

    title: str
    bars: Sequence[Bar]
    around_one: bool = False


def colour(bar: Bar, around_one: bool) -> str:
    if around_one:
        return OURS if (bar.length or 0.0) >= 1 else THEIRS
    return {"shmq": OURS, "C co": CORE}.get(bar.name[:4], THEIRS)


def draw_lengths(axes: Axes, bars: Sequence[Bar]) -> None:
    reach = max(bar.length or 0.0 for bar in bars) or 1.0
    for place, bar in enumerate(bars):
        axes.barh(place, bar.length or 0.0, height=0.62, color=colour(bar, False), zorder=2)
        at = (bar.length or 0.0) + reach * 0.012
        axes.text(at, place, bar.words, va="center", fontsize=8.5)
    axes.set_xlim(0, reach * 1.55)


def draw_ratios(axes: Axes, bars: Sequence[Bar]) -> None:
    axes.set_xscale("log")
    for place, bar in enumerate(bars):
        assert bar.length is not None
        axes.barh(place, bar.length - 1, left=1, height=0.62, color=colour(bar, True), zorder=2)
        axes.plot([bar.low or 1, bar.high or 1], [place, place], color=INK, linewidth=1, zorder=3)
        at = max(bar.length, bar.high or 1, 1.0) * 1.04
        axes.text(at, place, bar.words, va="center", fontsize=8.5)
    axes.axvline(1, color=INK, linewidth=1, zorder=3)
    axes.set_xlim(
        min(0.5, *(bar.low or 1 for bar in bars)) * 0.9, max(bar.high or 1 for bar in bars) * 6
    )
    ticks = [tick for tick in (0.25, 0.5, 1, 2, 5, 10) if tick >= axes.get_xlim()[0]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def draw(axes: Axes, panel: Panel) -> None:
    (draw_ratios if panel.around_one else draw_lengths)(axes, panel.bars)
    axes.set_yticks(range(len(panel.bars)), [bar.name for bar in panel.bars])
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, linewidth=0.8, zorder=0)
    axes.tick_params(which="both", length=0)
    axes.set_facecolor(PAPER)
    for spine in axes.spines.values():
        spine.set_visible(False)


def picture(panels: Sequence[Panel], foot: Sequence[str], path: Path) -> None:
    """Draw the panels below each other."""
    foot_height = FOOT + 0.15 * len(foot)
    height = sum(len(panel.bars) * ROW + HEAD for panel in panels) + foot_height
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    bottom = height
    for panel in panels:
        row = len(panel.bars) * ROW
        bottom -= HEAD + row
        axes = figure.add_axes((0.25, (bottom + 0.28) / height, 0.73, row / height))
        draw(axes, panel)
    figure.text(0.012, 0.1 / height, "\n".join(foot), fontsize=7.5, color=FAINT)
    figure.savefig(path, facecolor=PAPER, metadata={"Date": None, "Title": path.stem})
    click.echo(path)


def panels_of(runs: dict[str, Run], lines: Sequence[str]) -> list[Panel]:
    found = []
    for name in lines:
        if name in runs:
            line = LINES[name]
            better = "less" if line.less_is_better else "more"
            title = f"{line.title[:1].upper()}{line.title[1:]} ({line.unit}, {better} is better)"
            found.append(Panel(title, beside_shmq(runs[name])))
    return found


def against_nsqd(runs: dict[str, Run], lines: Sequence[str]) -> list[Panel]:
    bars = beside_nsqd([runs[line] for line in lines if line in runs])
    title = "The gateway's rate, nsqd's is 1 (more is better)"
    return [Panel(title, bars, around_one=True)] if bars else []


FACTOR = "(x): how many times better shmq is than this"
#: Name -> how its panels are made, of which lines, and what its foot says beside the machine.
PICTURES: dict[
    str, tuple[Callable[[dict[str, Run], Sequence[str]], list[Panel]], tuple[str, ...], str]
] = {
    "messages": (
        panels_of,
        (ONE, MADE),
        f"{FACTOR}; Aeron IPC, Chronicle Queue: Java that polls and acknowledges nothing",
    ),
    "times": (
        panels_of,
        (APART, KILL),
        f"{FACTOR}; nsqd and Redis Streams wait for a time-out, here of 1 s",
    ),
    "nsqd": (
        against_nsqd,
        (PUB, PUB_2, PUB_8, PUBS, PUBS_NEW, SUB, POST, POSTS),
        "median, lowest and highest ratio of one round",
    ),
}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--into", type=click.Path(path_type=Path), default=TOP / "docs", help="The folder.")
def main(files: tuple[Path, ...], into: Path) -> None:
    """Draw performance-NAME.svg from what `tools/dev bench --json FILE` wrote."""
    runs = runs_of(files)
    with matplotlib.rc_context(STYLE):
        for name, (panels, lines, said) in PICTURES.items():
            if drawn := panels(runs, lines):
                conditions = {runs[line].conditions(): None for line in lines if line in runs}
                picture(drawn, [said, *conditions], into / f"performance-{name}.svg")


if __name__ == "__main__":
    main()
