"""The verdict on a storm: its history in, violations out. Also a command, with PYTHONPATH=tests:
`python -m chaos.storm.checker DIRECTORY`.

It knows nothing of shmq but what is promised (README); it reads the logs of `history`, where a call
has a begin and, if its process lived, an end. Times decide only where they must: what a call did
happened between its begin and its end.

torn      a delivery whose body is not the one published, or that nobody published, or with another
          id than elsewhere
lost      a publish returned, and a channel of its time has not finished one of its messages
split     a publish that died is in some channels or parts and not in others; one that was refused
          is in any
finished  a delivery after a finish that returned, or two finishes of one message
attempts  two deliveries of a message with one number, in the wrong order, or more numbers left out
          than takes of the channel may have given what is in no log: those of the dead, the
          gateway's, those that lasted longer than the message timeout
robbed    a delivery of a message that somebody else holds: not dead, not timed out, not given back
early     a deferred message, or one put off by a requeue, before its time
order     a first delivery out of the order of publishing, on a channel where that is promised; ids
          that do not rise
late      the messages of a dead consumer, where others wait, come later than the bound
"""

from __future__ import annotations

import argparse
import bisect
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from chaos.storm.history import (
    Outcome,
    Settling,
    Verb,
    describe_key,
)
from chaos.storm.tables import NEVER, Array, History

MILLISECOND = 1_000_000
#: Deadlines are counted from a clock that lags by up to a tick of the kernel (CONFIG_HZ=100).
TICK = 10 * MILLISECOND
ID_STEP_BITS = 10
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


def check(directory: Path) -> Verdict:
    """The verdict on the history in this directory."""
    history = History.read(directory)
    verdict = Verdict()
    for rule in (
        _count,
        _torn,
        _lost,
        _split,
        _finished,
        _attempts,
        _robbed,
        _early,
        _order,
        _clock,
        _late,
    ):
        rule(history, verdict)
    return verdict


# ---- the rules ----


def _count(history: History, verdict: Verdict) -> None:
    publishes, deliveries = history.publishes, history.deliveries
    done = publishes["outcome"] == Outcome.DONE
    streamed = [place for place, consumer in history.consumers.items() if consumer.streams]
    verdict.counts.update(
        {
            "publishes that returned": int(done.sum()),
            "messages of these": int(publishes["parts"][done].sum()),
            "publishes refused": int((publishes["outcome"] == Outcome.REFUSED).sum()),
            "publishes cut off by a death": int((publishes["outcome"] == Outcome.UNKNOWN).sum()),
            "deliveries": len(deliveries),
            "of these over TCP": int(np.isin(deliveries["file"], streamed).sum()),
            "of these not the first": int((deliveries["attempts"] > 1).sum()),
            "kills": len(history.kills),
            "of these aimed into a call": len(history.aimed),
            "stops": sum(map(len, history.stops.values())),
        }
    )


def _messages(publishes: Array) -> Array:
    """Keys of all messages of these publishes, in their order."""
    parts = publishes["parts"].astype(np.int64)
    starts = np.cumsum(parts) - parts
    place = np.arange(parts.sum()) - np.repeat(starts, parts)
    return np.repeat(publishes["key"], parts) + place.astype(np.uint64)


def _of(history: History, topic: str) -> Array:
    return history.publishes[history.publishes["topic"] == history.topics.index(topic)]


def _with_ids(publishes: Array) -> Array:
    """Those that returned an id; over TCP none does."""
    return publishes[(publishes["outcome"] == Outcome.DONE) & (publishes["id"] != 0)]


