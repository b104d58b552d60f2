"""`shmq doctor`: what on this host will hurt, or has hurt, and what to do about it.

It only looks, unless `--fix`: that removes shared memory which nobody can use any more (`stale`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from shmq import segments
from shmq.cli import (
    DEGRADED,
    ERROR,
    NOT_RUNNING,
    OK,
    complete_instance,
    host,
    json_option,
    owner_option,
    stale,
)
from shmq.cli.output import patience, print_json
from shmq.cli.report import Finding
from shmq.errors import ShmqError


@click.command()
@json_option
@owner_option
@click.option(
    "--instance",
    metavar="NAME",
    shell_complete=complete_instance,
    help="Look only at this instance [all on this host].",
)
@click.option("--data-path", type=click.Path(), metavar="DIRECTORY",
              help="Look at this data path too; those of running instances are found.")  # fmt: skip
@click.option("--fix", is_flag=True,
              help="Remove shared memory that nobody can use any more, after asking.")  # fmt: skip
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
def doctor(as_json: bool, instance: str | None, data_path: str | None, fix: bool, yes: bool) -> int:
    """Look for what can go wrong on this host: each finding with its remedy.

    Exit status: 0 all is well, 4 something was found, 3 the instance that was named does not run, 1
    it could not be looked at or mended.
    """
    if yes and not fix:
        raise click.UsageError("--yes goes with --fix")
    if fix and not yes and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked: give --yes to --fix")
    if instance is not None:
        segments.directory_name(instance)  # BadName
    is_missing = instance is not None and not segments.list_objects(instance)
    with patience("looking at this host") as say:
        findings = list(examine(instance, data_path, say))
    if fix:
        findings = [_mend(finding, yes) for finding in findings]
    for finding in findings:
        if as_json:
            print_json(_document(finding))
        else:
            _print(finding)
    levels = {finding.level for finding in findings}
    if not as_json:
        _print_end(findings)
    if "error" in levels:
        return ERROR
    if is_missing:
        return NOT_RUNNING
    return DEGRADED if "problem" in levels else OK


def examine(
    instance: str | None = None,
    data_path: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Finding]:
    """All findings, of one instance or of all."""
    names = stale.instances() if instance is None else [instance]
    yield from host.check_shared_memory()
    yield from host.check_kernel()
    yield from host.check_limits()
    yield from host.check_memory()
    yield from host.check_remove_ipc([os.geteuid(), *stale.owners(names)])
    if data_path is not None:
        yield from host.check_data_path(Path(data_path), None)
    for name in names:
        say(f"looking at instance {name}")
        for finding in _guarded(name):
            yield replace(finding, instance=name)


def _guarded(name: str) -> Iterator[Finding]:
    try:
        yield from stale.check_instance(name)
    except (ShmqError, OSError) as exc:
        yield Finding("segments", "error", f"cannot be looked at: {exc}")


def _mend(finding: Finding, yes: bool) -> Finding:
    """As it is after its fix."""
    if finding.fix is None:
        return finding
    question = f"instance {finding.instance}: {finding.text}: remove it?"
    if not yes and not click.confirm(question, err=True):
        return finding
    try:
        return replace(finding, level="fixed", text=finding.fix(), remedy="", fix=None)
    except (ShmqError, OSError) as exc:
        return replace(finding, level="error", text=f"{finding.text}; not removed: {exc}", fix=None)


def _document(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "level": finding.level,
        "instance": finding.instance or None,
        "text": finding.text,
        "remedy": finding.remedy or None,
        "fixable": finding.fix is not None,
    }


_COLORS = {"ok": "green", "note": "cyan", "problem": "yellow", "error": "red", "fixed": "green"}


def _print(finding: Finding) -> None:
    where = f"instance {finding.instance}: " if finding.instance else ""
    level = click.style(f"{finding.level:8}", fg=_COLORS[finding.level])
    click.echo(f"{level}{finding.check:12}{where}{finding.text}")
    if finding.remedy:
        click.echo(f"{'':20}-> {finding.remedy}")


def _print_end(findings: list[Finding]) -> None:
    problems = sum(finding.level == "problem" for finding in findings)
    mendable = sum(finding.fix is not None for finding in findings)
    if problems:
        hint = f", {mendable} of them `shmq doctor --fix` removes" if mendable else ""
        click.echo(f"{problems} problem{'s' if problems > 1 else ''}{hint}")
