"""Arguments and options that several commands share, and their completion in the shell."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from stat import S_ISREG
from typing import Any, TypeVar

import click

from shmq import shm
from shmq.option_types import parse_duration
from shmq.ownership import OWNER_VARIABLE, read_secret, uid_of

_Command = TypeVar("_Command", bound=Callable[..., Any])


def complete_instance(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Instances of this host, for the shell's completion."""
    return [name for name in shm.list_instances() if name.startswith(incomplete)]


def complete_topic(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Topics of the instance that the line already names."""
    return _complete(context, incomplete, None)


def complete_channel(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Channels of the topic that the line already names, or of all topics if it names none."""
    return _complete(context, incomplete, context.params.get("topic") or "")


def _complete(context: click.Context, incomplete: str, topic: str | None) -> list[str]:
    """Names in an instance's directory; none if it cannot be read. Completion neither waits nor
    prints errors: a shell would show them in the middle of the line being typed."""
    from shmq import sources

    instance = context.params.get("instance") or shm.default_instance()
    found: set[str] = set()
    with contextlib.suppress(Exception):
        if S_ISREG(os.lstat(shm.directory_path(instance)).st_mode):
            with sources.open_readonly(instance) as source:
                names = {entry.index: entry.name for entry in source.directory.live_topics()}
                if topic is None:
                    found = {*names.values()}
                else:
                    found = {
                        entry.channel
                        for entry in source.directory.live_queues()
                        if entry.channel is not None and topic in ("", names.get(entry.topic))
                    }
    return sorted(name for name in found if name.startswith(incomplete))


#: Name of an argument or an option -> its completion.
COMPLETIONS = {"instance": complete_instance, "topic": complete_topic, "channel": complete_channel}


def instance_option(command: _Command) -> _Command:
    """Add `--instance` and `--owner`."""
    return click.option(
        "--instance",
        envvar="SHMQ_INSTANCE",
        default=shm.default_instance,
        show_default="default",
        show_envvar=True,
        metavar="NAME",
        shell_complete=complete_instance,
        help="Name of the broker on this host.",
    )(owner_option(command))


def owner_option(command: _Command) -> _Command:
    """Add `--owner`. It is passed on in the environment, where all code that opens shared memory
    looks for it."""
    return click.option(
        "--owner",
        envvar=OWNER_VARIABLE,
        show_envvar=True,
        metavar="USER",
        expose_value=False,
        callback=_name_owner,
        help="Also trust brokers of this user, not only your own and root's.",
    )(command)


def _name_owner(context: click.Context, parameter: click.Parameter, owner: str | None) -> None:
    if not owner:
        return
    try:
        uid_of(owner)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
    before = os.environ.get(OWNER_VARIABLE)

    def restore() -> None:
        os.environ.pop(OWNER_VARIABLE, None)
        if before is not None:
            os.environ[OWNER_VARIABLE] = before

    os.environ[OWNER_VARIABLE] = owner
    context.call_on_close(restore)


def json_option(command: _Command) -> _Command:
    """Add `--json`. Every command that prints a table has it."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per line.")(
        command
    )


def token_option(whom: str) -> Callable[[_Command], _Command]:
    """Add `--token-file`, which `read_token` reads. Words of a command line can be read by
    everybody on the host, a file cannot. whom: who gets the token, for the help."""
    return click.option(
        "--token-file",
        metavar="FILE",
        envvar="SHMQ_TOKEN_FILE",
        show_envvar=True,
        help=f"File with the token, or NAME:PASSWORD, for {whom}.",
    )


def read_token(path: str | None) -> str | None:
    """The token in a file of `--token-file`; None: there is no such option. No error quotes it."""
    if path is None:
        return None
    try:
        found = read_secret(path, "the file of --token-file").strip()
        if not found or any(byte < 32 or byte == 127 for byte in found):
            raise ValueError("it must hold one line, a token or NAME:PASSWORD")
    except (OSError, ValueError) as exc:
        said = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise click.ClickException(f"read --token-file={path}: {said}") from None
    return found.decode("utf-8", "surrogateescape")


def duration(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """Read the value of an option that is a duration, as seconds."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from exc