def _torn(history: History, verdict: Verdict) -> None:
    deliveries = history.deliveries
    for row in deliveries[~deliveries["good"]]:
        verdict.add("torn", f"the body is not as it was published: {history.describe(row)}")
    for number, topic in enumerate(history.topics):
        channels = [c for c, name in enumerate(history.names) if name[0] == topic]
        mine = deliveries[np.isin(deliveries["channel"], channels)]
        mine = mine[(mine["key"] != 0) | ~mine["good"]]  # timed out before it was read
        publishes = history.publishes[history.publishes["topic"] == number]
        keys = _messages(publishes)
        for row in mine[~np.isin(mine["key"], keys)]:
            verdict.add("torn", f"nobody published it to this topic: {history.describe(row)}")
        # the id of each message, as its publish returned it or else as it was first delivered
        done = _with_ids(publishes)
        known = _messages(done)
        base = np.repeat(done["id"], done["parts"])
        ids = base + ((known & np.uint64(0xFFFF)) << np.uint64(ID_STEP_BITS))
        known, ids = np.concatenate((known, mine["key"])), np.concatenate((ids, mine["id"]))
        first_keys, first = np.unique(known, return_index=True)
        expected = ids[first][np.searchsorted(first_keys, mine["key"])] if len(mine) else ids[:0]
        for row in mine[mine["id"] != expected]:
            verdict.add("torn", f"it has another id elsewhere: {history.describe(row)}")


def _finished_keys(history: History, channel: int) -> Array:
    """The messages that may have been finished on it."""
    items = history.items
    chosen = (items["channel"] == channel) & (items["kind"] == Settling.FINISH)
    return np.unique(items["key"][chosen & (items["outcome"] != Outcome.REFUSED)])


def _owed(history: History, channel: int) -> Array:
    """Publishes that returned and had this channel."""
    topic, name = history.names[channel]
    publishes = _of(history, topic)
    publishes = publishes[publishes["outcome"] == Outcome.DONE]
    if history.promise(channel) is not None:
        return publishes
    asks = [ask for ask in history.asks if (ask.topic, ask.channel) == (topic, name)]
    made = [
        ask.span
        for ask in asks
        if ask.verb == Verb.CREATE
        and ask.outcome == Outcome.DONE
        and not any(
            other.verb == Verb.DELETE and other.span.end >= ask.span.begin for other in asks
        )
    ]
    if not made:
        return publishes[:0]
    since = max([made[0].end, *(ask.span.end for ask in asks if ask.verb == Verb.EMPTY)])
    return publishes[publishes["begin"] > since]


def _lost(history: History, verdict: Verdict) -> None:
    for channel in range(len(history.names)):
        owed = _messages(_owed(history, channel))
        delivered = history.deliveries["key"][history.deliveries["channel"] == channel]
        for key in owed[~np.isin(owed, _finished_keys(history, channel))].tolist():
            how = "delivered and never finished" if key in delivered else "never delivered"
            name = history.channel_name(channel)
            verdict.add("lost", f"{name} {describe_key(key)} was published and {how}")
        verdict.counts["messages owed to channels"] += len(owed)


def _split(history: History, verdict: Verdict) -> None:
    for topic in history.topics:
        channels = [
            number
            for number, name in enumerate(history.names)
            if name[0] == topic and history.promise(number) is not None
        ]
        publishes = _of(history, topic)
        open_ = publishes[publishes["outcome"] != Outcome.DONE]
        if not len(open_) or not channels:
            continue
        present = np.zeros(len(open_), np.int64)
        owner = np.repeat(np.arange(len(open_)), open_["parts"])
        keys = _messages(open_)
        for channel in channels:
            came = history.deliveries["key"][history.deliveries["channel"] == channel]
            present += np.bincount(owner[np.isin(keys, came)], minlength=len(open_))
        refused = open_["outcome"] == Outcome.REFUSED
        whole = open_["parts"].astype(np.int64) * len(channels)
        for row in np.flatnonzero(
            np.where(refused, present > 0, (present > 0) & (present < whole))
        ):
            how = "was refused" if refused[row] else "was cut off by its producer's death"
            verdict.add(
                "split",
                f"the publish of {describe_key(int(open_['key'][row]))} to {topic} {how}, and "
                f"{present[row]} of its {whole[row]} messages ({open_['parts'][row]} in each of "
                f"{len(channels)} channels) are there",
            )
        verdict.counts["of those cut off, there"] += int((~refused & (present == whole)).sum())


