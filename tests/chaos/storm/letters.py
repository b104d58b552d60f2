"""The rules of the checker for failures and dead letters.

The attempts of a message go on in its channel's dead topic and when it is sent back, so all its
deliveries have one order, its life. Between two of them may be others that are in no log.

letter    a dead letter that its failures cannot justify, or of another reason than it says; a
          message that came back from the dead topic, and nobody sent it
undead    a delivery in the channel of a message that was rejected there, or has failed too often
company   a message convicted by a death in which its consumer held others too; a suspect that was
          handed out together with others
early     (see `checker`) a message that failed, before the channel's retry delay
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from chaos.storm.history import Outcome, Reason, Settling, packed
from chaos.storm.tables import NEVER, Consumer, History, Span, life
from chaos.storm.verdict import TICK, Verdict

Row = np.void
_FAILS = (Settling.REQUEUE, Settling.RETRY, Settling.REJECT)
_SHARE = 0.9  # of a retry delay: the least that its jitter leaves


def redriven(history: History, channel: int) -> dict[int, list[Span]]:
    """When somebody may have sent a dead letter of a message back, by the message's number."""
    items = history.items
    back = items[(items["kind"] == Settling.REDRIVE) & (items["home"] == channel)]
    found: dict[int, list[Span]] = defaultdict(list)
    for item in back[back["outcome"] != Outcome.REFUSED]:
        found[int(item["message"])].append(Span(int(item["begin"]), int(item["end"])))
    return found


class _Sent:
    """The dead letters of a channel that somebody sent back, or may have."""

    def __init__(self, history: History, channel: int) -> None:
        items = history.items
        back = items[(items["kind"] == Settling.REDRIVE) & (items["home"] == channel)]
        self._outcomes = {
            (int(item["message"]), int(item["attempts"])): int(item["outcome"]) for item in back
        }

    def perhaps(self, row: Row) -> bool:
        found = self._outcomes.get((int(row["message"]), int(row["attempts"])), Outcome.REFUSED)
        return found != Outcome.REFUSED

    def before(self, letter: Row, row: Row) -> bool:
        """Whether that was so before the next delivery. Where the call was cut off, the same letter
        in the dead topic says that it was not."""
        outcome = self._outcomes.get((int(letter["message"]), int(letter["attempts"])))
        same = all(letter[name] == row[name] for name in ("channel", "reason", "failures"))
        return outcome == Outcome.DONE or (outcome == Outcome.UNKNOWN and not same)


def _lives(history: History, channel: int) -> Iterator[list[Row]]:
    """The deliveries of each message in their order."""
    rows, _ = history.by_message()
    rows = rows[rows["home"] == channel]
    for _, life_ in itertools.groupby(rows, key=lambda row: int(row["message"])):
        yield list(life_)


def _has_letters(history: History, channel: int) -> bool:
    return any(home == channel and history.is_dead(c) for c, home in enumerate(history.homes))


def last_letters(history: History, channel: int) -> tuple[list[Row], list[Row]]:
    """Of messages that were dead letters when they were last delivered, that delivery: of those
    that nobody sent back, and of those that somebody may have sent back."""
    if not _has_letters(history, channel):
        return [], []
    sent = _Sent(history, channel)
    last = [life_[-1] for life_ in _lives(history, channel)]
    last = [row for row in last if int(row["channel"]) != channel]
    return [row for row in last if not sent.perhaps(row)], [
        row for row in last if sent.perhaps(row)
    ]


def arrivals(history: History, channel: int) -> Counter[int]:
    """How often messages of this channel came to its dead topic, by reason."""
    found: Counter[int] = Counter()
    if not _has_letters(history, channel):
        return found
    sent = _Sent(history, channel)
    for life_ in _lives(history, channel):
        last: Row | None = None
        for row in life_:
            dead = int(row["channel"]) != channel
            there = last is not None and int(last["channel"]) != channel
            if dead and not (there and not sent.before(last, row)):
                found[int(row["reason"])] += 1
            last = row
    return found


