"""`shmq ls` and `shmq rm`: list the instances of this host, and remove a dead one."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from shmq import shm
from shmq.cli.output import patience, print_json, print_rows, say
from shmq.cli.parameters import complete_instance, json_option
from shmq.cli.status import OK
from shmq.diagnostics import removal
from shmq.diagnostics.instances import Instance, survey, survey_all
from shmq.diagnostics.left_behind import left_behind
from shmq.diagnostics.readable import size
from shmq.errors import NotRunning, ShmqError
from shmq.names import check_instance
from shmq.printing import printable
from shmq.staging_place import forget_staged

# ---- ls ----


@click.command()
@json_option
def ls(as_json: bool) -> int:
    """List the instances of this host, running or left behind.

    STATE: running; dead: has no supervisor, its clients go on with the messages in memory, and the
    next start adopts it; foreign: runs in another PID namespace; leftover, orphaned: the remains of
    an instance, which `shmq rm` removes; other: made by another release of shmq; hidden: belongs to
    another user. Directories that killed processes have left, and that belong to no instance, are
    named on standard error, each with what removes it.
    """
    with patience("looking at the instances"):
        found, more = survey_all()
    if more:
        say(
            f"shmq: {more} more names of instances in {shm.SHM_DIRECTORY} belong to users who are "
            "not trusted; they are left out",
            err=True,
        )
    if as_json:
        for item in found:
            print_json(_document(item))
    elif found:
        print_table(found)
    else:
        say("there is no instance on this host: start one with `shmq serve`", err=True)
    for finding in left_behind({item.name for item in found}):
        say(f"shmq: {finding.text}: {finding.remedy}", err=True)
    return OK


def print_table(found: list[Instance]) -> None:
    titles = ["NAME", "STATE", "OWNER", "PID", "QUEUES", "MESSAGES", "SHM", "DATA PATH"]
    print_rows(titles, [_row(item) for item in found])


def _row(item: Instance) -> list[str]:
    def shown(value: int | None) -> str:
        return "-" if value is None else str(value)

    return [
        item.name,
        item.state,
        item.user,
        shown(item.pid),
        shown(item.queues),
        shown(item.messages),
        size(item.nbytes),
        printable(item.data_path or "-"),
    ]


def _document(item: Instance) -> dict[str, Any]:
    return {
        "instance": item.name,
        "state": item.state,
        "uid": item.uid,
        "user": item.user,
        "pid": item.pid,
        "data_path": item.data_path,
        "queue_count": item.queues,
        "message_count": item.messages,
        "in_memory_count": item.in_memory,
        "shm_bytes": item.nbytes,
    }


# ---- rm ----


@click.command()
@json_option
@click.option("--yes", is_flag=True, help="Do not ask, even if messages will be lost.")
@click.argument("instance", shell_complete=complete_instance)
def rm(as_json: bool, yes: bool, instance: str) -> int:
    """Remove the shared memory of INSTANCE, which must be dead.

    An instance that is running, or that a process still uses, is refused. The files in its data
    path stay; only a directory that an embedded broker made for itself is removed with it. To keep
    the messages in memory, write them to disk instead: `shmq serve --drain`.
    """
    found = survey(check_instance(instance))
    if found is None and (staged := forget_staged(instance, os.geteuid())):
        return _removed_staged(as_json, instance, staged)
    if found is None:
        raise NotRunning(f"nothing of an instance {instance!r} is left in {shm.SHM_DIRECTORY}")
    if found.state == "running":
        raise ShmqError(
            f"instance {instance!r} is running (pid {found.pid}): stop it first: kill {found.pid}"
        )
    own = removal.own_directory(found.name, found.data_path, found.uid)
    lost = _lost(found, own)
    if lost and not yes:
        if as_json or not sys.stdin.isatty():
            raise click.UsageError(f"{lost}; nobody can be asked: give --yes")
        click.confirm(f"{lost}; remove them?", err=True, abort=True)
    with patience("removing"):
        remove = removal.remove_orphans if found.state == "orphaned" else removal.remove_dead
        count = remove(instance)
        is_removed = own is not None and removal.remove_own_directory(own, found.uid)
        staged = forget_staged(instance, found.uid)
    if as_json:
        print_json(
            {
                "instance": instance,
                "removed": count,
                "staged": staged,
                "data_path": found.data_path,
                "data_path_removed": is_removed,
            }
        )
        return OK
    where = printable(found.data_path or "")
    say(f"removed {count} object{'' if count == 1 else 's'} of shared memory", nl=False)
    if found.data_path is None:
        say()
    else:
        say(f" and {own}" if is_removed else f"; its files stay in {where}")
    if staged:
        say(_staged_sentence(staged))
    return OK


def _removed_staged(as_json: bool, instance: str, staged: int) -> int:
    """Report the removal of all that was left of an instance."""
    if as_json:
        print_json({"instance": instance, "removed": 0, "staged": staged})
    else:
        say(_staged_sentence(staged))
    return OK


def _staged_sentence(staged: int) -> str:
    files = "file" if staged == 1 else "files"
    return f"removed {staged} {files} of rows that were staged and not committed"


def _lost(found: Instance, own: str | None) -> str:
    """Which messages a removal loses, as the beginning of a sentence; "" if it loses none."""
    lost = found.in_memory if own is None else found.messages
    if found.state in ("leftover", "orphaned"):
        return ""  # no supervisor could adopt them
    if lost is None:
        return f"instance {found.name!r} cannot be read ({found.state}) and may hold messages"
    if not lost:
        return ""
    where = "" if own else " in memory"
    return (
        f"instance {found.name!r} holds {lost} message{'' if lost == 1 else 's'}{where} "
        f"(`shmq serve --drain --instance {found.name}` writes them to disk)"
    )
