"""Prometheus' configuration, rules and dashboard, with the programs of Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import promql
import pytest
import yaml
from prometheus_files import (
    DASHBOARD,
    PROMETHEUS,
    ROOT,
    RULE_TESTS,
    RULES,
    alerts,
    checked,
    dashboard_expressions,
    find_programs,
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return find_programs(tmp_path_factory.getbasetemp() / "packages")


def test_promtool_accepts_configuration_and_rules(programs: Mapping[str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    (tmp_path / "token").write_text("secret")
    config = folder / "prometheus.yml"
    text = re.sub(r"/run/secrets/[a-z-]+-token", str(tmp_path / "token"), config.read_text())
    config.write_text(text)
    shutil.copy(folder / "targets/example.yml", folder / "targets/run-mine.yml")
    output = checked(programs["promtool"], "check", "config", config)
    assert f"{len(RULES)} rule files found" in output
    for path in RULES:
        assert "SUCCESS" in checked(programs["promtool"], "check", "rules", path)


def test_amtool_accepts_the_example_of_alertmanager(programs: Mapping[str, str]) -> None:
    assert "SUCCESS" in checked(programs["amtool"], "check-config", PROMETHEUS / "alertmanager.yml")


@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
def test_rules_pass_their_unit_tests(programs: Mapping[str, str], path: Path) -> None:
    assert "SUCCESS" in checked(programs["promtool"], "test", "rules", path)


def test_each_alert_fires_in_a_unit_test_and_not_in_the_ordinary_case() -> None:
    fires, ordinary = set(), set()
    for path in RULE_TESTS:
        file = yaml.safe_load(path.read_text())
        expected = [test for group in file["tests"] for test in group["promql_expr_test"]]
        fires |= {
            name
            for test in expected
            if test.get("exp_samples")
            for name in re.findall(r'alertname="(\w+)"', test["expr"])
        }
        first = file["tests"][0]
        assert first["name"].startswith(("an ordinary", "ordinary"))
        series = {name for one in first["input_series"] for name, _ in promql.selectors(one["series"])}
        sources = [yaml.safe_load((path.parent / rule_file).resolve().read_text()) for rule_file in file["rule_files"]]
        made = [rule for source in sources for group in source["groups"] for rule in group["rules"]]
        recorded = {rule["record"]: rule["expr"] for rule in made if "record" in rule}
        ordinary |= {
            rule["alert"] for rule in made if "alert" in rule and promql.reads(rule["expr"], recorded) & series
        }
    assert fires == {alert["alert"] for alert in alerts()}
    assert ordinary == fires - {"StarlingRunAlarm"}, "an ordinary run has no such series"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_alert_says_what_happened_and_the_next_command(alert: Mapping[str, Any]) -> None:
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"]["summary"].endswith(".")
    commands = re.findall(
        r"`(starling (?:why|status|stop|set|run|sync-report)|curl|df|grep|tail|du) ",
        alert["annotations"]["description"],
    )
    assert commands, "the description names no command"
    pages = re.findall(r"docs/[\w/-]+\.md", alert["annotations"]["description"])
    assert all((ROOT / page).exists() for page in pages), pages


def test_dashboard_is_as_its_script_writes_it() -> None:
    written = checked(sys.executable, ROOT / "deploy/grafana/dashboard.py")
    assert DASHBOARD.read_text() == written, "run python deploy/grafana/dashboard.py > deploy/grafana/starling.json"
    places = [panel["gridPos"] for panel in json.loads(written)["panels"]]
    cells = [
        (x, y)
        for one in places
        for x in range(one["x"], one["x"] + one["w"])
        for y in range(one["y"], one["y"] + one["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert all(x < 24 for x, _ in cells)


def test_promtool_parses_each_expression_of_the_dashboard(programs: Mapping[str, str], tmp_path: Path) -> None:
    found = [
        {"record": f"panel:{index}", "expr": expression} for index, expression in enumerate(dashboard_expressions())
    ]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": found}]}))
    assert f"{len(found)} rules found" in checked(programs["promtool"], "check", "rules", path)
