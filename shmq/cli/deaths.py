"""`shmq deaths`: the log of deaths."""

from __future__ import annotations

import signal

import click

from shmq import deaths as log
from shmq.cli.output import print_json, print_rows
from shmq.cli.parameters import instance_option, json_option
from shmq.cli.status import OK
from shmq.deaths import Death, How
from shmq.diagnostics.readable import age, moment
from shmq.printing import printable


@click.command()
@instance_option
@json_option
def deaths(instance: str, as_json: bool) -> int:
    """Show which processes of an instance died, and what was taken back from each.

    MESSAGES: returned to their channels. HELD: what its consumers held, by channel. LOCKS: those it
    left locked; REBUILT: queues that were made consistent after a death inside them. REPAIR: time
    from the notice of the death to the end of the repair. A supervisor's line is written by the
    next one.
    """
    found = log.read(instance)
    if as_json:
        for death in found:
            print_json(death.to_json())
        return OK
    titles = "TIME PID KIND PROGRAM END UID MESSAGES HELD LOCKS REBUILT REPAIR"
    print_rows(titles.split(), [_row(death) for death in found])
    return OK


def _row(death: Death) -> list[str]:
    held = [f"{item.topic}/{item.channel or '-'}:{item.messages}" for item in death.held]
    more = [f"+{len(held) - 3}"] if len(held) > 3 else []
    return [
        moment(death.time, fraction=True),
        str(death.pid),
        death.kind,
        printable(death.program or "-"),
        _end(death),
        str(death.uid),
        str(death.messages),
        " ".join(held[:3] + more) or "-",
        ",".join(log.locks_of(death.locks)) or "-",
        str(death.rebuilt),
        age(death.repair),
    ]


def _end(death: Death) -> str:
    if death.how == How.KILLED:
        try:
            return signal.Signals(death.status).name
        except ValueError:
            return f"signal {death.status}"
    return f"exited {death.status}" if death.how == How.EXITED else death.how.name.lower()
