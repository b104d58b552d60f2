"""The checker's rule for what Spark's jobs write: each row comes once, however often its write was
begun again. That it comes, and that nothing else does, is the rule for errands."""

from __future__ import annotations

import numpy as np
from chaos.storm.history import Errand, What, describe_key
from chaos.storm.spark_actors import OUT
from chaos.storm.tables import History
from chaos.storm.verdict import Verdict


def written_once(history: History, verdict: Verdict) -> None:
    came = [
        file.records["key"][
            (file.records["what"] == What.ERRAND) & (file.records["flag"] == Errand.HAD)
        ]
        for file in history.files
        if file.topic == OUT
    ]
    if not came:
        return
    keys, times = np.unique(np.concatenate(came), return_counts=True)
    for key in keys[times > 1]:
        verdict.add("errand", f"{OUT}: {describe_key(int(key))} came more than once")
