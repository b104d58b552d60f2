"""`shmq access`: ask an access file who may do what, and make the hashes for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from shmq.cli.output import print_json, say
from shmq.cli.parameters import json_option
from shmq.cli.status import ERROR, OK, USAGE

if TYPE_CHECKING:
    from shmq.users import Users

#: More than any token or password has.
_MOST_BYTES = 64 << 10


@click.group()
def access() -> None:
    """Ask an access file who may do what, or make the hashes for one."""


@access.command("check")
@json_option
@click.argument("file", type=click.Path())
@click.argument("user", required=False)
@click.argument("act", required=False)
@click.argument("topic", required=False, default="")
@click.argument("channel", required=False, default="")
def check(
    as_json: bool, file: str, user: str | None, act: str | None, topic: str, channel: str
) -> int:
    """Say whether USER may do ACT on TOPIC and CHANNEL by the access file FILE, and why.

    Acts are publish, subscribe, lease, stage, administer, statistics and bodies. Without CHANNEL
    the question is about the topic with all its channels, without TOPIC about the whole instance.
    The status is 0 for yes, 1 for no, and 2 if the file cannot be used. With FILE alone the file is
    checked, and its users are listed.
    """
    from shmq.names import check_name
    from shmq.users import ACTS, BadAccessFile, Users

    try:
        users = Users.read(file)
    except (BadAccessFile, OSError) as exc:  # status 1 would be the answer "no"
        said = f"{file}: {exc.strerror}" if isinstance(exc, OSError) and exc.strerror else exc
        say(f"shmq: {said}", err=True)
        return USAGE
    if user is None:
        return _list(users, as_json)
    if act is None:
        raise click.UsageError("say what the user wants to do: ACT")
    if act not in ACTS:
        raise click.UsageError(f"there is no act {act!r}; there are {', '.join(ACTS)}")
    for kind, name in (("topic", topic), ("channel", channel)):
        if name:
            check_name(name, kind)
    may, why = users.why(user, act, topic, channel)
    if as_json:
        asked = {"user": user, "act": act, "topic": topic or None, "channel": channel or None}
        print_json(asked | {"allowed": may, "why": why})
    else:
        say(f"{'yes' if may else 'no'}: {why}")
    return OK if may else ERROR


def _list(users: Users, as_json: bool) -> int:
    for name, user in users.users.items():
        if as_json:
            print_json({"user": name, "rules": [rule.text() for rule in user.rules]})
            continue
        say(name)
        for rule in user.rules:
            say(f"  {rule.text()}")
    return OK


@access.command("hash")
@json_option
@click.argument("kind", type=click.Choice(["token", "password"]))
def hash_(as_json: bool, kind: str) -> int:
    """Print the hash of a token or password that is read from stdin, for an access file.

    A line end after it does not count. On a terminal it is asked for, twice, and not shown.
    """
    from shmq import users

    make = users.hash_token if kind == "token" else users.hash_password
    key = "token_sha256" if kind == "token" else "password"
    found = make(_secret(kind))
    if as_json:
        print_json({key: found})
    else:
        say(f'{key} = "{found}"')
    return OK


def _secret(kind: str) -> bytes:
    if sys.stdin.isatty():
        text: str = click.prompt(kind, hide_input=True, confirmation_prompt=True, err=True)
        return text.encode()
    data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise click.UsageError(f"stdin has more than {_MOST_BYTES} bytes, so it is no {kind}")
    return data.removesuffix(b"\n").removesuffix(b"\r")