def _finished(history: History, verdict: Verdict) -> None:
    items, deliveries = history.items, history.deliveries
    finishes = items[(items["kind"] == Settling.FINISH) & (items["outcome"] == Outcome.DONE)]
    finishes = finishes[np.lexsort((finishes["attempts"], finishes["message"]))]
    twice = np.flatnonzero(finishes["message"][1:] == finishes["message"][:-1]) + 1
    for row in finishes[twice]:
        verdict.add("finished", f"finished twice: {history.describe(row)}")
    finishes = np.delete(finishes, twice)
    verdict.counts["messages finished"] += len(finishes)
    at = np.searchsorted(finishes["message"], deliveries["message"])
    at = np.minimum(at, max(len(finishes) - 1, 0))
    if not len(finishes):
        return
    finish = finishes[at]
    after = finish["message"] == deliveries["message"]
    # independent of the clocks: a later delivery has a higher number
    after &= (deliveries["attempts"] > finish["attempts"]) | (deliveries["begin"] > finish["end"])
    for row, before in zip(deliveries[after], finish[after], strict=True):
        verdict.add(
            "finished", f"delivered: {history.describe(row)}; after: {history.describe(before)}"
        )


def _by_message(history: History) -> tuple[Array, Array]:
    """Deliveries by message and attempts; places of those that follow one of the same message."""
    rows = history.deliveries
    rows = rows[np.lexsort((rows["attempts"], rows["message"]))]
    return rows, np.flatnonzero(rows["message"][1:] == rows["message"][:-1]) + 1


def _attempts(history: History, verdict: Verdict) -> None:
    rows, again = _by_message(history)
    hidden: Counter[int] = Counter()  # takes that nobody has logged, by channel
    for consumer in history.consumers.values():
        hidden[consumer.channel] += consumer.streams + consumer.slow_takes
        if consumer.killed != NEVER and consumer.open_takes:
            hidden[consumer.channel] += 1
    before = np.zeros(len(rows), np.int64)
    before[again] = rows["attempts"][again - 1]
    for row in rows[again][rows["attempts"][again] == rows["attempts"][again - 1]]:
        verdict.add("attempts", f"two deliveries with this number: {history.describe(row)}")
    for place in again[rows["end"][again] < rows["begin"][again - 1]].tolist():
        verdict.add(
            "attempts",
            f"delivered: {history.describe(rows[place])}; before: "
            f"{history.describe(rows[place - 1])}",
        )
    most = np.array([hidden[channel] for channel in range(len(history.names))])
    left_out = rows["attempts"] - before - 1
    too_many = left_out > (most[rows["channel"]] if len(rows) else 0)
    for row in rows[too_many | (rows["attempts"] < 1)]:
        verdict.add("attempts", f"a delivery before it is missing: {history.describe(row)}")


def _released(history: History) -> Array:
    """For each delivery, sorted as `_by_message`: from when on somebody else may have it."""
    rows, _ = _by_message(history)
    consumers = history.consumers
    begin = rows["begin"]
    release = np.full(len(rows), NEVER)
    timeout = np.array([consumers[place].timeout for place in rows["file"].tolist()], np.int64)
    timed = timeout != NEVER
    release[timed] = begin[timed] + timeout[timed]
    code = _delivery_code(rows)
    touches = history.items[
        (history.items["kind"] == Settling.TOUCH) & (history.items["outcome"] == Outcome.DONE)
    ]
    for place, at in _places(code, touches):
        if timed[place]:
            release[place] = max(release[place], at + timeout[place])

    @functools.cache
    def breaks(since: int) -> int:
        return min(
            (max(blow.begin, since) for blow in history.blows if blow.end >= since), default=NEVER
        )

    for place, row in enumerate(zip(rows["file"].tolist(), begin.tolist(), strict=True)):
        file, since = row
        consumer = consumers[file]
        ends = [consumer.killed, _next(consumer.closes, since)]
        if consumer.streams:
            ends.append(breaks(since))
        release[place] = min(release[place], *ends)
    given = history.items[
        (history.items["kind"] == Settling.REQUEUE) & (history.items["outcome"] != Outcome.REFUSED)
    ]
    for place, at in _places(code, given):
        release[place] = min(release[place], at)
    for ending in history.endings:  # what is in flight goes to disk
        free = np.minimum(release, np.maximum(begin, ending.begin))
        release = np.where(begin <= ending.end, free, release)
    return release


