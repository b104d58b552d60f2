"""The storm's checker sees each violation that is forged into a true history of a results store, or
of a consumer of many topics, and nothing in the same history without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.storm.checker import check
from chaos.storm.history import Access, Outcome, What
from chaos.storm.story import Story

Plant = Callable[[Story, bool], None]
PLANTS: list[tuple[str, Plant]] = []


def plant(rule: str) -> Callable[[Plant], Plant]:
    """A story that is true, or breaks this rule and no other."""

    def add(tell: Plant) -> Plant:
        PLANTS.append((rule, tell))
        return tell

    return add


# ---- a results store: a and b are two processes that use it ----


@plant("result")
def a_value_that_is_torn(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5)
    story.b.access(20, Access.GET, value=5, good=not broken)


@plant("result")
def a_value_that_nobody_stored(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5)
    story.b.access(20, Access.GET, value=6 if broken else 5)


@plant("result")
def a_value_of_another_key(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, number=broken, key=5)
    story.b.access(20, Access.GET, value=5)


@plant("result")
def a_value_before_it_was_stored(story: Story, broken: bool) -> None:
    story.a.access(30 if broken else 20.5, Access.SET, key=5)
    story.b.access(20, Access.GET, value=5)


@plant("result")
def a_value_that_was_refused(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5, outcome=Outcome.REFUSED if broken else Outcome.DONE)
    story.b.access(20, Access.GET, value=5)


@plant("result")
def a_value_that_was_replaced(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5)
    story.a.access(20, Access.SET, key=6, until=0 if broken else 40)
    story.b.access(30, Access.GET, value=5)


@plant("result")
def a_value_that_was_deleted(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5)
    story.a.access(20, Access.DELETE, until=0 if broken else 40)
    story.b.access(30, Access.GET, value=5)


@plant("result")
def a_dead_set_that_comes_after_its_death(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5, dies=True)
    story.tell(What.KILL, 12, story.a)
    story.tell(What.DEAD, 15, story.a)
    story.b.access(20, Access.SET, key=6)
    story.b.access(30, Access.GET, value=5 if broken else 6)


@plant("result")
def a_dead_delete_is_no_excuse_later(story: Story, broken: bool) -> None:
    story.a.access(10, Access.DELETE, dies=True)
    story.tell(What.KILL, 12, story.a)
    story.tell(What.DEAD, 15, story.a)
    story.b.access(20 if broken else 14, Access.SET, key=6)
    story.b.access(30, Access.GET, found=False)


@plant("result")
def a_key_that_is_lost(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5)
    story.a.access(20, Access.SET, key=6)
    if not broken:
        story.a.access(24, Access.POP, value=6, until=31)
    story.b.access(30, Access.GET, found=False)


@plant("result")
def a_key_that_a_waiter_does_not_see(story: Story, broken: bool) -> None:
    story.a.access(10 if broken else 25, Access.SET, key=5)
    story.b.access(20, Access.GET, found=False, until=400)


@plant("result")
def a_key_that_is_added_twice(story: Story, broken: bool) -> None:
    story.a.access(10, Access.ADD, key=5)
    story.b.access(20, Access.ADD, key=6, found=broken)
    if not broken:
        story.a.access(30, Access.DELETE)
        story.b.access(40, Access.ADD, key=7)


@plant("result")
def a_value_that_two_popped(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5)
    story.a.access(20, Access.POP, value=5)
    story.b.access(20, Access.POP, value=5, found=broken)


@plant("result")
def a_value_that_was_popped_before(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5, until=40)
    story.b.access(20, Access.POP, value=5)
    story.b.access(30 if broken else 20.5, Access.GET, value=5)


@plant("result")
def a_value_whose_time_is_over(story: Story, broken: bool) -> None:
    story.a.access(10, Access.SET, key=5, ttl=20)
    story.b.access(60 if broken else 25, Access.GET, value=5)


@plant("result")
def an_addition_that_is_lost(story: Story, broken: bool) -> None:
    story.a.access(10, Access.COUNT, key=3, value=3)
    story.b.access(20, Access.COUNT, key=4, value=4 if broken else 7)


@plant("result")
def an_addition_that_was_made_twice(story: Story, broken: bool) -> None:
    story.a.access(10, Access.COUNT, key=3, value=3)
    story.a.access(20, Access.COUNT, key=4, dies=True)
    story.tell(What.KILL, 22, story.a)
    story.tell(What.DEAD, 25, story.a)
    story.b.access(30, Access.COUNT, key=0, value=11 if broken else 7)


@plant("result")
def a_number_that_two_counted(story: Story, broken: bool) -> None:
    story.a.access(10, Access.COUNT, key=3, value=3)
    story.b.access(10, Access.COUNT, key=3, value=3 if broken else 6)


# ---- a consumer of many topics: t/b and p/h ----


@plant("lost")
def a_message_of_one_of_its_topics_is_lost(story: Story, broken: bool) -> None:
    sent, other = story.producer.publish(10, 1), story.prober.publish(10, 1)
    b, h = story.consumer_of_many(("t", "b"), ("p", "h"))
    story.a.take_and_finish(20, sent)
    b.take_and_finish(20, sent)
    if not broken:
        h.take_and_finish(30, other)


@plant("torn")
def a_message_comes_as_one_of_another_topic(story: Story, broken: bool) -> None:
    sent = story.producer.publish(10, 1)
    b, h = story.consumer_of_many(("t", "b"), ("p", "h"))
    story.a.take_and_finish(20, sent)
    b.take_and_finish(20, sent)
    if broken:
        h.take(30, sent)


@plant("robbed")
def it_holds_a_message_in_each_topic(story: Story, broken: bool) -> None:
    sent, other = story.producer.publish(10, 1), story.prober.publish(10, 1)
    b, h = story.consumer_of_many(("t", "b"), ("p", "h"))
    story.a.take_and_finish(20, sent)
    b.take(20, sent)
    h.take(20, other)
    story.b.take_and_finish(40, sent, attempts=2)
    story.consumer("h").take_and_finish(40, other, attempts=2)
    if not broken:
        story.tell(What.KILL, 30, b)


@plant("attempts")
def it_dies_in_a_take_of_any_of_its_topics(story: Story, broken: bool) -> None:
    other = story.prober.publish(10, 1)
    b, h = story.consumer_of_many(("t", "b"), ("p", "h"))
    for teller in (b, h):
        teller.die_in_a_take(20)
    if not broken:
        story.tell(What.KILL, 30, b)
    story.consumer("h").take_and_finish(40, other, attempts=2)


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
