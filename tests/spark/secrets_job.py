"""The program that test_secrets_hidden.py starts: a session that uses each secret of a query.

python secrets_job.py ADDRESS SCRATCH TOKEN SECRET
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shmq.spark


def told(name: str, call: Callable[[], Any]) -> None:
    """Print what a call prints, or the whole text of its error."""
    print(f"---- {name}")
    try:
        call()
    except Exception as exc:
        print(exc)
        traceback.print_exc(file=sys.stdout)


def plans(rows: Any) -> None:
    """Everything that Spark says of a plan."""
    for mode in ("simple", "extended", "codegen", "cost", "formatted"):
        rows.explain(mode=mode)
    print(rows, rows._jdf.queryExecution().toString(), rows._jdf.queryExecution().stringWithStats())
    print(rows._jdf.queryExecution().logical().treeString())
    print(rows._jdf.queryExecution().logical().prettyJson())


def fails(_: Iterator[Any]) -> Iterator[Any]:
    raise RuntimeError("as it should")


def main(address: str, scratch: Path, token: str, secret: str) -> None:
    """Reads, streams and writes, with the right secrets and with wrong ones."""
    events = scratch / "events"
    events.mkdir()
    spark = shmq.spark.session(
        "local-cluster[1,1,512]",
        "shmq secrets",
        spark_sql_shuffle_partitions=1,
        spark_local_dir=str(scratch / "local"),
        spark_sql_warehouse_dir=str(scratch / "warehouse"),
        spark_log_level="INFO",
        spark_eventLog_enabled="true",
        spark_eventLog_dir=events.as_uri(),
    )
    who = {"instances": address, "topic": "t", "token": token, "secret": secret}
    own = {**who, "consumer": "q", "transport": "tcp"}

    def read(**more: str) -> Any:
        return spark.read.format("shmq").options(**(own | more)).load()

    def stream(name: str, **more: str) -> None:
        rows = spark.readStream.format("shmq").options(**(own | more)).load()
        plans(rows)
        out = rows.select("body").writeStream.format("shmq").options(**(who | more))
        out = out.options(topic="out", checkpointLocation=str(scratch / f"checkpoint-{name}"))
        query = out.trigger(availableNow=True).start()
        try:
            query.awaitTermination()
        finally:
            query.explain(extended=True)
            print(query.status, query.lastProgress, query.exception())

    def write(**more: str) -> None:
        rows = spark.range(10).selectExpr("cast(id as string) as body")
        rows.write.format("shmq").options(**(who | more)).mode("append").save()

    def sql() -> None:
        given = ", ".join(f"{name} '{value}'" for name, value in own.items())
        spark.sql(f"CREATE TEMPORARY VIEW seen USING shmq OPTIONS ({given})")
        plans(spark.table("seen"))

    told("write", write)
    told("plans", lambda: plans(read()))
    told("count", lambda: print(read().count()))
    told("a task fails", lambda: read().mapInPandas(fails, "body binary").collect())
    ends = {"token": token, "secret": secret}
    told("the end of the read", lambda: print(shmq.spark.return_lease(read(), **ends)))
    told("stream", lambda: stream("right"))
    told("sql", sql)
    wrong = token[:-1] + "x"
    for name, more in {
        "a wrong token": {"token": f"{wrong}"},
        "both names": {"authSecret": token},
        "a short secret": {"secret": secret[:15]},
        "a secret that is no text": {"secret": f"{secret}\n"},
        "no such option": {"tokens": token},
        "nobody there": {"instances": "127.0.0.1:1", "hostTimeout": "500ms"},
    }.items():
        told(f"read, {name}", lambda more=more: print(read(**more).count()))
        told(f"write, {name}", lambda more=more: write(**more))
        told(f"stream, {name}", lambda more=more, name=name: stream(name[:7].strip(), **more))
    told("another query", lambda: print(read(secret=f"{secret}-other", consumer="q").count()))
    with contextlib.redirect_stdout(io.StringIO()):
        spark.stop()
    print("the end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