def _next(times: list[int], since: int) -> int:
    """The first of these that is not before."""
    at = bisect.bisect_left(times, since)
    return times[at] if at < len(times) else NEVER


def _delivery_code(rows: Array) -> Array:
    return rows["message"] * (1 << 16) + rows["attempts"]


def _places(code: Array, items: Array) -> Iterator[tuple[int, int]]:
    """(place of the delivery an item is of, when its call began)."""
    wanted = _delivery_code(items)
    at = np.minimum(np.searchsorted(code, wanted), max(len(code) - 1, 0))
    for place, same, begin in zip(
        at.tolist(),
        (code[at] == wanted).tolist() if len(code) else [],
        items["begin"].tolist(),
        strict=False,
    ):
        if same:
            yield place, begin


def _robbed(history: History, verdict: Verdict) -> None:
    rows, again = _by_message(history)
    release = _released(history)
    for place in again[rows["end"][again] < release[again - 1] - TICK].tolist():
        free = release[place - 1]
        until = "for ever" if free == NEVER else f"until {free}"
        verdict.add(
            "robbed",
            f"delivered: {history.describe(rows[place])}; held {until}: "
            f"{history.describe(rows[place - 1])}",
        )


def _early(history: History, verdict: Verdict) -> None:
    deliveries = history.deliveries
    deferred = history.publishes[history.publishes["defer"] > 0]
    due = np.repeat(deferred["begin"] + deferred["defer"], deferred["parts"])
    keys = _messages(deferred)
    order = np.argsort(keys)
    keys, due = keys[order], due[order]
    if len(keys):
        at = np.minimum(np.searchsorted(keys, deliveries["key"]), len(keys) - 1)
        early = (keys[at] == deliveries["key"]) & (deliveries["end"] < due[at] - TICK)
        for row, when in zip(deliveries[early], due[at][early], strict=True):
            verdict.add("early", f"due at {when}: {history.describe(row)}")
    rows, again = _by_message(history)
    after = {int(place) - 1 for place in again}
    code = _delivery_code(rows)
    items = history.items[
        (history.items["kind"] == Settling.REQUEUE)
        & (history.items["outcome"] == Outcome.DONE)
        & (history.items["delay"] > 0)
    ]
    wanted = _delivery_code(items)
    for item, place in zip(items, np.searchsorted(code, wanted).tolist(), strict=True):
        if place not in after:
            continue
        due_at = int(item["begin"]) + int(item["delay"])
        if rows["end"][place + 1] < due_at - TICK:
            verdict.add("early", f"put off to {due_at}: {history.describe(rows[place + 1])}")
    verdict.counts["messages deferred"] += len(keys)


def _out_of_order(begin: Array, end: Array, first: Array, last: Array) -> Iterator[tuple[int, int]]:
    """Places of two calls, of which one had ended before the other began and has higher ids."""
    by_end = np.argsort(end, kind="stable")
    highest = np.maximum.accumulate(last[by_end])
    ended = np.searchsorted(end[by_end], begin, "left")
    for place in np.flatnonzero(ended).tolist():
        if highest[ended[place] - 1] > first[place]:
            upto = last[by_end[: ended[place]]]
            yield int(by_end[int(np.argmax(upto))]), place


