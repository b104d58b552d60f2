"""The rules of the checker for channels that have settings: limits, a time to live, attempts.

Such a channel may be without a message that was published. So each message has one of these fates:
it was finished, in the channel or as a dead letter; it was dropped, by a policy that the channel
had then, and before it was delivered; its time was over. Where settings change, those count that
may have held.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

import numpy as np
from chaos.storm.history import Counter, Outcome, Reason, Settling, Verb, describe_key
from chaos.storm.letters import arrivals, last_letters, redriven
from chaos.storm.tables import NEVER, Array, History, life, messages_of
from chaos.storm.verdict import TICK, Verdict

_DROPS = ("drop-oldest", "drop-newest")


def overflow(settings: dict[str, Any]) -> str:
    """The word of these settings."""
    return str(settings.get("overflow", "disk"))


def least(of: Iterable[int]) -> int:
    return min(of, default=NEVER)


def may_lose(history: History, channel: int) -> bool:
    """Whether its settings ever let a message go that nobody took."""
    return any(
        overflow(settings) in _DROPS or life(settings) != NEVER
        for settings in history.in_force(channel)
    )


def owed(history: History, channel: int) -> Array:
    """Publishes that returned and had this channel."""
    topic, name = history.names[channel]
    publishes = history.of_topic(topic)
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


# ---- fates ----


def finished_keys(history: History, channel: int) -> Array:
    """The messages that may have been finished in it, or as its dead letters."""
    items = history.items
    chosen = (items["home"] == channel) & (items["kind"] == Settling.FINISH)
    return np.unique(items["key"][chosen & (items["outcome"] != Outcome.REFUSED)])


def _perhaps_finished(history: History, channel: int) -> int:
    """How many messages only a call may have finished in it that a death cut off."""
    items = history.items
    chosen = items[(items["home"] == channel) & (items["kind"] == Settling.FINISH)]
    done = chosen["key"][chosen["outcome"] == Outcome.DONE]
    return len(np.setdiff1d(chosen["key"][chosen["outcome"] == Outcome.UNKNOWN], done))


def _earliest_end(history: History, channel: int, publishes: Array) -> Array:
    """When the time of these messages may have been over at the earliest."""
    lives = least(life(settings) for settings in history.in_force(channel))
    own = np.where(publishes["ttl"] > 0, publishes["ttl"], NEVER)
    its = np.minimum(own, lives)
    since = publishes["begin"] + publishes["defer"]
    return np.where(its == NEVER, NEVER, since + np.where(its == NEVER, 0, its))


def _may_have_expired(history: History, channel: int, publishes: Array) -> Array:
    """And are nowhere now."""
    to_dead = all(each.get("expired_to_dead", False) for each in history.in_force(channel))
    over = _earliest_end(history, channel, publishes) <= history.end
    return over & (not to_dead)


def _may_be_dropped(history: History, channel: int, publishes: Array) -> Array:
    """And are nowhere now, if they were never delivered."""
    may = np.zeros(len(publishes), bool)
    others = history.of_topic(history.names[channel][0])["end"]
    pushed = np.ones(len(publishes), bool)  # by a publish that had not ended when its own began
    if len(others):
        last = np.sort(others)[-2:]
        later = np.where(publishes["end"] == last[-1], last[0] if len(last) > 1 else 0, last[-1])
        pushed = later >= publishes["begin"]
    for reign in history.reigns[channel]:
        held = publishes["begin"] <= reign.span.end
        word = overflow(reign.settings)
        if word == "drop-newest":
            may |= held & (publishes["end"] >= reign.span.begin)
        elif word == "drop-oldest" and not reign.settings.get("overflow_to_dead"):
            may |= held & pushed
    return may


def _may_be_dropped_again(history: History, channel: int, letters: Iterable[Any]) -> list[int]:
    """The keys of dead letters that somebody sent back, and that the channel may have dropped
    since."""
    drops = [
        reign.span.end
        for reign in history.reigns[channel]
        if overflow(reign.settings) == "drop-oldest" and not reign.settings.get("overflow_to_dead")
    ]
    return [int(row["key"]) for row in letters if int(row["begin"]) <= max(drops, default=-1)]


def lost(history: History, verdict: Verdict) -> None:
    """Every message that a channel was to have has a fate that its settings allow; and the channel
    has counted those that are gone."""
    for channel in range(len(history.names)):
        publishes = owed(history, channel)
        keys = messages_of(publishes)
        owner = np.repeat(np.arange(len(publishes)), publishes["parts"])
        missing = ~np.isin(keys, finished_keys(history, channel))
        keys, owner = keys[missing], owner[missing]
        rows = history.deliveries
        delivered = np.isin(keys, rows["key"][rows["home"] == channel])
        left, sent = last_letters(history, channel)
        stays = np.isin(keys, [int(row["key"]) for row in left])
        dropped = _may_be_dropped(history, channel, publishes)[owner] & ~delivered
        dropped |= np.isin(keys, _may_be_dropped_again(history, channel, sent))
        expired = _may_have_expired(history, channel, publishes)[owner] & ~stays
        for key, came, dead in zip(
            keys[~dropped & ~expired].tolist(),
            delivered[~dropped & ~expired].tolist(),
            stays[~dropped & ~expired].tolist(),
            strict=True,
        ):
            how = "is a dead letter that was" if dead else "was delivered and" if came else ""
            name = history.channel_name(channel)
            how = f"{how} never finished" if how else "never delivered"
            verdict.add("lost", f"{name} {describe_key(key)} was published and {how}")
        gone = int((dropped | expired).sum())
        verdict.counts["messages owed to channels"] += int(publishes["parts"].sum())
        verdict.counts["of these dropped or expired"] += gone
        if history.promise(channel) is not None:
            _counted(history, verdict, channel, gone)


def _counted(history: History, verdict: Verdict, channel: int, gone: int) -> None:
    """A death may lose one count, or count one message twice."""
    mine = [count for count in history.counted if count.channel == channel]
    if not mine:
        return
    total: Tally[int] = Tally()
    for count in mine:
        total[count.counter] += count.value
    topic, name = history.names[channel][0], history.channel_name(channel)
    publishes = history.of_topic(topic)
    settings = history.in_force(channel)
    words = {overflow(each) for each in settings}
    lives = any(life(each) != NEVER for each in settings) or bool((publishes["ttl"] > 0).any())
    for counter, possible in (
        (Counter.DROPPED, "drop-newest" in words),
        (Counter.DROPPED_OLDEST, "drop-oldest" in words),
        (Counter.REJECTED, "reject" in words),
        (Counter.EXPIRED, lives),
    ):
        if total[counter] and not possible:
            verdict.add("count", f"{name} has counted {total[counter]} {counter.name} without it")
    arrived = arrivals(history, channel)
    letters = sum(arrived.values())
    cast_out = gone + arrived[Reason.EXPIRED] + arrived[Reason.OVERFLOW]
    deaths = len(history.blows) + sum(
        history.roles.get(actor, ("", ""))[1] in (topic, history.promise(channel).dead)
        for actor in history.kills
    )
    unknown = int(publishes["parts"][publishes["outcome"] == Outcome.UNKNOWN].sum())
    unknown += _perhaps_finished(history, channel)
    counted = total[Counter.DROPPED] + total[Counter.DROPPED_OLDEST] + total[Counter.EXPIRED]
    quiet = all(count.quiet for count in mine)
    later = sum(count.waiting for count in mine if lives and count.counter == Counter.EXPIRED)
    for what, has, are, more in (
        ("dropped or expired", counted, cast_out, unknown),
        ("dead letters", total[Counter.DEAD_LETTERED], letters, 0),
    ):
        if has > are + deaths + more or (quiet and has < are - deaths - later):
            verdict.add(
                "count",
                f"{name} has counted {has} messages {what}, and {are} are; "
                f"{deaths} deaths may have cost one each, {more} are of calls cut off",
            )
        verdict.counts[f"messages that channels counted as {what}"] += has


# ---- expiry ----


def expired(history: History, verdict: Verdict) -> None:
    """A take that began when a message's time was over does not return it."""
    rows = history.deliveries
    for topic in history.topics:
        publishes = history.of_topic(topic)
        publishes = publishes[publishes["outcome"] == Outcome.DONE]
        keys = messages_of(publishes)
        owner = np.repeat(np.arange(len(publishes)), publishes["parts"])
        order = np.argsort(keys)
        keys, owner = keys[order], owner[order]
        for channel, name in enumerate(history.names):
            if name[0] != topic or history.is_dead(channel) or not len(keys):
                continue
            lives = any(life(each) != NEVER for each in history.in_force(channel))
            mine = rows[rows["channel"] == channel]
            at = np.minimum(np.searchsorted(keys, mine["key"]), len(keys) - 1)
            known = keys[at] == mine["key"]
            of = publishes[owner[at]]
            chosen = known & ((of["ttl"] > 0) | lives)
            sent_back = redriven(history, channel)
            for row, publish in zip(mine[chosen], of[chosen], strict=True):
                since = int(publish["end"]) + int(publish["defer"])
                its = _longest(history, channel, int(publish["begin"]), int(row["end"]))
                lives = [
                    s.end for s in sent_back.get(int(row["message"]), ()) if s.begin <= row["end"]
                ]
                if lives:  # a new one: the channel's time, from then on
                    since = max(lives)
                elif publish["ttl"]:
                    its = min(its, int(publish["ttl"]))
                if NEVER not in (its, since) and int(row["begin"]) > since + its + TICK:
                    verdict.add(
                        "expired", f"its time was over at {since + its}: {history.describe(row)}"
                    )
            verdict.counts["deliveries of messages that expire"] += int(chosen.sum())


