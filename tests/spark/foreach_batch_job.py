"""A streaming query whose `foreachBatch` writes to two topics, and that kills its own driver.

    python foreach_batch_job.py INSTANCE CHECKPOINT POINT EPOCH

POINT: where in the micro-batch EPOCH the driver and its JVM are killed; `never`: it runs to the
end. Run by test_foreach_batch.py, in a session of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import shmq.spark


def main(instance: str, checkpoint: str, point: str, epoch: int) -> None:
    spark = shmq.spark.session(
        "local[2,4]", spark_sql_shuffle_partitions=2, spark_log_level="ERROR"
    )

    def dies(at: str, number: int) -> None:
        if (at, number) == (point, epoch):
            os.killpg(0, signal.SIGKILL)

    def each(rows: Any, number: int) -> None:
        dies("begin", number)
        rows.count()
        bodies = rows.select("body")
        shmq.spark.publish(bodies, "out", instance, txnAppId="one", txnVersion=number)
        dies("between", number)
        shmq.spark.publish(bodies, "more", instance, txnAppId="two", txnVersion=number)
        dies("end", number)

    reader = spark.readStream.format("shmq").option("instance", instance).option("topic", "t")
    rows = (
        reader.option("channel", "c").option("consumer", "q").option("maxMessagesPerTrigger", 200)
    )
    writer = rows.load().writeStream.foreachBatch(each).option("checkpointLocation", checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
