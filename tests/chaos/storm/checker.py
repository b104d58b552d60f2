"""The verdict on a storm: its history in, violations out. Also a command, with PYTHONPATH=tests:
`python -m chaos.storm.checker DIRECTORY`.

It knows nothing of shmq but what is promised (README); it reads the logs of `history`, where a call
has a begin and, if its process lived, an end. Times decide only where they must: what a call did
happened between its begin and its end.

torn      a delivery whose body is not the one published, or that nobody published, or with another
          id than elsewhere
lost      a publish returned, and a channel of its time has not finished one of its messages, and
          its settings cannot have dropped it or let it expire
split     a publish that died is in some channels or parts and not in others; one that was refused
          is in any; a full channel did without a part of one
finished  a delivery after a finish that returned, or two finishes of one message
attempts  two deliveries of a message with one number, in the wrong order, or more numbers left out
          than takes of the channel may have given what is in no log: those of the dead, the
          gateway's, those that lasted longer than the message timeout
robbed    a delivery of a message that somebody else holds: not dead, not timed out, not given back
early     a deferred message, or one put off by a requeue, before its time
order     a first delivery out of the order of publishing, on a channel where that is promised; ids
          that do not rise
late      the messages of a dead consumer, where others wait, come later than the bound
expired   a take that began after the end of a message's time returns it
count     a channel has counted more or fewer messages as dropped or dead than are gone
limit     more messages wait in a channel than it may hold
disk      a channel that keeps its messages in memory has written some to disk

`letters` has the rules for failures and dead letters: letter, undead, company. `results` has the
one for results stores: result. `errand_rules` has the one for queues and pools: errand.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from chaos.storm import errand_rules, letters, policies, results, spark_rules
from chaos.storm.history import (
    Outcome,
    Settling,
    describe_key,
)
from chaos.storm.tables import NEVER, Array, History, delivery_code, messages_of
from chaos.storm.verdict import TICK, Verdict

ID_STEP_BITS = 10
GIVE_BACK = (
    Settling.REQUEUE,
    Settling.RETRY,
    Settling.RELEASE,
    Settling.REJECT,
    Settling.REDRIVE,
)


def check(directory: Path) -> Verdict:
    """The verdict on the history in this directory."""
    history = History.read(directory)
    verdict = Verdict()
    for rule in (
        _count,
        _torn,
        policies.lost,
        _split,
        _finished,
        _attempts,
        _robbed,
        _early,
        _order,
        _clock,
        _late,
        policies.expired,
        policies.limit,
        policies.disk,
        letters.letters,
        results.results,
        errand_rules.errands,
        spark_rules.written_once,
    ):
        rule(history, verdict)
    return verdict


# ---- the rules ----


def _count(history: History, verdict: Verdict) -> None:
    publishes, deliveries = history.publishes, history.deliveries
    done = publishes["outcome"] == Outcome.DONE
    streamed = [place for place, consumer in history.consumers.items() if consumer.streams]
    many = [
        place
        for place, consumer in history.consumers.items()
        if consumer.file.role == "many-consumer"
    ]
    verdict.counts.update(
        {
            "publishes that returned": int(done.sum()),
            "messages of these": int(publishes["parts"][done].sum()),
            "publishes refused": int((publishes["outcome"] == Outcome.REFUSED).sum()),
            "publishes cut off by a death": int((publishes["outcome"] == Outcome.UNKNOWN).sum()),
            "deliveries": len(deliveries),
            "of these over TCP": int(np.isin(deliveries["file"], streamed).sum()),
            "of these to consumers of many topics": int(np.isin(deliveries["file"], many).sum()),
            "of these not the first": int((deliveries["attempts"] > 1).sum()),
            "kills": len(history.kills),
            "of these aimed into a call": len(history.aimed),
            "stops": sum(map(len, history.stops.values())),
        }
    )


def _with_ids(publishes: Array) -> Array:
    """Those that returned an id; over TCP none does."""
    return publishes[(publishes["outcome"] == Outcome.DONE) & (publishes["id"] != 0)]


def _torn(history: History, verdict: Verdict) -> None:
    deliveries = history.deliveries
    for row in deliveries[~deliveries["good"]]:
        verdict.add("torn", f"the body is not as it was published: {history.describe(row)}")
    for number, topic in enumerate(history.topics):
        channels = [
            c for c, home in enumerate(history.homes) if history.names[int(home)][0] == topic
        ]
        mine = deliveries[np.isin(deliveries["channel"], channels)]
        mine = mine[(mine["key"] != 0) | ~mine["good"]]  # timed out before it was read
        publishes = history.publishes[history.publishes["topic"] == number]
        keys = messages_of(publishes)
        for row in mine[~np.isin(mine["key"], keys)]:
            verdict.add("torn", f"nobody published it to this topic: {history.describe(row)}")
        # the id of each message, as its publish returned it or else as it was first delivered
        done = _with_ids(publishes)
        known = messages_of(done)
        base = np.repeat(done["id"], done["parts"])
        ids = base + ((known & np.uint64(0xFFFF)) << np.uint64(ID_STEP_BITS))
        known, ids = np.concatenate((known, mine["key"])), np.concatenate((ids, mine["id"]))
        first_keys, first = np.unique(known, return_index=True)
        expected = ids[first][np.searchsorted(first_keys, mine["key"])] if len(mine) else ids[:0]
        for row in mine[mine["id"] != expected]:
            verdict.add("torn", f"it has another id elsewhere: {history.describe(row)}")


def _split(history: History, verdict: Verdict) -> None:
    for topic in history.topics:
        channels = [
            number
            for number, name in enumerate(history.names)
            if name[0] == topic and history.promise(number) is not None
        ]
        publishes = history.of_topic(topic)
        keys, owner = (
            messages_of(publishes),
            np.repeat(np.arange(len(publishes)), publishes["parts"]),
        )
        parts = publishes["parts"].astype(np.int64)
        sure, perhaps = np.zeros(len(publishes), np.int64), np.zeros(len(publishes), np.int64)
        full = [number for number in channels if not policies.may_lose(history, number)]
        for channel in channels:
            came = history.deliveries["key"][history.deliveries["home"] == channel]
            present = np.bincount(owner[np.isin(keys, came)], minlength=len(publishes))
            if channel in full:
                sure += present
            else:
                perhaps += present
                _skipped(history, verdict, channel, publishes, present)
        perhaps += np.where(publishes["ttl"] > 0, sure, 0)
        sure[publishes["ttl"] > 0] = 0
        whole = np.where(publishes["ttl"] > 0, 0, parts * len(full))
        refused, done = (publishes["outcome"] == each for each in (Outcome.REFUSED, Outcome.DONE))
        part = (sure > 0) & (sure < whole) | (perhaps > 0) & (sure == 0) & (whole > 0)
        for row in np.flatnonzero(np.where(refused, sure + perhaps > 0, ~done & part)):
            how = "was refused" if refused[row] else "was cut off by its producer's death"
            verdict.add(
                "split",
                f"the publish of {describe_key(int(publishes['key'][row]))} to {topic} {how}, and "
                f"{sure[row]} of its {whole[row]} messages ({parts[row]} in each of "
                f"{len(full)} channels) are there, and {perhaps[row]} in others",
            )
        cut_off = ~refused & ~done
        verdict.counts["of those cut off, there"] += int(
            (cut_off & (sure == whole) & (whole > 0)).sum()
        )


def _skipped(
    history: History, verdict: Verdict, channel: int, publishes: Array, present: Array
) -> None:
    """A channel that is full does without a whole publish."""
    settings = history.in_force(channel)
    if any(
        policies.overflow(each) != "drop-newest" or each.get("message_ttl") for each in settings
    ):
        return
    part = (present > 0) & (present < publishes["parts"]) & (publishes["ttl"] == 0)
    for row in np.flatnonzero(part):
        verdict.add(
            "split",
            f"{history.channel_name(channel)} got {present[row]} of the {publishes['parts'][row]} "
            f"messages of {describe_key(int(publishes['key'][row]))}",
        )
    verdict.counts["publishes that a full channel did without"] += int(
        ((present == 0) & (publishes["outcome"] == Outcome.DONE)).sum()
    )


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


def _attempts(history: History, verdict: Verdict) -> None:
    rows, again = history.by_message()
    hidden: Counter[int] = Counter()  # takes that nobody has logged, by channel
    for consumer in history.consumers.values():
        home = int(history.homes[consumer.channel])
        hidden[home] += consumer.streams + consumer.slow_takes
        if consumer.killed != NEVER and consumer.open_takes:
            hidden[home] += 1
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
    too_many = left_out > (most[rows["home"]] if len(rows) else 0)
    for row in rows[too_many | (rows["attempts"] < 1)]:
        verdict.add("attempts", f"a delivery before it is missing: {history.describe(row)}")


def _released(history: History) -> Array:
    """For each delivery, sorted as `_by_message`: from when on somebody else may have it."""
    rows, _ = history.by_message()
    consumers = history.consumers
    begin = rows["begin"]
    release = np.full(len(rows), NEVER)
    timeout = np.array([consumers[place].timeout for place in rows["file"].tolist()], np.int64)
    timed = timeout != NEVER
    release[timed] = begin[timed] + timeout[timed]
    code = delivery_code(rows)
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
        np.isin(history.items["kind"], GIVE_BACK) & (history.items["outcome"] != Outcome.REFUSED)
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


def _places(code: Array, items: Array) -> Iterator[tuple[int, int]]:
    """(place of the delivery an item is of, when its call began)."""
    wanted = delivery_code(items)
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
    rows, again = history.by_message()
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
    keys = messages_of(deferred)
    order = np.argsort(keys)
    keys, due = keys[order], due[order]
    if len(keys):
        at = np.minimum(np.searchsorted(keys, deliveries["key"]), len(keys) - 1)
        early = (keys[at] == deliveries["key"]) & (deliveries["end"] < due[at] - TICK)
        for row, when in zip(deliveries[early], due[at][early], strict=True):
            verdict.add("early", f"due at {when}: {history.describe(row)}")
    rows, again = history.by_message()
    after = {int(place) - 1 for place in again}
    code = delivery_code(rows)
    items = history.items[
        np.isin(history.items["kind"], (Settling.REQUEUE, Settling.RELEASE))
        & (history.items["outcome"] == Outcome.DONE)
        & (history.items["delay"] > 0)
    ]
    wanted = delivery_code(items)
    for item, place in zip(items, np.searchsorted(code, wanted).tolist(), strict=True):
        if place not in after:
            continue
        due_at = int(item["begin"]) + int(item["delay"])
        dead = rows["channel"][place + 1] != rows["channel"][place]  # it waits there for nothing
        if rows["end"][place + 1] < due_at - TICK and not dead:
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
    deferred = messages_of(history.publishes[history.publishes["defer"] > 0])
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
        rows = _with_ids(history.of_topic(topic))
        last = rows["id"] + ((rows["parts"] - 1).astype(np.uint64) << np.uint64(ID_STEP_BITS))
        for before, place in _out_of_order(rows["begin"], rows["end"], rows["id"], last):
            verdict.add(
                "order",
                f"the id {int(rows['id'][place]):016x} of {describe_key(int(rows['key'][place]))} "
                f"to {topic} is lower than {int(last[before]):016x}, which was given before",
            )


def _late(history: History, verdict: Verdict) -> None:
    """Deaths on hungry channels: until the last of what was held is with somebody else."""
    rows, again = history.by_message()
    followed = np.full(len(rows), -1)
    followed[again - 1] = again
    code = delivery_code(rows)
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
