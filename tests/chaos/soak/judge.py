"""Is a number of a long run flat? Medians of the first and the last third are compared.

A median does not see what comes and goes (a burst that overflows, a channel that lives for a
second), and a leak that is too small for one comparison is too small for the length of the run: run
longer. Every table states how much a measure may grow."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: Samples that each third has to have.
FEWEST: Final = 5


@dataclass(frozen=True)
class Measure:
    """A number that is sampled. share, least: it may grow by this share of what it was, or by
    `least` if that is more. scale: of the unit, for people."""

    unit: str
    share: float
    least: float
    scale: float = 1.0


@dataclass(frozen=True)
class Sample:
    """All measurements of one time. lives: of a measure of a process, which process that was."""

    time: float
    values: Mapping[str, float]
    lives: Mapping[str, int]


@dataclass(frozen=True)
class Finding:
    """Of one measure. first, middle, last: medians of the thirds, in the measure's unit."""

    name: str
    unit: str
    first: float
    middle: float
    last: float
    allowed: float
    samples: int

    @property
    def growth(self) -> float:
        """From the first third to the last."""
        return self.last - self.first

    @property
    def flat(self) -> bool:
        """Whether it is known not to grow by more than is allowed."""
        return self.samples >= 3 * FEWEST and self.growth <= self.allowed


def judge(samples: Sequence[Sample], measures: Mapping[str, Measure]) -> list[Finding]:
    """A finding for each measure. Of a process's measures only the process counts that most samples
    are of. One with too few samples is not flat: nothing is known of it."""
    found = []
    for name, measure in measures.items():
        seen = [sample for sample in samples if name in sample.values]
        lives = Counter(sample.lives.get(name, 0) for sample in seen)
        life = lives.most_common(1)[0][0] if lives else 0
        series = [
            (sample.time, sample.values[name] / measure.scale)
            for sample in seen
            if sample.lives.get(name, 0) == life
        ]
        thirds = split(series)
        if min(map(len, thirds)) < FEWEST:
            found.append(Finding(name, measure.unit, 0, 0, 0, 0, 0))
            continue
        first, middle, last = (statistics.median(third) for third in thirds)
        allowed = max(measure.share * first, measure.least)
        found.append(Finding(name, measure.unit, first, middle, last, allowed, len(series)))
    return found


def split(series: Sequence[tuple[float, float]]) -> list[list[float]]:
    """The values by thirds of the time."""
    thirds: list[list[float]] = [[], [], []]
    if series:
        began, length = series[0][0], series[-1][0] - series[0][0]
        for time, value in series:
            thirds[min(int(3 * (time - began) / length), 2) if length else 0].append(value)
    return thirds


def table(findings: Sequence[Finding]) -> str:
    """For people."""
    lines = [f"  {'':34}{'first':>10}{'middle':>10}{'last':>10}{'growth':>10}{'allowed':>10}"]
    for each in findings:
        if not each.samples:
            lines.append(f"  {each.name:34}{'too few samples: NOT KNOWN':>50}")
            continue
        numbers = (each.first, each.middle, each.last, each.growth, each.allowed)
        text = "".join(f"{number:>10,.1f}" for number in numbers)
        lines.append(f"  {each.name:34}{text} {each.unit:4}{'' if each.flat else ' GROWS'}")
    return "\n".join(lines)
