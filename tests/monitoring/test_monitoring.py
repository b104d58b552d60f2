"""The alerts and the dashboard of docs/monitoring, by Prometheus' own programs, against /metrics of
a real gateway. Grafana itself is not here: its published types have to do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from monitoring.conftest import RULES, Prometheus
from prometheus_client.parser import text_string_to_metric_families
from support.external_programs import missing, peer
from support.nsq_client import Server
from support.processes import ROOT, eventually

README = ROOT / "docs" / "monitoring" / "README.md"
DASHBOARD = README.with_name("dashboard.json")
TESTS = Path(__file__).with_name("rules.test.yml")
#: Labels that Prometheus adds to each series that it scrapes.
ADDED = {"instance", "job"}

_SELECTOR = re.compile(r"\b(shmq_\w+|up|scrape_\w+)((?:\{[^}]*\})?)")
_MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left)\s*\(([^)]*)\)")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if "targets" in panel]


def chosen(expression: str) -> str:
    """A query as Grafana asks it when all is chosen."""
    for name, value in (
        ("$__rate_interval", "5s"),
        ("$host", ".*"),
        ("$broker", ".*"),
        ("$topic", ".*"),
        ("$channel", ".*"),
    ):
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def expressions() -> list[str]:
    """Of all alerts, panels and variables."""
    of_panels = [chosen(query["expr"]) for panel in panels() for query in panel["targets"]]
    of_variables = [
        chosen(variable["query"]["query"])
        for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]
        if variable["type"] == "query"
    ]
    return [rule["expr"] for rule in rules()] + of_panels + of_variables


def promtool(*words: str, given: bytes = b"") -> str:
    done = subprocess.run([peer("promtool"), *words], input=given, capture_output=True)
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    return output


# ---- the alerts ----


def test_promtool_accepts_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", "--lint-fatal", str(RULES))


def test_promtool_accepts_the_configuration_of_the_documentation(tmp_path: Path) -> None:
    (text,) = re.findall(r"^ {4}scrape_configs:\n(?: {4}.*\n)+", README.read_text(), re.M)
    config = tmp_path / "prometheus.yml"
    config.write_text(textwrap.dedent(text).replace("/etc/prometheus/shmq.rules.yml", str(RULES)))
    assert str(RULES) in config.read_text()
    assert f"{len(rules())} rules found" in promtool("check", "config", str(config))


def test_the_documentation_has_each_alert() -> None:
    text = README.read_text()
    for rule in rules():
        assert f"`{rule['alert']}`" in text
    assert len(set(re.findall(r"`(Shmq\w+)`", text))) == len(rules())


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(TESTS))
    text = TESTS.read_text()
    for rule in rules():
        assert f'ALERTS{{alertname="{rule["alert"]}"' in text, "no test lets it fire"
        assert f"- name: {rule['alert']}\n" in text or f"- name: {rule['alert']} " in text


def test_an_alert_that_fires_too_late_fails_its_test(tmp_path: Path) -> None:
    text = RULES.read_text().replace("for: 1m", "for: 30m")
    (tmp_path / RULES.name).write_text(text)
    tests = tmp_path / TESTS.name
    tests.write_text(TESTS.read_text().replace(f"../../docs/monitoring/{RULES.name}", RULES.name))
    done = subprocess.run([peer("promtool"), "test", "rules", tests], capture_output=True)
    assert done.returncode != 0


def test_the_words_of_an_alert_are_labels_that_it_has(server: Server) -> None:
    series = labels_of(server)
    for rule in rules():
        first = _SELECTOR.findall(rule["expr"])[0][0]
        for text in rule["annotations"].values():
            used = set(re.findall(r"\$labels\.(\w+)", text))
            assert used <= series[first], rule["alert"]


# ---- against /metrics ----


def scrape(server: Server) -> str:
    reply = server.http("GET", "/metrics")
    assert reply.status == 200
    return reply.body.decode()


def labels_of(server: Server) -> dict[str, set[str]]:
    """Series -> its labels, as Prometheus stores them."""
    found = {"up": set(ADDED), "scrape_duration_seconds": set(ADDED)}
    for family in text_string_to_metric_families(scrape(server)):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels, ADDED)
    return found


def test_promtool_finds_nothing_wrong_with_metrics(server: Server) -> None:
    assert promtool("check", "metrics", given=scrape(server).encode()) == ""


def test_rules_and_dashboard_ask_for_series_and_labels_that_there_are(server: Server) -> None:
    series = labels_of(server)
    for expression in expressions():
        selectors = _SELECTOR.findall(expression)
        assert selectors, expression
        known = set.union(*(series[name] for name, _ in selectors))  # KeyError: no such series
        for name, matchers in selectors:
            assert set(_MATCHER.findall(matchers)) <= series[name], expression
        for words in _GROUPING.findall(expression):
            assert set(re.findall(r"\w+", words)) <= known, expression


def test_the_tests_of_alerts_have_series_with_the_labels_of_metrics(server: Server) -> None:
    series = labels_of(server)
    given = [
        item["series"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for item in test["input_series"]
    ]
    assert given
    for text in given:
        ((name, matchers),) = _SELECTOR.findall(text)
        assert set(_MATCHER.findall(matchers)) == series[name], text


# ---- in a real Prometheus ----


def test_prometheus_evaluates_all_alerts(prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        (group,) = prometheus.ask("rules")["groups"]
        assert {rule["name"] for rule in group["rules"]} == {rule["alert"] for rule in rules()}
        assert all(rule.get("lastError", "") == "" for rule in group["rules"]), group
        return all(rule["health"] == "ok" for rule in group["rules"])

    eventually(evaluated, what="all rules are evaluated")


def test_every_series_of_an_alert_has_samples(prometheus: Prometheus) -> None:
    for rule in rules():
        for name, matchers in _SELECTOR.findall(rule["expr"]):
            prometheus_has = prometheus.query(f"{name}{matchers}")
            assert prometheus_has, f"{rule['alert']}: {name}{matchers}"


def test_dead_letters_and_redeliveries_are_alerts(prometheus: Prometheus) -> None:
    for name in ("ShmqDeadLetters", "ShmqManyRedeliveries"):
        (expression,) = [rule["expr"] for rule in rules() if rule["alert"] == name]

        def found(expression: str = expression) -> list[str]:
            return [labels["topic"] for labels, _ in prometheus.query(expression)]

        eventually(lambda found=found: found() == ["jobs"], what=name)


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_every_query_of_a_panel_has_data(panel: dict[str, Any], prometheus: Prometheus) -> None:
    for query in panel["targets"]:
        expression = chosen(query["expr"])
        eventually(lambda expression=expression: prometheus.query(expression), what=expression)


@pytest.mark.parametrize(
    "title",
    [
        "Waiting",
        "Finished",
        "Dead letters, 1 h",
        "Redelivered",
        "Published by topic",
        "Paused",
        "Consumers by channel",
        "Waiting in dead topics",
        "On disk by channel",
        "Consumers through the gateway",
        "Time of a scrape",
    ],
)
def test_what_the_traffic_does_is_seen(title: str, prometheus: Prometheus) -> None:
    (panel,) = [panel for panel in panels() if panel["title"] == title]
    for query in panel["targets"]:
        expression = chosen(query["expr"])
        eventually(
            lambda expression=expression: any(
                value > 0 for _, value in prometheus.query(expression)
            ),
            what=f"{expression} > 0",
        )


# ---- the dashboard's document ----


def test_the_dashboard_is_what_its_program_writes() -> None:
    program = ROOT / "tools" / "dashboard.py"
    written = subprocess.run([sys.executable, program], capture_output=True, check=True, text=True)
    assert written.stdout == DASHBOARD.read_text(), "run tools/dev tables"


def test_panels_have_places_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    every = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every}) == len(every)
    for panel in every:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


def lost(given: Any, kept: Any, path: str = "") -> list[str]:
    """Where a document that was read and written again is not the same. It may have more."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            place
            for key, value in given.items()
            for place in lost(value, kept.get(key, "-"), f"{path}.{key}")
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            place
            for number, pair in enumerate(zip(given, kept, strict=True))
            for place in lost(*pair, f"{path}[{number}]")
        ]
    return [] if given == kept else [f"{path}: {given!r}, {kept!r}"]


def test_grafanas_types_know_every_field() -> None:
    """A field that they do not know is lost when they read and write the document."""
    try:
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.cog.plugins import register_default_plugins
        from grafana_foundation_sdk.models import units
        from grafana_foundation_sdk.models.dashboard import Dashboard
    except ImportError:
        missing("grafana-foundation-sdk", "tools/dev test tests/monitoring installs it")
    register_default_plugins()
    given = json.loads(DASHBOARD.read_text())
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    # these two belong to the data source, which the types leave open
    own = {".annotations.list[0].titleFormat", ".annotations.list[0].textFormat"}
    assert {place.partition(":")[0] for place in lost(given, kept)} == own
    known = {value for value in vars(units).values() if isinstance(value, str)}
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"] in known, panel["title"]
