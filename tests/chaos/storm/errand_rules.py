"""The checker's rule for errands: items of queues and tasks of pools.

errand    one that was sent, and was never had or never ran; one that nobody sent; one that is torn
          or has a wrong value; one that was got by a call that began after somebody had ended it;
          a task of Celery, Dramatiq, Taskiq or Django that was sent and has no outcome, or ran and
          nobody sent it
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
from chaos.storm.errand_actors import CALL_RUNS, CALLS, FRAMEWORKS, POOL, RUN, RUNS
from chaos.storm.history import Errand, File, What, describe_key
from chaos.storm.tables import History
from chaos.storm.verdict import Verdict

#: Where tasks say that they ran.
_RUNS = {POOL: RUNS, CALLS: CALL_RUNS, **{name: f"{name}.runs" for name in FRAMEWORKS}}


def errands(history: History, verdict: Verdict) -> None:
    by_topic: dict[str, list[File]] = defaultdict(list)
    for file in history.files:
        if (file.records["what"] == What.ERRAND).any():
            by_topic[file.topic].append(file)
    for topic, files in by_topic.items():
        rows = np.concatenate([_with_asks(file) for file in files])
        begun, sent, had, ended = (
            rows[rows["flag"] == kind]
            for kind in (Errand.BEGUN, Errand.SENT, Errand.HAD, Errand.ENDED)
        )
        verdict.counts[f"errands of {topic or 'visitors'}"] += len(sent) or len(rows)
        for row in had[had["count"] == 0]:
            verdict.add("errand", f"{topic}: {describe_key(int(row['key']))} is not as it was sent")
        if topic in _RUNS:
            runs = _runs(history.directory / _RUNS[topic])
            _compare(topic, "was sent and never ran", sent["key"], runs, verdict)
            _compare(topic, "ran and nobody sent it", runs, begun["key"], verdict)
        if topic != POOL:  # who waits for the value of a pool's task may have died
            _compare(topic, "was sent and never came", sent["key"], had["key"], verdict)
        _compare(topic, "came and nobody sent it", had["key"], begun["key"], verdict)
        done = {int(row["key"]): int(row["at"]) for row in ended}
        for row in had:  # `id` is when the call began
            if int(row["id"]) > done.get(int(row["key"]), 1 << 63):
                text = f"{topic}: {describe_key(int(row['key']))} came again after it had ended"
                verdict.add("errand", text)


def _compare(topic: str, what: str, ours: np.ndarray, theirs: np.ndarray, verdict: Verdict) -> None:
    for key in np.setdiff1d(ours, theirs):
        verdict.add("errand", f"{topic}: {describe_key(int(key))} {what}")


def _runs(path: Path) -> np.ndarray:
    raw = path.read_bytes() if path.exists() else b""
    return np.frombuffer(raw[: len(raw) // RUN.size * RUN.size], "<u8")


def _with_asks(file: File) -> np.ndarray:
    """The errands of a process; `id` of one that it had is when it asked for it."""
    rows = file.records[file.records["what"] == What.ERRAND].copy()
    asked = 0
    for row in rows:
        if row["flag"] == Errand.ASKED:
            asked = int(row["at"])
        elif row["flag"] == Errand.HAD:
            row["id"] = asked
    return rows
