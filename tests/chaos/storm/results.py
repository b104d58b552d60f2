"""The checker's rule for a results store: each key has the value that was stored last, or an older
one as long as the call that replaces it is under way.

A call of which no end is known may have had its effect at any time until its process was dead, or
not at all.

result    a value that nobody stored there, or that is torn; one that was replaced or deleted before
          the call began; one that came after its time, or after somebody had taken it away; a key
          that was there is missing; a number that lacks an addition, or has one too many
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from chaos.storm.history import Access, File, Outcome, What, describe_key
from chaos.storm.tables import NEVER, History, calls_of
from chaos.storm.verdict import TICK, Verdict

STORES, READS = (Access.SET, Access.ADD), (Access.GET, Access.POP)
REMOVES = (Access.POP, Access.DELETE)


@dataclass(frozen=True)
class Call:
    """One call. key: of the value that it stores, or what it adds; value: what it returned."""

    access: Access
    number: int
    key: int
    ttl: int
    begin: int
    end: int
    sure: bool
    """It came back."""
    found: bool
    value: int
    good: bool
    by: str

    def __str__(self) -> str:
        return f"{self.access.name} of key {self.number} [{self.begin}, {self.end}] of {self.by}"


@dataclass
class Key:
    """The calls on one key."""

    calls: list[Call] = field(default_factory=list)

    def having(self, kinds: Iterable[Access], sure: bool = False) -> list[Call]:
        """Those that may have had an effect; if `sure`, those that had."""
        return [
            call
            for call in self.calls
            if call.access in kinds and (call.found if call.sure else not sure)
        ]


def results(history: History, verdict: Verdict) -> None:
    keys: dict[int, Key] = defaultdict(Key)
    deaths = _deaths(history.files)
    for file in history.files:
        for call in _calls(file, deaths.get(file.actor, NEVER)):
            keys[call.number].calls.append(call)
    calls = [call for key in keys.values() for call in key.calls]
    verdict.counts["calls on a results store"] += len(calls)
    verdict.counts["of these cut off by a death"] += sum(not call.sure for call in calls)
    for key in keys.values():
        _torn(key, verdict)
        _old(key, verdict)
        _taken(key, verdict)
        _missing(key, verdict)
        _counted(key, verdict)


def _deaths(files: list[File]) -> dict[int, int]:
    """When each actor that died was waited for."""
    return {
        int(row["key"]): int(row["at"])
        for file in files
        if file.role == "storm"
        for row in file.records[file.records["what"] == What.DEAD]
    }


def _calls(file: File, death: int) -> Iterable[Call]:
    begins, ends, known = calls_of(file.records, What.ACCESS, What.ACCESSED)
    for begin, end, sure in zip(begins, ends, known.tolist(), strict=True):
        if sure and end["flag"] != Outcome.DONE:
            continue  # nothing happened
        yield Call(
            Access(int(begin["flag"])),
            int(begin["count"]),
            int(begin["key"]),
            int(begin["id"]),
            int(begin["at"]),
            int(end["at"]) if sure else death,
            sure,
            bool(end["count"]) if sure else False,
            int(np.int64(end["key"].astype(np.int64))) if sure else 0,
            bool(end["id"]) if sure else True,
            file.name,
        )


def _torn(key: Key, verdict: Verdict) -> None:
    stored = {call.key: call for call in key.having(STORES)}
    for read in key.having(READS, sure=True):
        store = stored.get(read.value)
        if not read.good or store is None or store.begin > read.end:
            verdict.add("result", f"{describe_key(read.value)} was not stored there: {read}")
        elif store.ttl and read.begin > store.end + store.ttl + TICK and store.end != NEVER:
            verdict.add("result", f"its time was over, stored by {store}: {read}")


def _old(key: Key, verdict: Verdict) -> None:
    """A value that another call replaced or removed before the read began."""
    stored = {call.key: call for call in key.having(STORES)}
    changes = sorted(key.having((*STORES, *REMOVES), sure=True), key=lambda call: call.begin)
    begins = [call.begin for call in changes]
    earliest = list(accumulate((call.end for call in reversed(changes)), min))[::-1]
    for read in key.having(READS, sure=True):
        store = stored.get(read.value)
        at = bisect.bisect_right(begins, store.end) if store else len(changes)
        if at < len(changes) and earliest[at] < read.begin:
            verdict.add("result", f"replaced or deleted since {store}: {read}")


def _taken(key: Key, verdict: Verdict) -> None:
    """A value that was popped is nowhere any more."""
    popped: dict[int, Call] = {}
    for call in key.having((Access.POP,), sure=True):
        other = popped.setdefault(call.value, call)
        if other is not call:
            verdict.add("result", f"taken twice: {other}, {call}")
    for call in key.having((Access.GET,), sure=True):
        if call.value in popped and call.begin > popped[call.value].end:
            verdict.add("result", f"{call}; taken before: {popped[call.value]}")


def _missing(key: Key, verdict: Verdict) -> None:
    """A call that found no value, where one had been stored and nobody can have removed it."""
    if any(call.ttl for call in key.calls):
        return
    stores = sorted(key.having(STORES, sure=True), key=lambda call: call.end)
    ends = [call.end for call in stores]
    latest = list(accumulate((call.begin for call in stores), max))
    removes = sorted(key.having(REMOVES), key=lambda call: call.begin)
    begins = [call.begin for call in removes]
    until = list(accumulate((call.end for call in removes), max))
    for call in key.calls:
        absent = call.found if call.access is Access.ADD else not call.found
        if not call.sure or not absent or call.access not in (*READS, *REMOVES, Access.ADD):
            continue
        at = bisect.bisect_left(ends, call.begin)
        if not at:
            continue
        before = bisect.bisect_right(begins, call.end)
        if not before or until[before - 1] < latest[at - 1]:
            verdict.add("result", f"the value stored at {latest[at - 1]} is missing: {call}")


def _counted(key: Key, verdict: Verdict) -> None:
    """Each number is the sum of all additions that had ended, and of none that had not begun."""
    counts = [call for call in key.calls if call.access is Access.COUNT]
    done = sorted((call for call in counts if call.sure), key=lambda call: call.end)
    begun = sorted(counts, key=lambda call: call.begin)
    ends, begins = [call.end for call in done], [call.begin for call in begun]
    least = [0, *accumulate(call.key for call in done)]
    most = [0, *accumulate(call.key for call in begun)]
    seen: dict[int, Call] = {}
    for call in done:
        low = least[bisect.bisect_left(ends, call.begin)] + call.key
        high = most[bisect.bisect_right(begins, call.end)]
        if not low <= call.value <= high:
            verdict.add("result", f"{call.value} is not from {low} to {high}: {call}")
        if call.key and seen.setdefault(call.value, call) is not call:
            verdict.add("result", f"{call.value} was counted twice: {seen[call.value]}, {call}")
    verdict.counts["additions to numbers"] += len(done)
