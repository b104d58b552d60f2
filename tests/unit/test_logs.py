"""The log's lines: no text in a message can forge an entry."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from shmq.logs import set_up_logging
from shmq.options import Options
from shmq.printing import printable as one_line

FORGED = "x\n[nsqd] 2026/11/22 00:00:00.000000 FATAL: \x1b[31mforged\r\x85\u2028\u202e\ud800"


def formatted(message: str, *args: object, error: bool = False, **options: str) -> str:
    """One record as a process of the broker writes it."""
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    root.handlers.clear()  # `force` would close those of the test runner
    try:
        set_up_logging(Options(instance="logs", **options))  # type: ignore[arg-type]
        formatter = root.handlers[0].formatter
        assert formatter is not None
        info = sys.exc_info() if error else None
        record = logging.LogRecord("n", logging.INFO, "p", 1, message, args, info)
        return formatter.format(record)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.raiseExceptions = raises


def test_a_line_cannot_be_forged() -> None:
    line = formatted("client %s", FORGED)
    assert line.isprintable()
    assert line.endswith(
        "INFO: client x\\n[nsqd] 2026/11/22 00:00:00.000000 FATAL: "
        "\\x1b[31mforged\\r\\x85\\u2028\\u202e\\ud800"
    )


def test_an_exceptions_text_cannot_either() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        lines = formatted("failed", error=True).splitlines()
    assert [line for line in lines if line.startswith("[nsqd]")] == lines[:1]
    assert all(line.isprintable() for line in lines)
    assert any("forged" in line for line in lines)


def test_a_json_line_says_the_same_text() -> None:
    line = formatted("client %s", FORGED, log_format="json")
    assert line.isprintable()
    assert json.loads(line)["message"] == f"client {FORGED}"


@pytest.mark.parametrize("text", ["", "plain text", "grüße, 日本", 'a "b" \\ c'])
def test_what_is_printable_stays(text: str) -> None:
    assert one_line(text) == text
    assert formatted("%s", text).endswith(f"INFO: {text}")
    assert json.loads(formatted("%s", text, log_format="json"))["message"] == text