def _longest(history: History, channel: int, begin: int, end: int) -> int:
    return max((life(each) for each in history.in_force(channel, begin, end)), default=NEVER)


# ---- limits ----


def limit(history: History, verdict: Verdict) -> None:
    """Messages whose publish had ended, and whose first take had not begun, waited. A death in a
    take may hide one of them from the limit for a moment."""
    for channel, (topic, _) in enumerate(history.names):
        settings = history.in_force(channel)
        if history.promise(channel) is None or not all(
            overflow(each) != "disk" and each.get("max_messages") for each in settings
        ):
            continue
        most = max(each["max_messages"] for each in settings)
        publishes = history.of_topic(topic)
        publishes = publishes[(publishes["outcome"] == Outcome.DONE) & (publishes["defer"] == 0)]
        keys = messages_of(publishes)
        ends = np.repeat(publishes["end"], publishes["parts"])
        rows, again = history.by_message()
        first = np.ones(len(rows), bool)
        first[again] = False
        rows = rows[first & (rows["channel"] == channel) & (rows["attempts"] == 1)]
        rows = rows[np.argsort(rows["key"])]
        at = np.minimum(np.searchsorted(rows["key"], keys), max(len(rows) - 1, 0))
        if not len(rows) or not len(keys):
            continue
        waited = (rows["key"][at] == keys) & (rows["begin"][at] > ends)
        begins = np.sort(ends[waited])
        gone = np.sort(rows["begin"][at][waited])
        waiting = np.arange(1, len(begins) + 1) - np.searchsorted(gone, begins, "left")
        deaths = sum(
            consumer.killed != NEVER and consumer.channel == channel
            for consumer in history.consumers.values()
        )
        verdict.counts["messages that waited within a limit"] += len(begins)
        if len(begins) and waiting.max() > most + deaths:
            place = int(np.argmax(waiting))
            verdict.add(
                "limit",
                f"{history.channel_name(channel)}: {waiting[place]} messages waited at "
                f"{begins[place]}, and {most} may, {deaths} more after deaths",
            )


def disk(history: History, verdict: Verdict) -> None:
    """Nothing goes to disk from a channel that never had overflow=disk, but at a stop."""
    stopped = least(ending.begin for ending in history.endings)
    for count in history.counted:
        if any(overflow(each) == "disk" for each in history.in_force(count.channel)):
            continue
        spilled = count.counter == Counter.SPILLED
        written = count.counter == Counter.BYTES_ON_DISK and count.at < stopped
        if count.value and (spilled or written):
            verdict.add(
                "disk",
                f"{history.channel_name(count.channel)} keeps its messages in memory, and "
                f"{count.counter.name} is {count.value}",
            )
