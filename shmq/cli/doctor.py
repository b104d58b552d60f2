"""`shmq doctor`: the problems of this host and its instances, each with a remedy.

It changes nothing unless `--fix` is given, which removes shared memory that nobody can use any
more.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from shmq import shm
from shmq.cli.output import painted, patience, print_json, say, say_styled
from shmq.cli.parameters import complete_instance, json_option, owner_option
from shmq.cli.status import DEGRADED, ERROR, NOT_RUNNING, OK
from shmq.diagnostics.doctor import examine, mend
from shmq.diagnostics.findings import Finding
from shmq.printing import printable


@click.command()
@json_option
@owner_option
@click.option(
    "--instance",
    metavar="NAME",
    shell_complete=complete_instance,
    help="Check only this instance [all on this host].",
)
@click.option(
    "--data-path",
    type=click.Path(),
    metavar="DIRECTORY",
    help="Check this data path too; those of running instances are always checked.",
)
@click.option(
    "--fix", is_flag=True, help="Remove shared memory that nobody can use any more, after asking."
)
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
def doctor(as_json: bool, instance: str | None, data_path: str | None, fix: bool, yes: bool) -> int:
    """Check this host and its instances, and name a remedy for each problem.

    Exit status: 0 no problem, 4 a problem was found, 3 the named instance does not run, 1 a check
    or a repair failed.
    """
    if yes and not fix:
        raise click.UsageError("--yes goes with --fix")
    if fix and not yes and (as_json or not sys.stdin.isatty()):
        raise click.UsageError("nobody can be asked: give --yes to --fix")
    if instance is not None:
        shm.directory_name(instance)  # raises BadName
    is_missing = instance is not None and not shm.list_objects(instance)
    with patience("looking at this host") as say:
        findings = list(examine(instance, data_path, say))
    if fix:
        findings = [mend(item) if yes or _agreed(item) else item for item in findings]
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


def _agreed(finding: Finding) -> bool:
    """Ask whether to apply the fix of a finding. Returns false if it has none."""
    whose = f"instance {finding.instance}: " if finding.instance else ""
    question = f"{whose}{finding.text}: remove it?"
    return finding.fix is not None and click.confirm(question, err=True)


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
    level = painted(f"{finding.level:8}", fg=_COLORS[finding.level])
    say_styled(f"{level}{printable(f'{finding.check:12}{where}{finding.text}')}")
    if finding.remedy:
        say(f"{'':20}-> {finding.remedy}")


def _print_end(findings: list[Finding]) -> None:
    problems = sum(finding.level == "problem" for finding in findings)
    mendable = sum(finding.fix is not None for finding in findings)
    if problems:
        hint = f", {mendable} of them `shmq doctor --fix` removes" if mendable else ""
        say(f"{problems} problem{'s' if problems > 1 else ''}{hint}")
