"""Writes the Grafana dashboard to stdout; `tools/dev tables` puts it into docs/monitoring.

A program and not JSON by hand, because every panel needs the same selection of instances, topics
and channels, and a place of its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 24  # of Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

#: Matchers for the variables. Prometheus' label `instance` is a host and port; `broker` is shmq's.
HOST = 'instance=~"$host"'
BROKER = f'{HOST},broker=~"$broker"'
TOPIC = f'{BROKER},topic=~"$topic"'
CHANNEL = f'{TOPIC},channel=~"$channel"'
#: Dead topics, unless they have names of their own.
DEAD = ".+[.]dead"
ALIVE = f'{CHANNEL},topic!~"{DEAD}"'

LETTERS = "ABCDEFGHIJKLM"  # of the queries of a panel
#: The first columns of a table, and the units of those that do not count messages.
NAMES = ("instance", "broker", "topic", "channel")
UNITS = {
    "oldest": "s",
    "memory": "bytes",
    "in/s": "ops",
    "out/s": "ops",
    "finished/s": "ops",
    "redelivered/s": "ops",
}

GREEN, YELLOW, RED = "green", "yellow", "red"


def of(name: str, selected: str = CHANNEL) -> str:
    return f"shmq_{name}{{{selected}}}"


def rate(name: str, selected: str = CHANNEL) -> str:
    return f"rate(shmq_{name}{{{selected}}}[$__rate_interval])"


def by_channel(expression: str, how: str = "sum") -> str:
    return f"{how} by (instance, broker, topic, channel) ({expression})"


def top(expression: str, how: str = "sum") -> str:
    """The ten channels with most of it: a chart of ten thousand lines shows nothing."""
    return f"topk(10, {by_channel(expression, how)})"


@dataclass(frozen=True)
class Panel:
    """A panel without its place. queries: legends and expressions. thresholds: (from which value,
    colour), the lowest without one. about: what a reader must know to judge it."""

    title: str
    queries: Sequence[tuple[str, str]]
    about: str
    unit: str = "short"
    thresholds: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    most: float | None = None
    names: tuple[tuple[float, str], ...] = ()
    """Words for values, in a panel of one value."""

    def document(self) -> dict[str, Any]:
        if self.kind == "table":
            return self._table()
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "min": 0,
            "color": {"mode": "palette-classic" if self.kind == "timeseries" else "thresholds"},
            "thresholds": {
                "mode": "absolute",
                "steps": [{"value": value, "color": color} for value, color in self.thresholds],
            },
        }
        if self.most is not None:
            defaults["max"] = self.most
        if self.names:
            words = {f"{value:g}": {"text": text} for value, text in self.names}
            defaults["mappings"] = [{"type": "value", "options": words}]
        if self.kind == "timeseries":
            defaults["custom"] = self._lines()
        return {
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": DATASOURCE,
            "targets": [
                target(letter, legend, expression, instant=self.kind != "timeseries")
                for letter, (legend, expression) in zip(LETTERS, self.queries, strict=False)
            ],
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "options": _STAT if self.kind == "stat" else _CHART,
        }

    def _table(self) -> dict[str, Any]:
        """Each query is a column; a row for each channel."""
        letters = {letter: title for letter, (title, _) in zip(LETTERS, self.queries, strict=False)}
        targets = [
            {**target(letter, "", expression, instant=True), "format": "table"}
            for letter, (_, expression) in zip(LETTERS, self.queries, strict=False)
        ]
        columns = [*NAMES, *(f"Value #{letter}" for letter in letters)]
        organize = {
            "excludeByName": {"Time": True},
            "indexByName": {name: place for place, name in enumerate(columns)},
            "renameByName": {f"Value #{letter}": title for letter, title in letters.items()},
        }
        units = [
            {
                "matcher": {"id": "byName", "options": title},
                "properties": [{"id": "unit", "value": unit}],
            }
            for title, unit in UNITS.items()
        ]
        return {
            "type": "table",
            "title": self.title,
            "description": self.about,
            "datasource": DATASOURCE,
            "targets": targets,
            "transformations": [
                {"id": "merge", "options": {}},
                {"id": "organize", "options": organize},
            ],
            "fieldConfig": {"defaults": {"unit": self.unit}, "overrides": units},
            "options": {"showHeader": True, "sortBy": [{"displayName": "oldest", "desc": True}]},
        }

    def _lines(self) -> dict[str, Any]:
        limits = len(self.thresholds) > 1
        return {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if self.stacked else 10,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if limits else "off"},
        }


_CHART = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
_STAT = {
    "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
    "orientation": "auto",
    "textMode": "auto",
    "colorMode": "background",
    "graphMode": "none",
    "justifyMode": "auto",
}


def target(letter: str, legend: str, expression: str, instant: bool) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": DATASOURCE,
        "expr": expression,
        "legendFormat": legend,
        "instant": instant,
        "range": not instant,
        "editorMode": "code",
    }


COME_BACK = " + ".join(
    rate(f"messages_{how}_total") for how in ("requeued", "timed_out", "recovered")
)
NAME = "{{broker}} {{topic}}/{{channel}}"
stat = dataclasses.replace(Panel("", (), ""), kind="stat", width=3, height=4)
chart = Panel("", (), "")


def a(panel: Panel, title: str, *queries: tuple[str, str], about: str, **how: Any) -> Panel:
    return dataclasses.replace(panel, title=title, queries=queries, about=about, **how)


OVERVIEW = [
    a(
        stat,
        "Supervisor",
        ("{{broker}}", f"min by (instance, broker) ({of('supervisor_up', BROKER)})"),
        about="Without a supervisor nothing goes to disk or times out. Its gateway, which has "
        "/metrics, ends with it: no data here is a dead supervisor too.",
        thresholds=((None, RED), (1, GREEN)),
        names=((0, "dead"), (1, "up")),
    ),
    a(
        stat,
        "Heartbeat",
        (
            "{{broker}}",
            f"max by (instance, broker) ({of('supervisor_heartbeat_age_seconds', BROKER)})",
        ),
        about="Time since the supervisor last moved; it does so four times a second.",
        unit="s",
        thresholds=((None, GREEN), (2, YELLOW), (10, RED)),
    ),
    a(
        stat,
        "Data path",
        ("{{broker}}", f"max by (instance, broker) ({of('disk_trouble', BROKER)})"),
        about="Whether the data path refuses to be written.",
        thresholds=((None, GREEN), (1, RED)),
        names=((0, "written"), (1, "refused")),
    ),
    a(
        stat,
        "Waiting",
        ("", f"sum({of('ready_messages')})"),
        about="Messages waiting in memory and on disk, dead letters included.",
    ),
    a(
        stat,
        "Oldest",
        ("", f"max({of('oldest_ready_age_seconds', ALIVE)})"),
        about="Age of the longest waiting message in memory, without dead letters.",
        unit="s",
        thresholds=((None, GREEN), (60, YELLOW), (300, RED)),
    ),
    a(
        stat,
        "Finished",
        ("", f"sum({rate('messages_finished_total')})"),
        about="Messages finished in a second.",
        unit="ops",
    ),
    a(
        stat,
        "Dead letters, 1 h",
        ("", f"sum(increase({of('messages_dead_lettered_total')}[1h]))"),
        about="Messages that went to a dead topic in the last hour.",
        thresholds=((None, GREEN), (1, RED)),
    ),
    a(
        stat,
        "Redelivered",
        (
            "",
            f"sum({COME_BACK}) / clamp_min(sum({rate('messages_delivered_total')}), 1e-9)",
        ),
        about="Share of the deliveries that end without a finish.",
        unit="percentunit",
        thresholds=((None, GREEN), (0.05, YELLOW), (0.2, RED)),
    ),
    a(
        chart,
        "Messages by state",
        ("ready", f"sum({of('ready_messages')}) - sum({of('disk_messages')})"),
        ("on disk", f"sum({of('disk_messages')})"),
        ("in flight", f"sum({of('in_flight_messages')})"),
        ("deferred", f"sum({of('deferred_messages')})"),
        ("leased", f"sum({of('leased_messages')})"),
        about="All messages that the instance has.",
        stacked=True,
        width=12,
    ),
    a(
        chart,
        "Messages a second",
        ("in", f"sum({rate('messages_enqueued_total')})"),
        ("out", f"sum({rate('messages_delivered_total')})"),
        ("finished", f"sum({rate('messages_finished_total')})"),
        (
            "redelivered",
            f"sum({COME_BACK})",
        ),
        about="A topic's message counts once for each channel. Where `finished` stays below `in`, "
        "a queue grows.",
        unit="ops",
        width=12,
    ),
]

TABLE = dataclasses.replace(
    chart,
    kind="table",
    title="Channels",
    about="The columns of the page and of `shmq stat`. A row without a channel is a backlog.",
    width=WIDTH,
    height=10,
    queries=[
        (title, by_channel(expression))
        for title, expression in {
            "ready": f"{of('ready_messages')} - {of('disk_messages')}",
            "disk": of("disk_messages"),
            "in flight": of("in_flight_messages"),
            "deferred": of("deferred_messages"),
            "leased": of("leased_messages"),
            "oldest": of("oldest_ready_age_seconds"),
            "in/s": rate("messages_enqueued_total"),
            "out/s": rate("messages_delivered_total"),
            "finished/s": rate("messages_finished_total"),
            "redelivered/s": COME_BACK,
            "dead": of("messages_dead_lettered_total"),
            "consumers": of("channel_consumers"),
            "memory": of("segment_bytes"),
        }.items()
    ],
)

WAITING = [
    a(
        chart,
        "Oldest by channel",
        (NAME, top(of("oldest_ready_age_seconds"), "max")),
        about="Age of the longest waiting message in memory. It says earlier than a length whether "
        "a channel is behind.",
        unit="s",
        thresholds=((None, GREEN), (60, YELLOW), (300, RED)),
    ),
    a(
        chart,
        "Waiting by channel",
        (NAME, top(of("ready_messages"))),
        about="In memory and on disk. A name that ends in / is a topic without a channel.",
    ),
    a(
        chart,
        "Time from publish to finish",
        *(
            (
                f"{NAME} p{round(100 * share)}",
                top(of("end_to_end_seconds", f'{CHANNEL},quantile="{share:g}"'), "max"),
            )
            for share in (0.5, 0.99)
        ),
        about="Half of the messages, and 99 % of them, of the last minutes.",
        unit="s",
    ),
    a(
        chart,
        "In by channel",
        (NAME, top(rate("messages_enqueued_total"))),
        about="Messages that entered the channel in a second.",
        unit="ops",
    ),
    a(
        chart,
        "Published by topic",
        (
            "{{broker}} {{topic}}",
            "topk(10, sum by (instance, broker, topic) "
            f"({rate('messages_published_bytes_total', TOPIC)}))",
        ),
        about="Bytes of bodies published in a second.",
        unit="Bps",
    ),
    a(
        chart,
        "Paused",
        ("topic {{broker}} {{topic}}", f"{of('topic_paused', TOPIC)} > 0"),
        (f"channel {NAME}", f"{of('channel_paused')} > 0"),
        about="Nothing comes out of what is paused. Empty: nothing is paused.",
        most=1,
    ),
]

CONSUMERS = [
    a(
        chart,
        "Consumers by channel",
        (NAME, top(of("channel_consumers"))),
        about="Consumers of each channel.",
    ),
    a(
        chart,
        "In flight",
        (NAME, top(of("in_flight_messages"))),
        about="Messages that consumers hold.",
    ),
    a(
        chart,
        "Finished by channel",
        (NAME, top(rate("messages_finished_total"))),
        about="Messages finished in a second.",
        unit="ops",
    ),
    a(
        chart,
        "Share of deliveries that come back",
        (
            NAME,
            top(
                f"({COME_BACK}) / clamp_min({rate('messages_delivered_total')}, 1e-9)",
                "max",
            ),
        ),
        about="Requeued, timed out, or taken back from a consumer that died or closed.",
        unit="percentunit",
        thresholds=((None, GREEN), (0.05, YELLOW), (0.2, RED)),
    ),
    a(
        chart,
        "Why they come back",
        ("requeued", f"sum({rate('messages_requeued_total')})"),
        ("timed out", f"sum({rate('messages_timed_out_total')})"),
        ("recovered", f"sum({rate('messages_recovered_total')})"),
        about="Given back by a consumer; not finished in time; taken back from one that died or "
        "closed.",
        unit="ops",
        stacked=True,
    ),
    a(
        chart,
        "Deaths and repairs",
        ("deaths", f"sum(increase({of('clients_reaped_total', BROKER)}[$__rate_interval]))"),
        ("rebuilt", f"sum(increase({of('queues_rebuilt_total', BROKER)}[$__rate_interval]))"),
        about="Processes that died while they were attached, and queues that were rebuilt after "
        "it. `shmq deaths` has each one.",
    ),
]

DEAD_LETTERS = [
    a(
        chart,
        "Dead letters by channel",
        (NAME, top(f"increase({of('messages_dead_lettered_total')}[$__rate_interval])")),
        about="Messages that went from this channel to its dead topic. `shmq dead ls TOPIC "
        "CHANNEL` counts them by reason and error.",
    ),
    a(
        chart,
        "Waiting in dead topics",
        (NAME, top(of("ready_messages", f'{BROKER},topic=~"{DEAD}"'))),
        about="Topics whose names end in .dead. `shmq dead redrive` sends them back.",
        thresholds=((None, GREEN), (1, RED)),
    ),
    a(
        chart,
        "Messages that were not delivered",
        ("expired", f"sum({rate('messages_expired_total')})"),
        ("not taken when full", f"sum({rate('messages_dropped_total')})"),
        ("made room for newer", f"sum({rate('messages_dropped_oldest_total')})"),
        ("publishes refused", f"sum({rate('publishes_rejected_total')})"),
        about="By a channel's settings (time to live, overflow), or by a full ephemeral channel.",
        unit="ops",
        stacked=True,
    ),
]

MEMORY = [
    a(
        chart,
        "Memory of channels",
        (NAME, top(of("segment_bytes"))),
        about="Shared memory that each channel has.",
        unit="bytes",
    ),
    a(
        chart,
        "Held bodies, of what is allowed",
        (
            NAME,
            top(f"{of('segment_held_bytes')} / (0.75 * {of('segment_body_limit_bytes')})", "max"),
        ),
        about="Bodies in flight, deferred or leased. They may have three quarters of arena_size; "
        "then consumers get no more.",
        unit="percentunit",
        thresholds=((None, GREEN), (0.7, YELLOW), (0.9, RED)),
    ),
    a(
        chart,
        "Memory for bodies, used",
        (
            NAME,
            top(f"{of('segment_body_bytes')} / {of('segment_body_limit_bytes')}", "max"),
        ),
        about="Of arena_size, with the room of finished messages that nobody has needed yet. "
        "Waiting messages go to disk at 7/8, so a long queue stays near 1.",
        unit="percentunit",
    ),
    a(
        chart,
        "/dev/shm",
        (
            "used",
            f"max by (instance) ({of('shm_bytes', BROKER)} - {of('shm_free_bytes', BROKER)})",
        ),
        ("free", f"min by (instance) ({of('shm_free_bytes', BROKER)})"),
        about="Shared memory of the host, for all that uses it.",
        unit="bytes",
        stacked=True,
        width=6,
    ),
    a(
        chart,
        "Free at the data path",
        ("{{broker}}", f"min by (instance, broker) ({of('data_path_free_bytes', BROKER)})"),
        about="With none left, messages stay in memory and then publishers wait.",
        unit="bytes",
        thresholds=((None, RED), (1e9, GREEN)),
        width=6,
    ),
    a(
        chart,
        "On disk by channel",
        (NAME, top(of("disk_messages"))),
        about="Waiting messages that memory has no room for.",
        width=6,
    ),
    a(
        chart,
        "To disk and back",
        ("to disk", f"sum({rate('messages_spilled_total')})"),
        ("to memory", f"sum({rate('messages_restored_total')})"),
        about="Messages moved in a second.",
        unit="ops",
        width=6,
    ),
]

GATEWAY = [
    a(
        chart,
        "Processes",
        ("{{role}}", f"sum by (role) ({of('clients', BROKER)})"),
        about="Attached processes. Without a gateway process NSQ clients are not served.",
    ),
    a(
        chart,
        "Consumers through the gateway",
        (NAME, top(of("channel_gateway_consumers"))),
        about="Connections of NSQ clients that consume.",
    ),
    a(
        chart,
        "Time of a scrape",
        (
            "{{instance}}",
            f"scrape_duration_seconds{{{HOST}}} and on (instance, job) {of('build_info', HOST)}",
        ),
        about="How long the gateway takes for /metrics. It grows with the number of channels.",
        unit="s",
    ),
]

ROWS = {
    "Overview": [*OVERVIEW, TABLE],
    "Queue waiting": WAITING,
    "Consumers": CONSUMERS,
    "Dead letters": DEAD_LETTERS,
    "Memory and disk": MEMORY,
    "Gateway": GATEWAY,
}

#: Variable -> its words, and where its values come from.
VARIABLES = {
    "host": ("host", "label_values(shmq_build_info, instance)"),
    "broker": ("instance", f"label_values(shmq_build_info{{{HOST}}}, broker)"),
    "topic": ("topic", f"label_values(shmq_messages_published_total{{{BROKER}}}, topic)"),
    "channel": ("channel", f"label_values(shmq_messages_enqueued_total{{{TOPIC}}}, channel)"),
}


def variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"type": "datasource", "name": "datasource", "label": "data source", "query": "prometheus"}
    ]
    for name, (label, query) in VARIABLES.items():
        found.append(
            {
                "type": "query",
                "name": name,
                "label": label,
                "datasource": DATASOURCE,
                "query": {"query": query, "refId": name},
                "refresh": 2,  # when the time range changes
                "sort": 1,  # by name
                "multi": True,
                "includeAll": True,
                "allValue": ".*",  # a channel "" too: a topic's backlog
                "current": {"selected": True, "text": "All", "value": "$__all"},
            }
        )
    return found


def placed() -> list[dict[str, Any]]:
    """All panels, row by row, from left to right."""
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        found.append({"type": "row", "title": title, "collapsed": False, "gridPos": place})
        x, y = 0, y + 1
        height = 0
        for panel in panels:
            if x + panel.width > WIDTH:
                x, y = 0, y + height
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            found.append({**panel.document(), "gridPos": place})
            x, height = x + panel.width, panel.height
        y += height
    return [{"id": number, **panel} for number, panel in enumerate(found, 1)]


def dashboard() -> dict[str, Any]:
    alerts = {
        "name": "Alerts",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": RED,
        "expr": 'ALERTS{alertname=~"Shmq.+",alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{broker}} {{topic}} {{channel}}",
    }
    return {
        "uid": "shmq",
        "title": "shmq",
        "description": "Queues, consumers, dead letters, memory and disk of shmq instances.",
        "tags": ["shmq"],
        "schemaVersion": 38,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": variables()},
        "annotations": {"list": [alerts]},
        "panels": placed(),
    }


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    print()
