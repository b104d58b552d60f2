"""`shmq page`: show an instance in a browser."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource

import click

from shmq import audit, shm
from shmq.cli.output import say
from shmq.cli.parameters import instance_option
from shmq.cli.status import OK
from shmq.errors import ShmqError
from shmq.printing import Formatter


@click.command()
@instance_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=4180,
    show_default=True,
    metavar="PORT",
    help="The port on 127.0.0.1; 0: any free one.",
)
@click.option(
    "--socket",
    "path",
    type=click.Path(),
    metavar="PATH",
    help="A Unix socket (mode 0600) instead of the port, for a proxy.",
)
@click.option(
    "--max-viewers",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    metavar="N",
    help="The number of browsers that may watch at a time.",
)
@click.option(
    "--admin",
    is_flag=True,
    help="Let browsers pause, empty, delete and configure channels, take messages from their "
    "consumers, and redrive dead letters.",
)
@click.option(
    "--audit-log",
    default="stderr",
    show_default=True,
    metavar="PATH",
    help="The file that gets a line for each change; stderr: the log.",
)
def page(
    instance: str, port: int, path: str | None, max_viewers: int, admin: bool, audit_log: str
) -> int:
    """Show an instance in a browser: what waits, who holds it, what failed.

    Only reads shared memory, so it works while the supervisor is dead; with --admin it may change
    things, too. It prints an address with a token, without which nobody sees anything. It ends with
    Ctrl-C. It needs the extra `gateway`.
    """
    try:
        from shmq.page import server
    except ImportError as exc:
        raise ShmqError(str(exc)) from exc
    from shmq.page.guard import Guard

    token = None if path is not None else Guard.new_token()

    def ready(bound: int) -> None:
        where = f"unix:{path}" if path else f"http://127.0.0.1:{bound}/page/#token={token}"
        say(f"instance {instance}: {where}")

    _raise_files()
    formatter = Formatter("%(asctime)s %(message)s")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler])
    audit.set_up(audit_log, formatter)
    pages = server.Page(instance, token=token, most_viewers=max_viewers, admin=admin)
    try:
        with shm.administration() if admin else contextlib.nullcontext():
            asyncio.run(server.serve(pages, "127.0.0.1", port, path, ready))
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} of 127.0.0.1 is taken: name another one by --port") from exc
        raise
    return OK


def _raise_files() -> None:
    """Raise the limit of open files as far as it goes: each channel's mapping keeps one open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
