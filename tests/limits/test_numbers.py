"""Every number that a public method takes, with values that nobody expects."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from limits.arguments import arguments
from limits.calls import CALLS
from limits.machine import Sheet
from limits.site import Site

#: The word of an error, if it is not the parameter's name.
SAYS = {"RemoteProducer.defer.seconds": "defer"}
ALL = {str(found): found for found in arguments()}


#: They look at the time limit only if they must wait, as those of the standard library do.
LOOK_LATER = re.compile(r"(Joinable)?Queue\.(get|item|put)\.timeout|Future\.\w+\.timeout")
#: A number below 0 counts as 0, or as none, as in the standard library.
BELOW_0 = re.compile(r"(Joinable)?Queue\.__init__\.maxsize|Executor\.map\.timeout")
#: They are numbers of any sign.
SIGNED = re.compile(r"Results\.incr\.(by|least|most)")


def may_return(name: str, value: object) -> bool:
    """Whether the call may do its work with this value."""
    if LOOK_LATER.fullmatch(name) or (name == "shmq.attach.owner" and value == "1"):
        return True
    if not isinstance(value, int | float) or value != value:  # a NaN
        return False
    return value >= 0 or bool(BELOW_0.fullmatch(name) or SIGNED.fullmatch(name))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}")
    yield made
    made.close()


def test_each_number_has_a_call() -> None:
    assert len(ALL) > 90
    assert {found.method for found in ALL.values()} == set(CALLS)


@pytest.mark.parametrize("name", ALL)
def test_a_number_is_taken_or_refused_by_name(site: Site, name: str) -> None:
    argument, sheet = ALL[name], Sheet()
    call = CALLS[argument.method]
    for value in argument.values:
        sheet.cell(
            f"{name}={value!r:.40}",
            lambda value=value: call(site, **{argument.name: value}),
            rf"\b{SAYS.get(name, argument.name)}",
            lambda: call(site),
            may_return=may_return(name, value),
        )
    site.check()
    sheet.verdict()
