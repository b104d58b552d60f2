"""The storm's checker sees each violation that is forged into a true history of a queue or a pool,
and nothing in the same history without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.storm.checker import check
from chaos.storm.errand_actors import CALL_RUNS, CALLS, POOL, RUN, RUNS
from chaos.storm.history import Errand, What
from chaos.storm.spark_actors import OUT
from chaos.storm.story import Story, Teller

TOPIC = "item-queue"
Plant = Callable[[Story, bool], None]
PLANTS: list[Plant] = []


def plant(tell: Plant) -> Plant:
    """A story that is true, or breaks the rule."""
    PLANTS.append(tell)
    return tell


def errand(
    teller: Teller, at: float, *steps: Errand, key: int = 5, good: bool = True, apart: float = 1
) -> None:
    for number, step in enumerate(steps):
        teller.write(What.ERRAND, at + number * apart, flag=step, key=key, count=good)


SEND = (Errand.BEGUN, Errand.SENT)
GET = (Errand.ASKED, Errand.HAD)
END = (Errand.ENDING, Errand.ENDED)


@plant
def an_item_that_is_lost(story: Story, broken: bool) -> None:
    errand(story.actor("putter", TOPIC), 10, *SEND)
    errand(story.actor("getter", TOPIC), 20, *(() if broken else (*GET, *END)), key=5)


@plant
def an_item_of_a_put_that_was_cut_off(story: Story, broken: bool) -> None:
    errand(story.actor("putter", TOPIC), 10, *(SEND if broken else SEND[:1]))


@plant
def an_item_that_nobody_put(story: Story, broken: bool) -> None:
    errand(story.actor("putter", TOPIC), 10, *SEND)
    getter = story.actor("getter", TOPIC)
    errand(getter, 20, *GET, *END)
    if broken:
        errand(getter, 30, *GET, *END, key=6)


@plant
def an_item_that_is_torn(story: Story, broken: bool) -> None:
    errand(story.actor("putter", TOPIC), 10, *SEND)
    errand(story.actor("getter", TOPIC), 20, *GET, *END, good=not broken)


@plant
def an_item_that_comes_after_its_end(story: Story, broken: bool) -> None:
    errand(story.actor("putter", TOPIC), 10, *SEND)
    errand(story.actor("getter", TOPIC), 20, *GET, *END)
    # who asked before the end may have been given it before
    errand(story.actor("getter", TOPIC), 30 if broken else 15, *GET, apart=10)


@plant
def a_row_of_spark_that_comes_twice(story: Story, broken: bool) -> None:
    errand(story.actor("spark-jobs", OUT), 10, *SEND)
    for at in (20, 30) if broken else (20,):
        errand(story.actor("spark-sweeper", OUT), at, *GET)


@plant
def a_task_that_never_ran(story: Story, broken: bool) -> None:
    errand(story.actor("submitter", POOL), 10, *SEND)
    (story.directory / RUNS).write_bytes(b"" if broken else RUN.pack(5))


@plant
def a_task_with_a_wrong_value(story: Story, broken: bool) -> None:
    submitter = story.actor("submitter", POOL)
    errand(submitter, 10, *SEND)
    errand(submitter, 20, Errand.HAD, good=not broken)
    (story.directory / RUNS).write_bytes(RUN.pack(5))


@plant
def a_call_whose_task_never_ran(story: Story, broken: bool) -> None:
    errand(story.actor("celery-caller", CALLS), 10, *SEND, Errand.HAD)
    (story.directory / CALL_RUNS).write_bytes(b"" if broken else RUN.pack(5))


@plant
def a_call_whose_outcome_nobody_saw(story: Story, broken: bool) -> None:
    """The caller died with it, and so did its worker; another ran the task again."""
    errand(story.actor("celery-caller", CALLS), 10, *SEND)
    (story.directory / CALL_RUNS).write_bytes(2 * RUN.pack(5))
    if not broken:
        errand(story.actor("celery-finisher", CALLS), 20, Errand.HAD)


@plant
def a_call_that_was_cut_off(story: Story, broken: bool) -> None:
    """It may have been sent or not, so it may run without an outcome that anybody sees."""
    errand(story.actor("celery-caller", CALLS), 10, *(SEND if broken else SEND[:1]))
    (story.directory / CALL_RUNS).write_bytes(RUN.pack(5))


@plant
def a_task_that_nobody_sent(story: Story, broken: bool) -> None:
    errand(story.actor("celery-caller", CALLS), 10, *SEND, Errand.HAD)
    (story.directory / CALL_RUNS).write_bytes(RUN.pack(5) + RUN.pack(6) * broken)


@plant
def a_call_with_a_wrong_outcome(story: Story, broken: bool) -> None:
    caller = story.actor("celery-caller", CALLS)
    errand(caller, 10, *SEND)
    errand(caller, 20, Errand.HAD)
    errand(story.actor("celery-finisher", CALLS), 30, Errand.HAD, good=not broken)
    (story.directory / CALL_RUNS).write_bytes(RUN.pack(5))


@pytest.mark.parametrize("broken", [False, True], ids=["true", "broken"])
@pytest.mark.parametrize("tell", PLANTS, ids=[tell.__name__ for tell in PLANTS])
def test_what_is_planted_is_found_and_nothing_else(
    tmp_path: Path, tell: Plant, broken: bool
) -> None:
    story = Story(tmp_path)
    tell(story, broken)
    verdict = check(tmp_path)
    found = {violation.rule for violation in verdict.violations}
    assert found == ({"errand"} if broken else set()), verdict.show()
