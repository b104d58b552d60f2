"""The code that the demo's executors run: list and publish, take and parse, drain; and the parsing
itself.

A module of its own because Spark's Python workers import it (`SparkContext.addPyFile`). Each worker
process attaches to the broker once, at its first task, and keeps that for all its later tasks.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import os
import time
import tokenize
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shmq

TASKS, PARSERS = "tasks", "parse"
RESULTS, REDUCER = "results", "reduce"

IDLE_SECONDS = 1.5  # how long a task of a job waits for messages before it ends
TAKE_TASKS = 8  # file tasks a worker holds at once
TAKE_RESULTS = 500
PUBLISH_TASKS = 100

#: what a result holds and is the same for every run over the same tree
FIELDS = (
    "error",
    "lines",
    "code_lines",
    "tokens",
    "functions",
    "classes",
    "longest",
    "longest_lines",
    "imports",
)

#: MemoryError is how the parser refuses what is nested too deeply; UnicodeError is a ValueError
UNPARSABLE = (
    OSError,
    SyntaxError,
    ValueError,
    MemoryError,
    RecursionError,
    tokenize.TokenError,
)


@dataclass(frozen=True)
class Work:
    """The parameters of every task of the demo; Spark ships it with the function."""

    instance: str
    root: str
    limit: int | None
    raw: str  # directory of the drained results


# ---- the source tree ----


def source_files(root: str, limit: int | None = None) -> list[str]:
    """The tree's *.py files, relative to it, in an order that is the same in every process."""
    found = []
    for directory, names, files in os.walk(root):
        names[:] = sorted(
            name for name in names if name not in ("site-packages", "dist-packages", "__pycache__")
        )
        for name in sorted(files):
            path = os.path.join(directory, name)
            if name.endswith(".py") and os.path.isfile(path):
                found.append(os.path.relpath(path, root))
    return found[:limit]


def printable(path: str) -> str:
    """The path as it stands in results: file names need not be UTF-8, Parquet's strings must."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def measure(root: str, path: str) -> dict[str, Any]:
    """Parse one file; one that cannot be read, decoded or parsed is a result with `error`."""
    result: dict[str, Any] = dict.fromkeys(FIELDS, 0)
    result |= {"path": printable(path), "error": None, "longest": None, "imports": []}
    try:
        data = Path(root, path).read_bytes()
        result["lines"] = data.count(b"\n") + (not data.endswith(b"\n") and data != b"")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
        result |= _structure(tree) | _tokens(data)
    except UNPARSABLE as error:
        result["error"] = type(error).__name__
    return result


def _structure(tree: ast.Module) -> dict[str, Any]:
    classes = 0
    functions: list[tuple[int, int, str]] = []
    imports: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            functions.append((-lines, node.lineno, node.name))
        elif isinstance(node, ast.ClassDef):
            classes += 1
        elif isinstance(node, ast.Import):
            imports.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            imports.add(node.module.partition(".")[0])
    lines, _, name = min(functions, default=(0, 0, None))
    return {
        "functions": len(functions),
        "classes": classes,
        "longest": name,
        "longest_lines": -lines,
        "imports": sorted(imports),
    }


def _tokens(data: bytes) -> dict[str, int]:
    """How many tokens, and how many lines have any that is neither comment nor layout."""
    layout = {
        tokenize.ENCODING,
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    count = 0
    code: set[int] = set()
    for token in tokenize.tokenize(io.BytesIO(data).readline):
        count += 1
        if token.type not in layout:
            code.update(range(token.start[0], token.end[0] + 1))
    return {"tokens": count, "code_lines": len(code)}


# ---- what runs in Spark's Python workers ----


@functools.cache
def attached(instance: str) -> shmq.Broker:
    """This process's attachment to the broker."""
    return shmq.attach(instance)


@functools.cache
def producer_of(instance: str, topic: str) -> shmq.Producer:
    return attached(instance).producer(topic)


def publish_tasks(work: Work, partitions: int, partition: int) -> int:
    """Publish this partition's share of the file tasks; how many."""
    producer = producer_of(work.instance, TASKS)
    mine = source_files(work.root, work.limit)[partition::partitions]
    for start in range(0, len(mine), PUBLISH_TASKS):
        producer.publish_many(
            [_task(work.root, path) for path in mine[start : start + PUBLISH_TASKS]]
        )
    return len(mine)


def _task(root: str, path: str) -> bytes:
    try:
        size = os.stat(os.path.join(root, path)).st_size
    except OSError:
        size = -1
    return json.dumps({"path": path, "size": size}).encode()


def parse_files(work: Work) -> int:
    """Take file tasks until none has come for a while; how many were finished here.

    The results are published first and the tasks finished after that, so a worker that dies loses
    nothing: its tasks go to another one, and what it had published already is there twice.
    """
    producer = producer_of(work.instance, RESULTS)
    finished = 0
    with _consumer(work.instance, TASKS, PARSERS, TAKE_TASKS) as consumer:
        while batch := consumer.take_many(TAKE_TASKS, timeout=IDLE_SECONDS):
            taken = time.monotonic_ns()  # the same clock in every process of the host
            for message in batch:
                result = measure(work.root, json.loads(message.body)["path"])
                result |= {"attempts": message.attempts, "taken": taken, "worker": os.getpid()}
                producer.publish(json.dumps(result).encode())
            batch.finish()
            finished += len(batch)
    return finished


def drain_results(work: Work) -> int:
    """Write results to Parquet files until none is left; how many.

    A batch is finished when its file has its final name and not before: a worker that dies earlier
    leaves a file that Spark does not read, and the messages come again; one that dies in between
    leaves them twice, which the reduction to one result per path takes out.
    """
    import pyarrow
    import pyarrow.parquet

    written = 0
    with _consumer(work.instance, RESULTS, REDUCER, TAKE_RESULTS) as consumer:
        while batch := consumer.take_many(TAKE_RESULTS, timeout=IDLE_SECONDS):
            name = uuid.uuid4().hex
            hidden = Path(work.raw, f"_{name}.parquet")
            rows = pyarrow.Table.from_batches([batch.to_arrow()])
            pyarrow.parquet.write_table(rows.select(["body"]), hidden)
            with hidden.open("rb") as file:
                os.fsync(file.fileno())
            hidden.rename(hidden.with_name(f"{name}.parquet"))
            batch.finish()
            written += len(batch)
    return written


def _consumer(instance: str, topic: str, channel: str, max_in_flight: int) -> shmq.Consumer:
    """For the length of a task: what it has not finished goes back at the end."""
    return attached(instance).consumer(topic, channel, max_in_flight=max_in_flight)


def each_partition(function: Callable[[int], int]) -> Callable[[int, Iterator[int]], Iterator[int]]:
    """`function` of the partition's number, in the form mapPartitionsWithIndex wants."""

    def run(partition: int, _: Iterator[int]) -> Iterator[int]:
        yield function(partition)

    return run
