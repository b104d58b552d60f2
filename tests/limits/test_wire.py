"""The numbers of the gateway: those of the lease protocol, of nsqd's commands, of HTTP's queries
and of `PUT /config`, beyond their bounds."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import struct
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from support.nsq_client import mpub, sized

from limits import ways
from limits.machine import Sheet
from limits.site import BODY, CHANNEL, GONE, MESSAGE, Site
from shmq.gateway import http, http_config, http_debug, http_messages
from shmq.gateway.lease_requests import COMMANDS
from shmq.options import OPTIONS
from shmq.page import server as page

#: As JSON: beyond 64 bits, below 0, no whole number, no number.
DOCUMENTS = (
    *("-1", "-9223372036854775809", "18446744073709551616", "1" + "0" * 30, "1" + "0" * 400),
    *("1.5", "1e400", "NaN", "-Infinity", '"1"', "true", "[]", "{}", "[1]", '""', "9" * 5000),
)
#: In a query.
QUERIES = ("-1", "1.5", "nan", "x", "", "1" + "0" * 30, str(1 << 63), str(1 << 64), "9" * 5000)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("site")
    made = Site(path, f"limits-{path.parent.name[-20:]}-wire")
    made.broker.create_channel(GONE, CHANNEL)
    made.broker.configure(GONE, CHANNEL, max_messages=100, overflow="drop-oldest")
    yield made
    made.close()


# ---- the lease protocol ----

#: One of these is a right value of each key that a command needs.
RIGHT = ("one", 1, [0, "0" * 16], "0" * 32, "0" * 20, [], True)


def is_number(key: Any) -> bool:
    return bool(key.check(1) or key.check(1.5)) and not key.check(True)


NUMBERS = {
    f"{name.decode()}.{word}": (name, word)
    for name, command in COMMANDS.items()
    for word, key in command.keys.items()
    if is_number(key)
}


def request(name: bytes, texts: dict[str, str]) -> bytes:
    """A request of the lease protocol, whose keys are JSON texts."""
    command = COMMANDS[name]
    found = {
        word: json.dumps(next(value for value in RIGHT if key.check(value)))
        for word, key in command.keys.items()
        if key.needed
    }
    body = ", ".join(f'"{word}": {text}' for word, text in (found | texts).items())
    data = f"{{{body}}}".encode()
    line = b" ".join([name, GONE.encode(), CHANNEL.encode()][: 1 + max(command.names)])
    if command.rows:
        data = struct.pack(">I", len(data)) + data + sized(b"x")
    return line + b"\n" + sized(data)


def leases(site: Site, data: bytes) -> bytes:
    """The answer to a request of a connection that has asked for leases."""
    with ways.session(site) as client:
        client.identify(leases=True, feature_negotiation=True)
        return ways.said(client, data)


def test_the_numbers_of_the_lease_protocol_are_found() -> None:
    assert len(NUMBERS) >= 20
    assert {"LEASE.n", "LREAD.rows", "LHOLD.ttl", "COMMIT.epoch"} <= set(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_the_lease_protocol_is_refused_by_name(site: Site, number: str) -> None:
    name, word = NUMBERS[number]
    sheet = Sheet()
    texts = [text for text in DOCUMENTS if not _is_right(name, word, text)]
    assert len(texts) > 10
    for text in texts:
        sheet.cell(
            f"{number}={text:.30}",
            lambda text=text: leases(site, request(name, {word: text})),
            rf"E_BAD_BODY {name.decode()} ({word} must be|failed to decode)",
            lambda: leases(site, b"LINFO\n" + sized(b"{}")),
        )
    site.check()
    sheet.verdict()


def _is_right(name: bytes, word: str, text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return value is None or COMMANDS[name].keys[word].check(value)


# ---- nsqd's commands ----

SIZES = (-1, 0, -(1 << 31), (1 << 31) - 1, BODY + 1)


def _commands() -> Iterator[tuple[str, bytes, str]]:
    """A name, what is sent, and the words of the refusal."""
    for size in SIZES:
        head = struct.pack(">i", size)
        for line in (b"PUB gone", b"DPUB gone 1", b"MPUB gone", b"IDENTIFY", b"AUTH"):
            name = line.split()[0].decode()
            yield f"{name} of size {size}", line + b"\n" + head, "size|body|too big|E_INVALID"
        if size != MESSAGE:
            body = struct.pack(">ii", 1, size) + b"x"
            yield f"MPUB of a message of size {size}", b"MPUB gone\n" + sized(body), "size|too big"
            body = head + struct.pack(">i", 1) + b"x"
            yield f"MPUB of {size} messages", b"MPUB gone\n" + sized(body), "message count|bod"
    for text in QUERIES:
        words = text.encode()
        yield f"DPUB {text:.25}", b"DPUB gone " + words + b"\n" + sized(b"x"), "timeout|E_INVALID"
    for text in QUERIES:
        ready = b"SUB gone r\nRDY " + text.encode() + b"\n"
        yield f"RDY {text:.25}", ready, r"(?i)RDY count|E_INVALID"
        requeue = b"SUB gone r\nREQ 0000000000000001 " + text.encode() + b"\n"
        yield f"REQ {text:.25}", requeue, r"(?i)timeout|E_INVALID|E_REQ_FAILED"


@pytest.mark.parametrize("name", list(dict.fromkeys(name.split()[0] for name, *_ in _commands())))
def test_a_number_of_a_command_of_nsqd_is_refused(site: Site, name: str) -> None:
    sheet = Sheet()
    again = mpub(GONE.encode(), [b"x"])
    for cell, data, says in (each for each in _commands() if each[0].split()[0] == name):
        sheet.cell(
            cell,
            lambda data=data: _last(site, data),
            says,
            lambda: ways.tcp(site, again),
            # no digits are 0, and what has more than 64 bits wraps around, as in nsqd
            may_return=name in ("DPUB", "RDY", "REQ"),
        )
    site.check()
    sheet.verdict()


def _last(site: Site, data: bytes) -> bytes:
    """The answer to the last of some commands."""
    with ways.session(site) as client:
        if data.startswith(b"SUB"):
            line, _, data = data.partition(b"\n")
            ways.said(client, line + b"\n")
            client.send(data + b"NOP\n" + b"PUB gone\n" + sized(b"x"))
            return ways.said(client, b"")
        return ways.said(client, data)


# ---- HTTP ----

#: The keys of queries: names, words and switches, and the numbers with a path each that reads them.
#: None: nsqd takes any text for it, and a number in its place if it has no meaning.
WORDS = {
    *("topic", "channel", "format", "include_clients", "include_mem", "binary"),
    *("state", "id", "period"),
}
HTTP_NUMBERS: dict[str, tuple[str, str, str | None]] = {
    "defer": ("POST", "/pub?topic=gone&defer={}", "INVALID_DEFER"),
    "seconds": ("GET", "/debug/pprof/profile?seconds={}", None),
    "rate": ("PUT", "/debug/setblockrate?rate={}", None),
    "n": ("GET", "/page/messages?topic=gone&channel=c&state=ready&n={}", "n is a number"),
    "since": ("GET", "/page/history?since={}", "since is a number"),
}


def keys_of_queries() -> set[str]:
    found: set[str] = set()
    for module in (http, http_config, http_debug, http_messages, page):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            whose, key = None, None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                whose, key = node.func.value, node.args[0] if node.func.attr == "get" else None
            elif isinstance(node, ast.Subscript):
                whose, key = node.value, node.slice
            if whose is None or not isinstance(key, ast.Constant):
                continue
            if ast.unparse(whose) in ("params", "request.query"):
                found.add(key.value)
    return found


def test_each_key_of_a_query_is_known() -> None:
    assert keys_of_queries() == WORDS | set(HTTP_NUMBERS)


@pytest.mark.parametrize("key", HTTP_NUMBERS)
def test_a_number_of_a_query_is_refused(site: Site, key: str) -> None:
    method, path, says = HTTP_NUMBERS[key]
    sheet = Sheet()
    site.broker.producer(GONE).publish(b"x")
    more = ("%D9%A3", "0" * 8 + "1" + "9" * 9, "+ 1", "1_0", "0x1")
    if key == "seconds":
        more += ("0",)  # a profile takes as long as it is told to, 30 s at most
    values = [value for value in (*QUERIES, *more) if key != "seconds" or value in ("-1", "0")]
    for value in values:
        value = value if "%" in value else urllib.parse.quote(value)
        sheet.cell(
            f"{key}={value:.25}",
            lambda value=value: ways.web(site, method, path.format(value), b"x"),
            says or "",
            lambda: ways.web(site, "GET", "/ping"),
            may_return=says is None,
        )
    assert sheet.tried > 1
    site.check()
    sheet.verdict()


def config(site: Site, key: str, value: bytes) -> Any:
    return json.loads(ways.web(site, "PUT", f"/config/{key}", value))


def test_no_option_but_two_is_changed_by_http(site: Site) -> None:
    sheet = Sheet()
    values = (b"-1", b"0", b"x", b"1" + b"0" * 30, b"NaN", b"\xff", b"9" * 5000)
    for option, value in itertools.product(OPTIONS.values(), values):
        if option.key in ("nsqlookupd_tcp_addresses", "log_level"):
            continue
        sheet.cell(
            f"{option.key}={value!r:.20}",
            lambda option=option, value=value: config(site, option.key, value),
            "INVALID_OPTION|INVALID_VALUE",
            lambda: None,
        )
    assert sheet.tried > 200
    site.check()
    sheet.verdict()


@pytest.mark.parametrize("key", ["nsqlookupd_tcp_addresses", "log_level"])
def test_what_http_changes_is_refused_if_it_is_wrong(site: Site, key: str) -> None:
    sheet = Sheet()
    before = ways.web(site, "GET", f"/config/{key}")
    values = [b"", b"x", b"5", b"-1", b"\xff\xfe", b"NaN", b"9" * 5000, b"x" * (MESSAGE + 1)]
    if key != "log_level":
        lists: list[Any] = [["a"], ["a:"], ["a:x"], ["a:65536"], ["a:-1"], ["a:99999999999"]]
        lists += [[f"a:{number}" for number in range(101)], [1], [None], [["a:1"]], {"a": 1}]
        lists += [["a:" + "9" * 5000], ["n" * 70_000 + ":1"]]
        values += [json.dumps(value).encode() for value in lists] + [b"[" * 3000]
    for value in values:
        sheet.cell(
            f"{key}={value!r:.30}",
            lambda value=value: config(site, key, value),
            "INVALID_VALUE",
            lambda: ways.web(site, "GET", f"/config/{key}"),
        )
        if ways.web(site, "GET", f"/config/{key}") != before:
            sheet.fault(f"{key}={value!r:.30}", "a value that was refused holds")
    site.check()
    sheet.verdict()