def _order(history: History, verdict: Verdict) -> None:
    """First deliveries. Two takes at a time may come in any order, within one it is strict."""
    deferred = _messages(history.publishes[history.publishes["defer"] > 0])
    for channel in range(len(history.names)):
        promise = history.promise(channel)
        if promise is None or not promise.fifo:
            continue
        rows = history.deliveries
        rows = rows[(rows["channel"] == channel) & (rows["attempts"] == 1)]
        rows = rows[~np.isin(rows["key"], deferred)]
        verdict.counts["first deliveries in order"] += len(rows)
        same = (rows["file"][1:] == rows["file"][:-1]) & (rows["op"][1:] == rows["op"][:-1])
        for place in np.flatnonzero(same & (rows["id"][1:] < rows["id"][:-1])).tolist():
            verdict.add(
                "order", f"after a later one in one take: {history.describe(rows[place + 1])}"
            )
        for before, place in _out_of_order(rows["begin"], rows["end"], rows["id"], rows["id"]):
            verdict.add(
                "order",
                f"delivered: {history.describe(rows[place])}; after the later "
                f"{history.describe(rows[before])}",
            )


def _clock(history: History, verdict: Verdict) -> None:
    """Ids rise with the publishes of a topic."""
    for topic in history.topics:
        rows = _with_ids(_of(history, topic))
        last = rows["id"] + ((rows["parts"] - 1).astype(np.uint64) << np.uint64(ID_STEP_BITS))
        for before, place in _out_of_order(rows["begin"], rows["end"], rows["id"], last):
            verdict.add(
                "order",
                f"the id {int(rows['id'][place]):016x} of {describe_key(int(rows['key'][place]))} "
                f"to {topic} is lower than {int(last[before]):016x}, which was given before",
            )


def _late(history: History, verdict: Verdict) -> None:
    """Deaths on hungry channels: until the last of what was held is with somebody else."""
    rows, again = _by_message(history)
    followed = np.full(len(rows), -1)
    followed[again - 1] = again
    code = _delivery_code(rows)
    settled = {
        place
        for place, _ in _places(
            code,
            history.items[
                (history.items["kind"] != Settling.TOUCH)
                & (history.items["outcome"] != Outcome.REFUSED)
            ],
        )
    }
    bound = float(history.settings.options.get("late_seconds", 1.0))
    for place, consumer in history.consumers.items():
        promise = history.promise(consumer.channel)
        if promise is None or not promise.hungry or consumer.killed == NEVER:
            continue
        mine = [
            row
            for row in np.flatnonzero(rows["file"] == place).tolist()
            if row not in settled
            and followed[row] >= 0
            and rows["end"][followed[row]] >= consumer.killed
        ]
        if not mine or consumer.closes or consumer.file.actor in history.aimed:
            continue
        last = max(mine, key=lambda row: rows["end"][followed[row]])
        came = int(rows["end"][followed[last]])
        spans = [down for down in history.downs if down.meets(consumer.killed, came)]
        spans += [
            span
            for actor, stopped in history.stops.items()
            if history.roles.get(actor, ("", ""))[1] == promise.topic
            for span in stopped
            if span.meets(consumer.killed, came)
        ]
        if not spans:
            delay = (came - consumer.killed) / 1e9
            verdict.delays.append(delay)
            if delay > bound:
                verdict.add(
                    "late",
                    f"{delay:.3f} s after the death of {consumer.file.name}: "
                    f"{history.describe(rows[followed[last]])}",
                )
        else:
            ended = max(span.end if span.end <= came else came for span in spans)
            verdict.disturbed.append((came - max(ended, consumer.killed)) / 1e9)


def main() -> int:
    parser = argparse.ArgumentParser(description="The verdict on a storm's history.")
    parser.add_argument("directory", type=Path, help="where its logs are")
    verdict = check(parser.parse_args().directory)
    print(verdict.show())
    return 1 if verdict.violations else 0


if __name__ == "__main__":
    sys.exit(main())
