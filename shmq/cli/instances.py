"""`shmq ls` and `shmq rm`: the instances of this host, and removing one that is dead."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import sys
from dataclasses import dataclass
from typing import Any

import click

from shmq import layout, segments
from shmq.cli import OK, complete_instance, json_option, stale
from shmq.cli.output import patience, print_json, print_rows, printable, size
from shmq.errors import Gone, LayoutMismatch, NotRunning, ShmqError
from shmq.names import check_instance


@dataclass(frozen=True)
class Instance:
    """One of them, as it is now. What cannot be known from here is None."""

    name: str
    state: str
    """running, dead, foreign (in another PID namespace), leftover (its making or removal was cut
    short), orphaned (its directory is gone), other (another release's), hidden (another user's)."""
    uid: int
    pid: int | None
    """Of its supervisor, or of the last one."""
    data_path: str | None
    queues: int | None
    messages: int | None
    """In memory and on disk, in whatever state."""
    in_memory: int | None
    nbytes: int
    """Of /dev/shm."""
    objects: int

    @property
    def user(self) -> str:
        """Whose it is."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)


def survey(name: str) -> Instance | None:
    """An instance; None if nothing of it is there."""
    found = segments.list_objects(name, everybodys=True)
    if not found:
        return None
    found = [item for item in found if item.uid == found[0].uid]
    uid, nbytes, is_file = os.getuid(), 0, False
    for number, item in enumerate(found):
        with contextlib.suppress(OSError):
            status = os.lstat(item.path)
            nbytes += status.st_blocks * 512
            if number == 0:
                uid, is_file = status.st_uid, stat.S_ISREG(status.st_mode)
    known: dict[str, Any] = dict.fromkeys(("pid", "data_path", "queues", "messages", "in_memory"))
    if found[0].kind != "directory":
        state = "orphaned"
    elif not is_file:
        state = "other"
    else:
        state = _look(name, known)
    return Instance(name=name, state=state, uid=uid, nbytes=nbytes, objects=len(found), **known)


def _look(name: str, known: dict[str, Any]) -> str:
    """What its directory says; its state."""
    try:
        with layout.open_readonly(name) as source:
            directory = source.directory
            held = stale.held(source)
            known["pid"] = directory.read("supervisor_pid") or None
            known["data_path"] = directory.data_path or None
            known["queues"] = held.queues
            known["messages"], known["in_memory"] = held.messages, held.in_memory
            if stale.is_of_another_boot(directory):
                return "leftover"
            alive = layout.supervisor_alive(directory)
            return "foreign" if directory.is_foreign else "running" if alive else "dead"
    except Gone:
        return "leftover"
    except LayoutMismatch:
        return "leftover" if layout.half_made(name) else "other"
    except NotRunning:
        return "leftover"  # gone just now
    except (ShmqError, OSError):
        return "hidden"


# ---- ls ----


@click.command()
@json_option
def ls(as_json: bool) -> int:
    """List the instances of this host, running or left behind.

    STATE: running; dead: no supervisor, its clients go on with what is in memory and another start
    takes it up; foreign: in another PID namespace; leftover, orphaned: the rest of one, which
    `shmq rm` removes; other: of another release of shmq; hidden: of another user.
    """
    with patience("looking at the instances"):
        found = [item for item in map(survey, stale.instances()) if item is not None]
    if as_json:
        for item in found:
            print_json(_document(item))
    elif found:
        print_table(found)
    else:
        click.echo("there is no instance on this host: start one with `shmq serve`", err=True)
    return OK


def print_table(found: list[Instance]) -> None:
    """For people."""
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
@click.option("--yes", is_flag=True, help="Do not ask, also if messages are lost by it.")
@click.argument("instance", shell_complete=complete_instance)
def rm(as_json: bool, yes: bool, instance: str) -> int:
    """Remove what is left in shared memory of INSTANCE, which is dead.

    One that runs is refused, and one that a process still uses. Its files in its data path stay;
    only the directory that an embedded broker made for itself is removed with it. To keep the
    messages that are in memory, write them to disk instead: `shmq serve --drain`.
    """
    found = survey(check_instance(instance))
    if found is None:
        raise NotRunning(f"nothing of an instance {instance!r} is left in {segments.SHM_DIRECTORY}")
    if found.state == "running":
        raise ShmqError(
            f"instance {instance!r} is running (pid {found.pid}): stop it first: kill {found.pid}"
        )
    own = stale.own_directory(found.name, found.data_path, found.uid)
    lost = _lost(found, own)
    if lost and not yes:
        if as_json or not sys.stdin.isatty():
            raise click.UsageError(f"{lost}; nobody can be asked: give --yes")
        click.confirm(f"{lost}; remove them?", err=True, abort=True)
    with patience("removing"):
        remove = stale.remove_without_directory if found.state == "orphaned" else stale.remove_dead
        count = remove(instance)
        is_removed = own is not None and stale.remove_own_directory(own, found.uid)
    if as_json:
        print_json({"instance": instance, "removed": count, "data_path": found.data_path,
                    "data_path_removed": is_removed})  # fmt: skip
        return OK
    where = printable(found.data_path or "")
    click.echo(f"removed {count} object{'' if count == 1 else 's'} of shared memory", nl=False)
    if found.data_path is None:
        click.echo()
    else:
        click.echo(f" and {own}" if is_removed else f"; its files stay in {where}")
    return OK


def _lost(found: Instance, own: str | None) -> str:
    """Which messages are lost by a removal, as the beginning of a sentence; "": none."""
    lost = found.in_memory if own is None else found.messages
    if found.state in ("leftover", "orphaned"):
        return ""  # nobody could take them up
    if lost is None:
        return f"instance {found.name!r} cannot be read ({found.state}) and may hold messages"
    if not lost:
        return ""
    where = "" if own else " in memory"
    return (
        f"instance {found.name!r} holds {lost} message{'' if lost == 1 else 's'}{where} "
        f"(`shmq serve --drain --instance {found.name}` writes them to disk)"
    )
