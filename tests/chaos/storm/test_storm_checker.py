"""The storm's checker sees each violation that is forged into a true history, and nothing in the
same history without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.storm import history
from chaos.storm.checker import check
from chaos.storm.history import Outcome, Settling, Verb, What, key_of
from chaos.storm.story import Sent, Story

Plant = Callable[[Story, bool], None]
PLANTS: list[tuple[str, Plant]] = []


def plant(rule: str) -> Callable[[Plant], Plant]:
    """A story that is true, or breaks this rule and no other."""

    def add(tell: Plant) -> Plant:
        PLANTS.append((rule, tell))
        return tell

    return add


@plant("torn")
def a_body_has_changed(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.b.take_and_finish(20, sent)
    story.a.take(20, sent, good=not broken)
    story.a.settle(22, sent)


@plant("torn")
def what_nobody_published(story: Story, broken: bool) -> None:
    story.both(20, story.producer.publish(10, 1))
    if broken:
        story.b.take(30, Sent(key_of(77, 1), 2 << 20))


@plant("torn")
def a_body_that_names_no_message(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    # true: it timed out before its body was read
    story.consumer("b", timeout=5).take(20, Sent(0, sent.id), good=not broken)
    story.b.take_and_finish(40, sent, attempts=2)


@plant("torn")
def from_another_topic(story: Story, broken: bool) -> None:
    sent = story.prober.publish(10, 1)
    story.consumer("h").take_and_finish(20, sent)
    if broken:
        story.b.take(20, sent)


@plant("torn")
def another_id_on_another_channel(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take_and_finish(20, Sent(sent.key, sent.id + broken))


@plant("lost")
def never_delivered_on_one_channel(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    if not broken:
        story.b.take_and_finish(20, sent)


@plant("lost")
def one_of_a_batch(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, parts=3)
    story.a.take_and_finish(20, *sent)
    story.b.take_and_finish(20, *list(sent)[: 2 if broken else 3])


@plant("lost")
def never_finished(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take(20, sent)
    if not broken:
        story.b.settle(30, sent)


@plant("lost")
def a_deferred_one(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, defer=50)
    story.a.take_and_finish(80, sent)
    if not broken:
        story.b.take_and_finish(80, sent)


@plant("lost")
def on_a_channel_that_was_made(story: Story, broken: bool) -> None:
    story.actor("operator", "t").ask(5, Verb.CREATE, "s")
    sent = story.producer.publish(10, 1)
    story.both(20, sent)
    made = story.consumer("s")
    if not broken:
        made.take_and_finish(20, sent)


@plant("split")
def a_cut_publish_is_on_one_channel(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, dies=True)
    story.tell(What.KILL, 11, story.producer)
    story.a.take_and_finish(20, sent)
    if not broken:
        story.b.take_and_finish(20, sent)


@plant("split")
def half_of_a_cut_batch(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, parts=4, dies=True)
    story.tell(What.KILL, 11, story.producer)
    story.both(20, *list(sent)[: 2 if broken else 4])


@plant("split")
def a_refused_publish_is_there(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, outcome=Outcome.REFUSED)
    if broken:
        story.both(20, sent)


@plant("finished")
def back_after_its_finish(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.both(20, sent)
    if broken:
        story.tell(What.KILL, 30, story.b)  # it may come again to others, if it was not finished
        story.consumer("b").take(40, sent, attempts=2)


@plant("finished")
def back_after_a_batch_was_finished(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, parts=3)
    story.both(20, *sent)
    story.tell(What.ENDING, 30)
    if broken:
        story.consumer("b").take(40, sent[1], attempts=2)


@plant("finished")
def finished_by_two(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take(20, sent)
    story.tell(What.KILL, 22, story.b)
    other = story.consumer("b")
    other.take_and_finish(30, sent, attempts=2)
    if broken:
        story.b.settle(24, sent)


@plant("attempts")
def two_with_one_number(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take(20, sent)
    story.tell(What.KILL, 25, story.b)
    story.consumer("b").take_and_finish(30, sent, attempts=1 if broken else 2)


@plant("attempts")
def numbers_that_fall(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take(60 if broken else 20, sent)
    story.tell(What.KILL, 22, story.b)
    other = story.consumer("b")
    other.take(40, sent, attempts=2)
    other.settle(70, sent, attempts=2)


@plant("attempts")
def a_number_left_out(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.b.take_and_finish(20, sent)
    first, second = story.consumer("a"), story.consumer("a")
    first.take(20, sent)
    story.tell(What.KILL, 25, first)
    if not broken:
        second.die_in_a_take(26)
        story.tell(What.KILL, 27, second)
    story.a.take_and_finish(30, sent, attempts=3)


@plant("robbed")
def of_one_that_lives(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take(20, sent)
    story.tell(What.STOP if broken else What.KILL, 30, story.b)
    story.consumer("b").take_and_finish(50, sent, attempts=2)


@plant("robbed")
def before_its_timeout(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.consumer("b", timeout=1000).take(20, sent)
    story.b.take_and_finish(900 if broken else 1021, sent, attempts=2)


@plant("robbed")
def though_it_was_touched(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    holder = story.consumer("b", timeout=1000)
    holder.take(20, sent)
    if broken:
        holder.settle(800, sent, kind=Settling.TOUCH)
    story.b.take_and_finish(1100, sent, attempts=2)


@plant("robbed")
def of_what_was_taken_after_another_close(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.settle(15, kind=Settling.CLOSE)  # of an earlier consumer of the same process
    story.b.take(20, sent)
    if not broken:
        story.b.settle(30, kind=Settling.CLOSE)
    story.consumer("b").take_and_finish(40, sent, attempts=2)


@plant("robbed")
def over_a_connection_that_stood(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    remote = story.consumer("b", timeout=60_000)
    remote.deliver(21, remote.stream(15), [sent])
    if not broken:
        story.tell(What.GATEWAY, 30)
        story.tell(What.GATEWAY, 31, flag=1)
    story.b.take_and_finish(50, sent, attempts=2)


@plant("early")
def before_it_was_due(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1, defer=500)
    story.both(400 if broken else 510, sent)


@plant("early")
def before_a_requeue_was_due(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    story.a.take_and_finish(20, sent)
    story.b.take(20, sent)
    story.b.settle(30, sent, kind=Settling.REQUEUE, delay=300)
    story.b.take_and_finish(200 if broken else 335, sent, attempts=2)


@plant("order")
def a_later_one_first(story: Story, broken: bool) -> None:
    pair = [story.producer.publish(10, 1), story.producer.publish(12, 2)]
    story.b.take_and_finish(20, *pair)
    for at, sent in zip((20, 30), reversed(pair) if broken else pair, strict=True):
        story.a.take_and_finish(at, sent)


@plant("order")
def a_later_one_first_in_one_take(story: Story, broken: bool) -> None:
    pair = [story.producer.publish(10, 1), story.producer.publish(12, 2)]
    story.b.take_and_finish(20, *pair)
    story.a.take_and_finish(20, *(reversed(pair) if broken else pair))


@plant("order")
def a_later_one_first_over_a_connection(story: Story, broken: bool) -> None:
    pair = [story.producer.publish(10, 1), story.producer.publish(12, 2)]
    story.b.take_and_finish(20, *pair)
    stream = story.a.stream(5)
    for at, sent in zip((20, 30), reversed(pair) if broken else pair, strict=True):
        story.a.deliver(at, stream, [sent])
    story.a.settle(40, *pair)


@plant("order")
def ids_that_fall(story: Story, broken: bool) -> None:
    first = story.producer.publish(10, 2)
    second = story.producer.publish(12, 1 if broken else 3)
    story.b.take_and_finish(20, first, second)
    story.a.take_and_finish(20, *sorted((first, second), key=lambda sent: sent.id))


@plant("late")
def long_after_a_death(story: Story, broken: bool) -> None:
    sent = story.prober.publish(10, 1)
    dies, waits = story.consumer("h"), story.consumer("h")
    dies.take(20, sent)
    story.tell(What.KILL, 30, dies)
    waits.take_and_finish(1500 if broken else 40, sent, attempts=2)


@pytest.mark.parametrize("broken", [False, True], ids=["true", "broken"])
@pytest.mark.parametrize(("rule", "tell"), PLANTS, ids=[tell.__name__ for _, tell in PLANTS])
def test_what_is_planted_is_found_and_nothing_else(
    tmp_path: Path, rule: str, tell: Plant, broken: bool
) -> None:
    story = Story(tmp_path)
    tell(story, broken)
    verdict = check(tmp_path)
    assert {violation.rule for violation in verdict.violations} == ({rule} if broken else set()), (
        verdict.show()
    )


def test_a_delay_is_not_late_while_nobody_could_have_redelivered(tmp_path: Path) -> None:
    story = Story(tmp_path)
    supervisor = story.actor("supervisor")
    sent = story.prober.publish(10, 1)
    dies, waits = story.consumer("h"), story.consumer("h")
    dies.take(20, sent)
    story.tell(What.KILL, 25, supervisor)
    story.tell(What.KILL, 30, dies)
    story.tell(What.SERVING, 2000, story.actor("supervisor"))
    waits.take_and_finish(2040, sent, attempts=2)
    verdict = check(tmp_path)
    assert not verdict.violations
    assert verdict.delays == []
    assert verdict.disturbed == pytest.approx([0.041])


def test_a_delay_is_counted_from_the_kill_to_the_last_message(tmp_path: Path) -> None:
    story = Story(tmp_path)
    sent = story.prober.publish(10, 1, parts=2)
    dies, waits = story.consumer("h"), story.consumer("h")
    dies.take(20, *sent)
    story.tell(What.KILL, 30, dies)
    waits.take_and_finish(34, sent[0], attempts=2)
    waits.take_and_finish(49, sent[1], attempts=2)
    assert check(tmp_path).delays == pytest.approx([0.020])


def test_a_body_is_read_back_and_every_bit_of_it_counts() -> None:
    filler = bytes(range(256)) * 8
    body = bytearray(history.make_body(1234, 100, filler))
    assert history.read_body(bytes(body)) == (1234, True)
    assert history.read_body(bytes(body[:-1])) == (1234, False)
    for at in (0, 3, 20, 99):
        body[at] ^= 1
        assert not history.read_body(bytes(body))[1]
        body[at] ^= 1
