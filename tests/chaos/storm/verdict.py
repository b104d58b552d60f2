"""The findings of the checker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

MILLISECOND = 1_000_000
#: Deadlines are counted from a clock that lags by up to a tick of the kernel (CONFIG_HZ=100).
TICK = 10 * MILLISECOND
SHOWN = 10  # violations of one rule that are told in full


@dataclass(frozen=True)
class Violation:
    rule: str
    text: str


@dataclass
class Verdict:
    """The findings. delays: of deaths where others waited and nothing else was wrong, seconds from
    the kill until the last of what it held was with somebody else; disturbed: of those while the
    supervisor was dead or one of the channel's processes stopped, from the end of that."""

    violations: list[Violation] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    delays: list[float] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def add(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))

    def show(self) -> str:
        """As a table, and the first violations of each rule."""
        lines = [f"  {count:>12,}  {what}" for what, count in self.counts.items()]
        for what, seconds in (("waited for", self.delays), ("disturbed", self.disturbed)):
            if seconds:
                lines.append(f"  redelivery after a death, {what}: {percentiles(seconds)}")
        rules = Counter(violation.rule for violation in self.violations)
        for rule, number in rules.items():
            lines.append(f"  VIOLATION {rule}: {number:,}")
            texts = [found.text for found in self.violations if found.rule == rule]
            lines += [f"    {text}" for text in texts[:SHOWN]]
        lines.append("  no violation" if not rules else f"  {rules.total():,} violations")
        return "\n".join(lines)


def percentiles(seconds: list[float]) -> str:
    """p50, p99, max in ms."""
    p50, p99, most = (np.percentile(seconds, share) * 1e3 for share in (50, 99, 100))
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {most:.1f} ms of {len(seconds):,}"
