"""The storm's checker sees each violation that is forged into a true history of a channel with
settings, and nothing in the same history without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos.storm.checker import check
from chaos.storm.history import Counter, Outcome, Reason, Settling, Verb, What
from chaos.storm.story import PolicyStory

Plant = Callable[[PolicyStory, bool], None]
PLANTS: list[tuple[str, Plant, dict[str, Any], dict[str, Any]]] = []


def plant(
    rule: str, later: dict[str, Any] | None = None, **settings: Any
) -> Callable[[Plant], Plant]:
    """A story of a channel with these settings (or later ones) that is true, or breaks this rule
    and no other."""

    def add(tell: Plant) -> Plant:
        PLANTS.append((rule, tell, settings, later or {}))
        return tell

    return add


# ---- dead letters ----


@plant("letter", max_attempts=2)
def convicted_after_one_failure(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    if not broken:
        story.fail(30, sent, attempts=2)
    attempts = 2 if broken else 3
    story.dead.bury(40, sent, attempts=attempts, failures=2 - broken)
    story.dead.settle(50, sent, attempts=attempts)


@plant("letter", max_attempts=2)
def a_release_is_no_failure(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.fail(30, sent, attempts=2, kind=Settling.RELEASE if broken else Settling.REQUEUE)
    story.dead.bury(40, sent, attempts=3, failures=2)
    story.dead.settle(50, sent, attempts=3)


@plant("letter", max_attempts=1)
def a_consumer_that_closed_did_not_fail(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    holder = story.consumer("x")
    holder.take(20, sent)
    if broken:
        holder.settle(25, kind=Settling.CLOSE)
    story.tell(What.KILL, 30, holder)
    story.dead.bury(40, sent)
    story.dead.settle(50, sent, attempts=2)


@plant("letter", max_attempts=2)
def more_failures_than_there_were(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.fail(30, sent, attempts=2)
    story.dead.bury(40, sent, attempts=3, failures=3 if broken else 2)
    story.dead.settle(50, sent, attempts=3)


@plant("letter", max_attempts=3)
def failures_before_it_was_sent_back(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent, kind=Settling.REJECT)
    story.dead.bury(30, sent, Reason.REJECTED)
    story.dead.settle(35, sent, kind=Settling.REDRIVE, attempts=2)
    last = 3 if broken else 5
    for attempts in range(3, last + 1):
        story.fail(10 * attempts + 10, sent, attempts=attempts)
    story.dead.bury(80, sent, attempts=last + 1, failures=3 if not broken else 1)
    story.dead.settle(90, sent, attempts=last + 1)


@plant("letter", later={"max_attempts": 1}, max_attempts=3)
def before_the_limit_was_lowered(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.actor("tuner", "q").ask(60 if broken else 15, Verb.CONFIGURE, "x", key=2)
    story.fail(20, sent)
    story.dead.bury(40, sent)
    story.dead.settle(50, sent, attempts=2)


@plant("letter")
def nobody_rejected_it(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent, kind=Settling.REQUEUE if broken else Settling.REJECT)
    story.dead.bury(30, sent, Reason.REJECTED)
    story.dead.settle(40, sent, attempts=2)


@plant("letter")
def it_comes_from_elsewhere(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent, kind=Settling.REJECT)
    story.dead.bury(30, sent, Reason.REJECTED, origin="q/w" if broken else "q/x")
    story.dead.settle(40, sent, attempts=2)


@plant("letter")
def it_has_no_reason(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent, kind=Settling.REJECT)
    story.dead.bury(30, sent, Reason.NONE if broken else Reason.REJECTED)
    story.dead.settle(40, sent, attempts=2)


@plant("letter")
def it_came_back_by_itself(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent, kind=Settling.REJECT)
    story.dead.bury(30, sent, Reason.REJECTED)
    kind = Settling.RELEASE if broken else Settling.REDRIVE
    story.dead.settle(35, sent, kind=kind, attempts=2)
    story.x.take_and_finish(40, sent, attempts=3)


@plant("letter", max_attempts=1)
def a_letter_whose_sender_died(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    undertaker = story.consumer("dead")
    undertaker.bury(30, sent)
    undertaker.settle(35, sent, kind=Settling.REDRIVE, attempts=2, dies=True)
    story.tell(What.KILL, 36, undertaker)
    story.dead.bury(40, sent, attempts=3, failures=2 if broken else 1)
    story.dead.settle(50, sent, attempts=3)


@plant("letter", message_ttl=0.5, expired_to_dead=True)
def its_time_was_not_over(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.dead.bury(400 if broken else 600, sent, Reason.EXPIRED, attempts=1, failures=0)
    story.dead.settle(700, sent)


@plant("letter", later={"message_ttl": 0.5, "expired_to_dead": True}, expired_to_dead=True)
def its_time_began_before_it_was_due(story: PolicyStory, broken: bool) -> None:
    """That may be where the channel had no time to live when it was due."""
    story.actor("tuner", "q").ask(5 if broken else 1100, Verb.CONFIGURE, "x", key=2)
    sent = story.send(10, 1, defer=1000)
    story.dead.bury(1200, sent, Reason.EXPIRED, attempts=1, failures=0)
    story.dead.settle(1300, sent)


@plant("letter", later={"message_ttl": 0.5, "expired_to_dead": True}, message_ttl=0.5)
def what_expires_is_not_kept(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.actor("tuner", "q").ask(800 if broken else 15, Verb.CONFIGURE, "x", key=2)
    story.dead.bury(600, sent, Reason.EXPIRED, attempts=1, failures=0)
    story.dead.settle(700, sent)


@plant("letter", max_messages=1, overflow="drop-oldest", overflow_to_dead=True)
def what_was_delivered_makes_no_room(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    if broken:
        story.fail(15, sent, kind=Settling.RELEASE)
    story.x.take_and_finish(30, story.send(20, 2))
    story.dead.bury(40, sent, Reason.OVERFLOW, attempts=1 + broken, failures=0)
    story.dead.settle(50, sent, attempts=1 + broken)


@plant(
    "lost",
    later={"max_messages": 1, "overflow": "drop-oldest"},
    max_messages=1,
    overflow="drop-oldest",
    overflow_to_dead=True,
)
def sent_back_and_never_seen_again(story: PolicyStory, broken: bool) -> None:
    """That may be where the channel drops without dead letters since."""
    sent = story.send(10, 1)
    story.x.take_and_finish(30, story.send(20, 2))
    story.dead.bury(40, sent, Reason.OVERFLOW, attempts=1, failures=0)
    if not broken:
        story.actor("tuner", "q").ask(45, Verb.CONFIGURE, "x", key=2)
    story.dead.settle(50, sent, kind=Settling.REDRIVE)
    story.x.take_and_finish(70, story.send(60, 3))


@plant("finished", max_attempts=1)
def finished_and_in_the_dead_topic(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    if broken:
        story.x.settle(25, sent)
    story.dead.bury(30, sent)
    if not broken:
        story.dead.settle(40, sent, attempts=2)


@plant("attempts", max_attempts=1)
def two_copies_of_a_letter(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.dead.bury(30, sent)
    story.dead.settle(32, sent, kind=Settling.RELEASE, attempts=2)
    attempts = 2 if broken else 3
    story.dead.bury(34, sent, attempts=attempts)
    story.dead.settle(40, sent, attempts=attempts)


@plant("lost", max_attempts=1)
def a_letter_that_nobody_finished(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.dead.bury(30, sent)
    if not broken:
        story.dead.settle(40, sent, attempts=2)


@plant("robbed", max_attempts=1)
def a_letter_that_somebody_holds(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.consumer("x", timeout=5).take(20, sent)
    holder = story.consumer("x")
    holder.take(30, sent, attempts=2)
    story.tell(What.KILL, 200 if broken else 50, holder)
    story.dead.bury(100, sent, attempts=3)
    story.dead.settle(250, sent, attempts=3)


@plant("torn")
def a_letter_with_another_id(story: PolicyStory, broken: bool) -> None:
    first, second = story.send(10, 1), story.send(12, 2)
    story.fail(20, first, second, kind=Settling.REJECT)
    story.dead.bury(30, first, Reason.REJECTED)
    story.dead.bury(32, second, Reason.REJECTED)
    story.dead.settle(33, first, second, kind=Settling.RELEASE, attempts=2)
    if broken:
        second.key, first.key = first.key, second.key
    story.dead.take(34, first, second, attempts=3)
    story.dead.settle(40, first, second, attempts=3)


# ---- failures ----


@plant("undead")
def delivered_after_it_was_rejected(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent, kind=Settling.RELEASE if not broken else Settling.REJECT)
    story.x.take_and_finish(30, sent, attempts=2)


@plant("undead", max_attempts=2)
def delivered_after_its_last_failure(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.fail(30, sent, attempts=2, kind=Settling.REQUEUE if broken else Settling.RELEASE)
    story.x.take_and_finish(40, sent, attempts=3)


@plant("early", retry_delay=(0.2, 1.0))
def before_its_retry_delay(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.fail(240, sent, attempts=2)
    story.x.take_and_finish(470 if broken else 650, sent, attempts=3)


@plant("early", later={"retry_delay": (0.2, 5.0)})
def its_failures_were_not_counted_then(story: PolicyStory, broken: bool) -> None:
    """That is where the channel had neither a limit of failures nor a delay."""
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.fail(30, sent, attempts=2)
    story.actor("tuner", "q").ask(40, Verb.CONFIGURE, "x", key=2)
    story.fail(60, sent, attempts=3)
    story.x.take_and_finish(100 if broken else 300, sent, attempts=4)


@plant("company", max_attempts=1)
def convicted_beside_others(story: PolicyStory, broken: bool) -> None:
    first, second = story.send(10, 1), story.send(12, 2)
    poison = story.consumer("x")
    poison.take(20, first)
    if broken:
        poison.take(25, second)
    story.tell(What.KILL, 30, poison)
    story.dead.bury(40, first)
    story.dead.settle(50, first, attempts=2)
    story.x.take_and_finish(60, second, attempts=1 + broken)


@plant("company", max_attempts=2)
def a_suspect_beside_others(story: PolicyStory, broken: bool) -> None:
    sent = [story.send(10, 1), story.send(12, 2)]
    poison = story.consumer("x")
    poison.take(20, *sent)
    story.tell(What.KILL, 30, poison)
    for group in [sent] if broken else [sent[:1], sent[1:]]:
        story.x.take_and_finish(40 if group[0] is sent[0] else 50, *group, attempts=2)


@plant("company", max_attempts=2)
def a_suspect_for_one_who_holds_others(story: PolicyStory, broken: bool) -> None:
    first, second = story.send(10, 1), story.send(12, 2)
    poison, other = story.consumer("x"), story.consumer("x")
    poison.take(20, first)
    other.take(22, second)
    if not broken:
        other.settle(25, second)
    story.tell(What.KILL, 30, poison)
    other.take_and_finish(40, first, attempts=2)
    if broken:
        other.settle(50, second)


# ---- limits ----


@plant("lost", max_messages=1, overflow="drop-oldest")
def dropped_after_it_was_delivered(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    if broken:
        story.fail(15, sent)
    story.x.take_and_finish(30, story.send(20, 2))


@plant("lost", max_messages=1, overflow="drop-oldest")
def dropped_although_it_was_the_newest(story: PolicyStory, broken: bool) -> None:
    for at, number in ((10, 1), (20, 2)):
        sent = story.send(at, number)
        if (number == 1) == broken:
            story.x.take_and_finish(at + 5, sent)


@plant("lost", later={"max_messages": 1, "overflow": "drop-newest"}, overflow="block")
def dropped_before_the_policy_was_changed(story: PolicyStory, broken: bool) -> None:
    story.send(10, 1)
    story.actor("tuner", "q").ask(20 if broken else 5, Verb.CONFIGURE, "x", key=2)


@plant("lost", max_messages=1, overflow="drop-oldest", overflow_to_dead=True)
def dropped_and_not_in_the_dead_topic(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.x.take_and_finish(30, story.send(20, 2))
    if not broken:
        story.dead.bury(40, sent, Reason.OVERFLOW, attempts=1, failures=0)
        story.dead.settle(50, sent)


@plant("split", max_messages=4, overflow="drop-newest")
def a_part_of_a_batch_was_dropped(story: PolicyStory, broken: bool) -> None:
    sent = list(story.send(10, 1, parts=3))
    if broken:
        story.x.take_and_finish(20, *sent[:2])


@plant("split", max_messages=4, overflow="reject")
def a_rejected_publish_is_in_the_full_channel(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1, outcome=Outcome.REFUSED)
    if broken:
        story.x.take_and_finish(20, sent)


@plant("split", max_messages=4, overflow="drop-oldest")
def a_cut_publish_is_only_where_it_may_be_dropped(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1, dies=True)
    story.tell(What.KILL, 11, story.producer)
    story.x.take_and_finish(20, sent)
    if not broken:
        story.w.take_and_finish(20, sent)


@plant("limit", max_messages=2, overflow="block")
def more_wait_than_may(story: PolicyStory, broken: bool) -> None:
    for at, number in ((10, 1), (20, 2), (30, 3)):
        sent = story.send(at, number)
        story.x.take_and_finish(at + (60 if broken else 5), sent)


@plant("disk", max_messages=2, overflow="block")
def a_channel_in_memory_was_spilled(story: PolicyStory, broken: bool) -> None:
    story.x.take_and_finish(20, story.send(10, 1))
    story.counted(30, Counter.SPILLED, int(broken))


@plant("disk", max_messages=2, overflow="drop-newest")
def a_channel_in_memory_has_files_before_the_stop(story: PolicyStory, broken: bool) -> None:
    story.x.take_and_finish(20, story.send(10, 1))
    story.tell(What.ENDING, 40)
    story.counted(30 if broken else 50, Counter.BYTES_ON_DISK, 31)


# ---- expiry ----


@plant("expired")
def taken_after_its_own_time(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1, ttl=100)
    story.x.take_and_finish(125 if broken else 105, sent)


@plant("expired", message_ttl=0.1)
def taken_after_its_channel_s_time(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1, defer=200)
    story.x.take_and_finish(325 if broken else 310, sent)


@plant("expired", later={"message_ttl": 10}, message_ttl=0.1)
def taken_after_a_time_that_was_not_made_longer(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.actor("tuner", "q").ask(300 if broken else 100, Verb.CONFIGURE, "x", key=2)
    story.x.take_and_finish(200, sent)


@plant("lost", message_ttl=0.1)
def gone_before_its_time(story: PolicyStory, broken: bool) -> None:
    story.send(10, 1, defer=0 if not broken else 150)
    story.x.take_and_finish(200, story.send(190, 2))


@plant("lost", message_ttl=0.1, expired_to_dead=True)
def expired_and_not_in_the_dead_topic(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.x.take_and_finish(200, story.send(190, 2))
    if not broken:
        story.dead.bury(150, sent, Reason.EXPIRED, attempts=1, failures=0)
        story.dead.settle(160, sent)


# ---- counters ----


@plant("count", max_messages=1, overflow="drop-oldest")
def fewer_counted_than_were_dropped(story: PolicyStory, broken: bool) -> None:
    for number in (1, 2):
        story.send(10 * number, number)
    story.x.take_and_finish(40, story.send(30, 3))
    story.counted(50, Counter.DROPPED_OLDEST, 1 if broken else 2)


@plant("count", message_ttl=0.05)
def expired_and_not_counted(story: PolicyStory, broken: bool) -> None:
    """Those that waited when the counter was read may have expired later."""
    for number in (1, 2):
        story.send(10 * number, number)
    story.x.take_and_finish(210, story.send(200, 3))
    story.counted(300, Counter.EXPIRED, 0, waiting=1 if broken else 2)


@plant("count", message_ttl=0.05)
def expired_after_an_answer_that_was_cut_off(story: PolicyStory, broken: bool) -> None:
    """Its consumer was killed in the call, which may have had no effect."""
    holder = story.consumer("x")
    sent = [story.send(3 * number, number) for number in range(1, 6)]
    for number, each in enumerate(sent):
        holder.take(20 + 2 * number, each)
    for number, each in enumerate(sent):
        holder.settle(40 + 2 * number, each, dies=not broken)
    story.tell(What.KILL, 55, holder)
    story.counted(300, Counter.EXPIRED, 5)


@plant("count", max_messages=1, overflow="drop-newest")
def more_counted_than_were_dropped(story: PolicyStory, broken: bool) -> None:
    story.x.take_and_finish(20, story.send(10, 1))
    story.send(30, 2)
    story.counted(50, Counter.DROPPED, 2 if broken else 1)


@plant("count", max_messages=1, overflow="block")
def dropped_is_counted_without_a_policy(story: PolicyStory, broken: bool) -> None:
    story.x.take_and_finish(20, story.send(10, 1))
    story.producer.publish(15, 2, dies=True)
    story.tell(What.KILL, 18, story.producer)
    story.counted(50, Counter.DROPPED, int(broken))


@plant("count", max_attempts=1)
def more_letters_counted_than_there_are(story: PolicyStory, broken: bool) -> None:
    sent = story.send(10, 1)
    story.fail(20, sent)
    story.dead.bury(30, sent)
    story.dead.settle(40, sent, attempts=2)
    story.counted(50, Counter.DEAD_LETTERED, 1 + broken)


@pytest.mark.parametrize("broken", [False, True], ids=["true", "broken"])
@pytest.mark.parametrize(
    ("rule", "tell", "settings", "later"), PLANTS, ids=[each[1].__name__ for each in PLANTS]
)
def test_what_is_planted_is_found_and_nothing_else(
    tmp_path: Path,
    rule: str,
    tell: Plant,
    settings: dict[str, Any],
    later: dict[str, Any],
    broken: bool,
) -> None:
    story = PolicyStory(tmp_path, settings, later)
    tell(story, broken)
    verdict = check(tmp_path)
    assert {violation.rule for violation in verdict.violations} == ({rule} if broken else set()), (
        verdict.show()
    )
