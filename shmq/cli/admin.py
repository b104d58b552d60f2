"""`shmq topic` and `shmq channel`: create, delete, pause, unpause, empty, set, show."""

from __future__ import annotations

import click

import shmq
from shmq import shm
from shmq.cli.output import patience, print_json, print_rows, say
from shmq.cli.parameters import COMPLETIONS, instance_option, json_option
from shmq.cli.status import OK
from shmq.settings import Settings, parse_words


@click.group()
def topic() -> None:
    """Create, delete, pause, unpause, empty, set or show a topic."""


@click.group()
def channel() -> None:
    """Create, delete, pause, unpause, empty, set or show a channel of a topic."""


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
            say(f"{result} messages dropped")
        return OK

    return command


_add_verbs(topic, "topic", "topic")
_add_verbs(channel, "channel", "topic", "channel")


_SET = """Change settings: max_messages=1000, max_bytes=64MiB,
overflow=disk|block|reject|drop-oldest|drop-newest, message_ttl=10m, max_attempts=5,
retry_delay=1s..5m, dead_letter=TOPIC, expired_to_dead=true, overflow_to_dead=true, sealed=true.
`none` takes a limit away.
"""
_topic_argument = click.argument("topic", shell_complete=COMPLETIONS["topic"])
_channel_argument = click.argument("channel", shell_complete=COMPLETIONS["channel"])
_words_argument = click.argument("words", metavar="KEY=VALUE...", nargs=-1, required=True)


@topic.command("set", help=f"Set what the later channels of a topic begin with. {_SET}")
@_topic_argument
@_words_argument
@instance_option
@json_option
def topic_set(topic: str, words: tuple[str, ...], instance: str, as_json: bool) -> int:
    return _set(instance, as_json, words, topic, None)


@channel.command("set", help=f"Set what a channel does at limits. {_SET}")
@_topic_argument
@_channel_argument
@_words_argument
@instance_option
@json_option
def channel_set(
    topic: str, channel: str, words: tuple[str, ...], instance: str, as_json: bool
) -> int:
    return _set(instance, as_json, words, topic, channel)


@topic.command("show")
@_topic_argument
@instance_option
@json_option
def topic_show(topic: str, instance: str, as_json: bool) -> int:
    """Show the settings that the later channels of a topic begin with."""
    return _show(instance, as_json, topic, None)


@channel.command("show")
@_topic_argument
@_channel_argument
@instance_option
@json_option
def channel_show(topic: str, channel: str, instance: str, as_json: bool) -> int:
    """Show the settings of a channel."""
    return _show(instance, as_json, topic, channel)


def _set(
    instance: str, as_json: bool, words: tuple[str, ...], topic: str, channel: str | None
) -> int:
    parsed = parse_words(words)
    asked = f"set {topic}{'' if channel is None else f'/{channel}'}"
    with shm.administration(), shmq.attach(instance) as broker, patience(asked):
        broker.settings(topic, channel)  # a name that is mistyped is not created
        holding = broker.configure(topic, channel, **parsed)  # type: ignore[arg-type]
    _print(holding, as_json, topic, channel)
    return OK


def _show(instance: str, as_json: bool, topic: str, channel: str | None) -> int:
    with shm.administration(), shmq.attach(instance) as broker:
        holding = broker.settings(topic, channel)
    _print(holding, as_json, topic, channel)
    return OK


def _print(holding: Settings, as_json: bool, topic: str, channel: str | None) -> None:
    if as_json:
        names = {"topic": topic} if channel is None else {"topic": topic, "channel": channel}
        print_json({**names, "settings": holding.to_json()})
    else:
        print_rows(("NAME", "VALUE"), list(holding.texts().items()))
