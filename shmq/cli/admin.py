"""`shmq topic` and `shmq channel`: create, delete, pause, unpause, empty."""

from __future__ import annotations

import click

import shmq
from shmq import shm
from shmq.cli.output import patience, print_json
from shmq.cli.parameters import COMPLETIONS, instance_option, json_option
from shmq.cli.status import OK


@click.group()
def topic() -> None:
    """Create, delete, pause, unpause or empty a topic."""


@click.group()
def channel() -> None:
    """Create, delete, pause, unpause or empty a channel of a topic."""


_HELP = {
    "create": "Create the {what} if it is missing.",
    "delete": "Delete the {what} and all it holds.",
    "pause": "Pause the {what}: messages wait in it.",
    "unpause": "End the pause of the {what}.",
    "empty": "Drop the messages that wait in the {what}.",
}


def _add_verbs(group: click.Group, what: str, *names: str) -> None:
    """Add a command to `group` for each verb of `_HELP`. names: the command's arguments."""
    for verb, help_text in _HELP.items():
        command = _command(verb, what)
        for name in reversed(names):
            command = click.argument(name, shell_complete=COMPLETIONS[name])(command)
        command = json_option(instance_option(command))
        group.command(verb, help=help_text.format(what=what))(command)


def _command(verb: str, what: str):  # type: ignore[no-untyped-def]
    def command(instance: str, as_json: bool, **names: str) -> int:
        asked = f"{verb} {what} {'/'.join(names.values())}"
        with shm.administration(), shmq.attach(instance) as broker, patience(asked):
            result = getattr(broker, f"{verb}_{what}")(*names.values())
        if as_json:
            print_json({"done": verb, **names} | ({"dropped": result} if verb == "empty" else {}))
        elif verb == "empty":
            click.echo(f"{result} messages dropped")
        return OK

    return command


_add_verbs(topic, "topic", "topic")
_add_verbs(channel, "channel", "topic", "channel")
