"""`shmq results`: list the results stores and their keys, print a value, delete a store."""

from __future__ import annotations

import dataclasses
import sys

import click

import shmq
from shmq import shm
from shmq.cli.output import harmless, one_line, patience, print_json, print_rows, say
from shmq.cli.parameters import instance_option, json_option
from shmq.cli.status import ERROR, OK
from shmq.diagnostics.readable import age, body_field
from shmq.errors import Gone


@click.group()
def results() -> None:
    """Show results stores and what is in them, or delete one."""


@results.command("ls")
@instance_option
@json_option
@click.option(
    "-n",
    "most",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    metavar="N",
    help="The number of keys to list at most.",
)
@click.argument("name", required=False)
def ls(instance: str, as_json: bool, most: int, name: str | None) -> int:
    """List the results stores, or up to N keys of the store NAME.

    KEYS, BYTES: what a store holds; MOST: its limits. LEFT: time until a key expires.
    """
    doing = patience("reading the results")
    with shm.administration(), shmq.attach(instance) as broker, doing:
        if name is None:
            _list_stores(broker, as_json)
        else:
            _list_keys(_existing(broker, name), as_json, most)
    return OK


def _list_stores(broker: shmq.Broker, as_json: bool) -> None:
    rows = []
    for name in broker.results_names():
        found = _existing(broker, name).stats()
        if as_json:
            print_json({"name": name} | dataclasses.asdict(found))
            continue
        counts = (found.keys, found.max_keys, found.bytes, found.max_bytes)
        since = (found.stored, found.removed, found.expired, found.refused)
        rows.append([name, *map(str, counts), *map(str, since)])
    if not as_json:
        titles = "NAME KEYS MOST BYTES MOST STORED REMOVED EXPIRED REFUSED"
        print_rows(titles.split(), rows)


def _list_keys(store: shmq.Results, as_json: bool, most: int) -> None:
    rows: list[tuple[bytes, int, int | None]] = []
    bucket: int | None = 0
    while bucket is not None and len(rows) < most:
        found, bucket = store.scan(bucket)
        rows += found
    cells = []
    for key, length, ttl in rows[:most]:
        left = None if ttl is None else ttl / 1e9
        if as_json:
            print_json(_key_field(key) | {"bytes": length, "ttl": left})
        else:
            cells.append([one_line(key, 30), str(length), "-" if left is None else age(left)])
    if not as_json:
        print_rows(["KEY", "BYTES", "LEFT"], cells)


@results.command("get")
@instance_option
@json_option
@click.argument("name")
@click.argument("key")
def get(instance: str, as_json: bool, name: str, key: str) -> int:
    """Print the value of KEY in the store NAME, byte for byte into a pipe or file.

    The exit status is 1 if there is no such key.
    """
    doing = patience("reading the results")
    with shm.administration(), shmq.attach(instance) as broker, doing:
        value = _existing(broker, name).get(key)
    if value is None:
        say(f"shmq: there is no key {key!r} in results store {name!r}", err=True)
        return ERROR
    if as_json:
        print_json({"name": name, "key": key} | body_field(value))
    elif sys.stdout.isatty():
        say(harmless(value))
    else:
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
    return OK


@results.command("delete")
@instance_option
@json_option
@click.argument("name")
def delete(instance: str, as_json: bool, name: str) -> int:
    """Delete the results store NAME with all its keys."""
    doing = patience(f"deleting {name}")
    with shm.administration(), shmq.attach(instance) as broker, doing:
        broker.delete_results(name)
    if as_json:
        print_json({"done": "delete", "name": name})
    else:
        say(f"{name} deleted")
    return OK


def _key_field(key: bytes) -> dict[str, str]:
    """The JSON field of a key: `key` if it is UTF-8, else `key_base64`."""
    return {name.replace("body", "key"): text for name, text in body_field(key).items()}


def _existing(broker: shmq.Broker, name: str) -> shmq.Results:
    """The store; unlike `Broker.results`, it is not created. Raises Gone."""
    if name not in broker.results_names():
        raise Gone(f"there is no results store {name!r} on instance {broker.instance!r}")
    return broker.results(name)