def letters(history: History, verdict: Verdict) -> None:
    """All rules of this file."""
    for channel in range(len(history.names)):
        counts = any(
            each.get("max_attempts") or each.get("retry_delay")
            for each in history.in_force(channel)
        )
        if not history.is_dead(channel) and (counts or _has_letters(history, channel)):
            _Channel(history, verdict, channel).check()


@dataclass
class _Settled:
    kind: int
    outcome: int
    span: Span
    delay: int


class _Channel:
    """One channel with its dead topic."""

    def __init__(self, history: History, verdict: Verdict, channel: int) -> None:
        self.history, self.verdict, self.channel = history, verdict, channel
        self.name = history.channel_name(channel)
        self.settled: dict[tuple[int, int], list[_Settled]] = defaultdict(list)
        for item in history.items[history.items["home"] == channel]:
            self.settled[int(item["message"]), int(item["attempts"])].append(
                _Settled(
                    int(item["kind"]),
                    int(item["outcome"]),
                    Span(int(item["begin"]), int(item["end"])),
                    int(item["delay"]),
                )
            )
        self.sent = _Sent(history, channel)
        publishes = history.of_topic(history.names[channel][0])
        self.published: dict[int, Any] = {int(publish["key"]): publish for publish in publishes}

    @cached_property
    def by_file(self) -> dict[int, list[Row]]:
        """The channel's deliveries by process."""
        found: dict[int, list[Row]] = defaultdict(list)
        rows = self.history.deliveries
        for row in rows[rows["channel"] == self.channel]:
            found[int(row["file"])].append(row)
        return found

    @cached_property
    def together(self) -> Counter[tuple[int, int]]:
        """How many messages each take returned."""
        return Counter(
            (int(row["file"]), int(row["op"])) for row in itertools.chain(*self.by_file.values())
        )

    # -- one delivery

    def items(self, row: Row) -> list[_Settled]:
        return self.settled.get((int(row["message"]), int(row["attempts"])), [])

    def did(self, row: Row, *kinds: Settling) -> bool:
        """It may have been settled so."""
        return any(i.kind in kinds and i.outcome != Outcome.REFUSED for i in self.items(row))

    def surely(self, row: Row, *kinds: Settling) -> bool:
        return any(i.kind in kinds and i.outcome == Outcome.DONE for i in self.items(row))

    def consumer(self, row: Row) -> Consumer:
        return self.history.consumers[int(row["file"])]

    def closed(self, row: Row) -> int:
        """When its consumer may have begun to close."""
        return min((at for at in self.consumer(row).closes if at >= row["begin"]), default=NEVER)

    def gave_back_at_close(self, row: Row) -> bool:
        """Whether its consumer closed, and lived on."""
        consumer = self.consumer(row)
        return any(
            begin >= row["begin"] and end != NEVER
            for begin, end in zip(consumer.closes, consumer.closed, strict=True)
        )

    def may_have_timed_out(self, row: Row, until: int) -> bool:
        timeout = self.consumer(row).timeout
        return timeout != NEVER and int(row["begin"]) + timeout - TICK <= until

    def may_have_died(self, row: Row, until: int) -> bool:
        """Its process, or the gateway that held it, died with it."""
        consumer = self.consumer(row)
        if consumer.streams:
            return any(blow.meets(int(row["begin"]), until) for blow in self.history.blows)
        return consumer.killed <= until and not self.gave_back_at_close(row)

    def may_have_failed(self, row: Row, until: int) -> bool:
        """Before the next delivery came, which was at `until`."""
        if self.did(row, *_FAILS):
            return True
        if self.surely(row, Settling.RELEASE):
            return False
        return self.may_have_timed_out(row, until) or self.may_have_died(row, until)

    def surely_died(self, row: Row, until: int) -> bool:
        """Its process died with it, and nothing else can have come before."""
        consumer = self.consumer(row)
        return (
            not consumer.streams
            and consumer.killed != NEVER
            and consumer.killed <= until
            and not self.items(row)
            and self.closed(row) == NEVER
            and not self.may_have_timed_out(row, until)
            and not any(end.meets(int(row["begin"]), until) for end in self.history.endings)
        )

    def held_too(self, row: Row, begin: int, until: int) -> Row | None:
        """Another delivery that its process surely held from `begin` to `until`."""
        for other in self.by_file[int(row["file"])]:
            if (
                other["message"] != row["message"]
                and int(other["end"]) <= begin
                and not any(item.span.begin <= until for item in self.items(other))
                and self.closed(other) > until
                and not self.may_have_timed_out(other, until)
                and not any(end.meets(int(other["begin"]), until) for end in self.history.endings)
            ):
                return other
        return None

    # -- settings

    def limits(self, begin: int, end: int) -> set[int | None]:
        """Of failures, that may have held then."""
        return {
            each.get("max_attempts") for each in self.history.in_force(self.channel, begin, end)
        }

    def the_limit(self, begin: int, end: int) -> int | None:
        """The one that surely held all the time; None: there is none."""
        found = self.limits(begin, end)
        return found.pop() if len(found) == 1 else None

    def counts(self, begin: int, end: int) -> bool:
        """Whether the channel surely counted failures all the time."""
        return all(
            each.get("max_attempts") or each.get("retry_delay")
            for each in self.history.in_force(self.channel, begin, end)
        )

    # -- lives

    def check(self) -> None:
        for life_ in _lives(self.history, self.channel):
            self.live(life_)

    def add(self, rule: str, text: str, *rows: Row) -> None:
        shown = "; before: ".join(self.history.describe(row) for row in rows)
        self.verdict.add(rule, f"{text}: {shown}")

    def live(self, rows: list[Row]) -> None:
        may, sure, attempts = 0, 0, 0  # failures since it was sent to the channel last
        begin = int(rows[0]["begin"])
        key = int(rows[0]["key"]) & ~0xFFFF
        if key in self.published:
            begin = int(self.published[key]["begin"])
        last: Row | None = None
        for row in rows:
            until, hidden = int(row["end"]), int(row["attempts"]) - attempts - 1
            dead = int(row["channel"]) != self.channel
            attempts = int(row["attempts"])
            was_dead = last is not None and int(last["channel"]) != self.channel
            if was_dead and self.sent.before(last, row):
                may, sure, was_dead = 0, 0, False
                begin = int(last["begin"])
                self.verdict.counts["dead letters sent back"] += 1
                sent = True
            else:
                sent = last is None
            if was_dead and not dead:
                self.add("letter", "nobody sent it back", row, last)
                sent = True
            if was_dead and dead:
                last = row  # it was given back there
                continue
            may += hidden
            if last is not None and not sent:
                may += self.may_have_failed(last, until)
                if self.counts(int(last["begin"]), until):
                    sure += self.surely(last, Settling.REQUEUE, Settling.RETRY)
                self.after_failure(row, last, hidden, sure, begin)
            if dead:
                self.letter(row, None if sent else last, hidden, may, begin)
            else:
                limit = self.the_limit(begin, until)
                if limit and sure >= limit:
                    self.add("undead", f"{sure} failures, and {limit} are allowed", row)
                if last is not None and not sent and self.surely(last, Settling.REJECT):
                    self.add("undead", "it was rejected", row, last)
            last = row

    def after_failure(self, row: Row, last: Row, hidden: int, sure: int, begin: int) -> None:
        """A delivery in the channel, right after another one."""
        until = int(row["end"])
        if hidden or int(row["channel"]) != self.channel:
            return
        retried = [
            item
            for item in self.items(last)
            if item.kind == Settling.RETRY and item.outcome == Outcome.DONE
        ]
        delays = {
            tuple(each["retry_delay"]) if each.get("retry_delay") else None
            for each in self.history.in_force(self.channel, int(last["begin"]), until)
        }
        delay = delays.pop() if len(delays) == 1 else None
        if delay and retried:
            seconds = min(delay[0] * 2 ** (max(sure, 1) - 1), delay[1]) * _SHARE
            due = retried[0].span.begin + int(seconds * 1e9)
            self.verdict.counts["messages that failed and were put off"] += 1
            if until < due - TICK:
                self.add("early", f"put off to {due}", row, last)
        if self.the_limit(int(last["begin"]), until) and self.surely_died(last, until):
            self.suspect(row, last)

    def suspect(self, row: Row, last: Row) -> None:
        """It is handed out alone."""
        if self.consumer(row).streams:
            return
        self.verdict.counts["suspects handed out"] += 1
        if self.together[int(row["file"]), int(row["op"])] > 1:
            self.add("company", "a suspect came together with others", row, last)
        other = self.held_too(row, int(row["begin"]), int(row["end"]))
        if other is not None:
            self.add(
                "company",
                f"a suspect came to who held {self.history.describe(other)}",
                row,
                last,
            )

    def letter(self, row: Row, last: Row | None, hidden: int, may: int, begin: int) -> None:
        """A message came to the dead topic. last: its delivery in the channel before that."""
        reason, until, claimed = Reason(int(row["reason"])), int(row["end"]), int(row["failures"])
        self.verdict.counts[f"dead letters, {reason.name.lower()}"] += 1
        settings = self.history.in_force(self.channel, begin, until)
        wrong = ""
        if int(row["source"]) != packed(self.name):
            wrong = (
                "it says that it comes from elsewhere, or another error, or a time that cannot be"
            )
        elif reason == Reason.NONE:
            wrong = "it has no reason"
        elif claimed > may:
            wrong = f"it says {claimed} failures, and there can be {may}"
        elif reason == Reason.ATTEMPTS:
            least = min(
                (each["max_attempts"] for each in settings if each.get("max_attempts")),
                default=NEVER,
            )
            if min(may, claimed) < least:
                wrong = f"{claimed} failures ({may} can be) are none too many"
            elif last is not None and not hidden:
                self.convicted(row, last)
        elif reason == Reason.REJECTED:
            if last is None or not self.did(last, Settling.REJECT):
                wrong = "nobody rejected it"
        elif reason == Reason.EXPIRED:
            wrong = self.expired(row, settings, begin)
        elif reason == Reason.OVERFLOW:
            if last is not None:
                wrong = "it was delivered, so it was not to make room"
            elif not any(each.get("overflow_to_dead") for each in settings):
                wrong = "what makes room does not become a dead letter"
        if wrong:
            self.add("letter", wrong, *filter(lambda each: each is not None, (row, last)))

    def expired(self, row: Row, settings: list[dict[str, Any]], begin: int) -> str:
        """begin: of its publish, or of its stay in the channel since it was sent back; then the
        channel's time alone counts, from then on."""
        publish = self.published.get(int(row["key"]) & ~0xFFFF)
        if publish is None:
            return ""
        lives = [life(each) for each in settings]
        first = begin == int(publish["begin"])
        if publish["ttl"] and first:
            lives.append(int(publish["ttl"]))
        if not any(each.get("expired_to_dead") for each in settings):
            return "what expires does not become a dead letter"
        # A deferred message of a channel without a time may go to disk, where the publish alone is
        # noted: a time that the channel gets later counts from then.
        always = not any(life(each) == NEVER for each in settings)
        since = begin + int(publish["defer"]) if first and always else begin
        return "its time was not over" if since + min(lives) > int(row["end"]) + TICK else ""

    def convicted(self, row: Row, last: Row) -> None:
        """By a death: it was alone then."""
        until = int(row["end"])
        if not self.the_limit(int(last["begin"]), until) or not self.surely_died(last, until):
            return
        self.verdict.counts["convicted by a death"] += 1
        killed = self.consumer(last).killed
        other = self.held_too(last, max(killed, int(last["end"])), until)
        if other is not None:
            self.add(
                "company",
                f"convicted by a death that also met {self.history.describe(other)}",
                row,
                last,
            )
