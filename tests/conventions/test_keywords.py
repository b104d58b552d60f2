"""The keywords of `shmq.Broker`, for type checkers and `help`, are the options.

shmq/keywords.py is made here from option_fields.py. After a change:

    tools/dev tables      writes it anew
"""

from __future__ import annotations

import inspect
import sys
import typing
from pathlib import Path

import pytest

import shmq
from shmq import keywords
from shmq.option_types import Kind, Option, OptionError
from shmq.options import OPTIONS, Options

FILE = Path(__file__).parents[2] / "shmq" / "keywords.py"

HEAD = '''"""The options of `shmq.Broker` as keywords, for type checkers and editors.

Made from option_fields.py by tests/conventions/test_keywords.py; `tools/dev tables` runs it after a
change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, TypedDict


class Keywords(TypedDict, total=False):
    """Keywords of `shmq.Broker`: every option of `shmq serve` but `--instance` and `--data-path`,
    which are arguments of their own. Durations are seconds; None means the default."""

'''

TYPES = {
    Kind.TEXT: "str | os.PathLike[str] | None",
    Kind.COUNT: "int | None",
    Kind.BYTES: "int | None",
    Kind.DURATION: "float | None",
    Kind.MODE: "int | str | None",
    Kind.SWITCH: "bool | None",
    Kind.TEXTS: "list[str] | tuple[str, ...] | None",
    Kind.SETTINGS: "Mapping[str, Mapping[str, object]] | list[str] | tuple[str, ...] | None",
    Kind.SHARES: "list[float] | tuple[float, ...] | None",
}
OWN = ("instance", "data_path")


def type_of(option: Option) -> str:
    if option.choices:
        words = ", ".join(f'"{choice}"' for choice in option.choices)
        more = "bool | " if "true" in option.choices else ""
        return f"Literal[{words}] | {more}None"
    return TYPES.get(option.kind, "str | None")


def written() -> str:
    lines = [
        f"    {option.name}: {type_of(option)}\n"
        for option in OPTIONS.values()
        if option.name not in OWN
    ]
    return HEAD + "".join(lines)


def test_the_keywords_are_the_options() -> None:
    is_current = FILE.read_text() == written()
    assert is_current, "shmq/keywords.py is out of date: run tools/dev tables"


def test_broker_takes_exactly_these() -> None:
    hints = typing.get_type_hints(shmq.Broker.__init__)
    assert typing.get_args(hints["options"]) == (keywords.Keywords,)
    named = set(inspect.signature(shmq.Broker).parameters) - {"options", "disk"}
    assert named | set(typing.get_type_hints(keywords.Keywords)) == set(OPTIONS)


def test_a_default_is_of_its_keyword_type() -> None:
    hints = typing.get_type_hints(keywords.Keywords)
    for option in OPTIONS.values():
        if option.name not in OWN:
            accepts(hints[option.name], option.default, option.name)


def accepts(hint: object, value: object, name: str) -> None:
    for one in typing.get_args(hint):
        if typing.get_origin(one) is typing.Literal:
            if value in typing.get_args(one):
                return
        elif isinstance(value, typing.get_origin(one) or one) or (
            one is float and isinstance(value, int)
        ):
            return
    raise AssertionError(f"{name}: {value!r} is not {hint}")


def test_an_octal_mode_may_be_text_and_what_is_none_says_which_keyword() -> None:
    assert Options.from_keywords(mode="0660").mode == 0o660
    with pytest.raises(OptionError, match=r"^mode must be an octal number such as 0660, not 'rw'$"):
        Options.from_keywords(mode="rw")


if __name__ == "__main__":
    FILE.write_text(written())
    sys.exit(0)
