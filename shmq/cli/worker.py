"""`shmq worker`: worker processes for a durable pool of `shmq.Executor`."""

from __future__ import annotations

import click

from shmq.cli.output import say
from shmq.cli.status import OK


@click.command()
@click.option(
    "--processes",
    type=click.IntRange(1),
    metavar="N",
    help="The number of worker processes; the executor's max_workers, or the CPUs, if not given.",
)
@click.argument("where", metavar="MODULE:EXECUTOR")
def worker(where: str, processes: int | None) -> int:
    """Run worker processes for the durable pool MODULE:EXECUTOR, a `shmq.Executor`.

    A worker that dies is replaced. SIGTERM or Ctrl-C ends them when they have finished the tasks in
    hand; a second one gives these tasks back to the pool.
    """
    from shmq.pool import service

    executor = service.load(where)
    service.serve(executor, processes, lambda count: say(f"{count} workers for {where}", err=True))
    return OK
