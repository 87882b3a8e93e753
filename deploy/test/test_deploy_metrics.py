"""Metrics of real services: those that rules and dashboard read."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import promql
import pytest
from metrics_services import (
    DECODERS,
    RECIPE,
    asked,
    await_all,
    free_port,
    labels_by_metric,
    process_titled,
    save_decoder,
    scrape,
    start_rewards,
    start_run,
    started,
    values,
)
from prometheus_files import PATIENCE_S, ROOT, dashboard_expressions, find_programs, rules

TARGET_LABELS: Final = frozenset({"job", "instance", "run"})
"""Labels that Prometheus gives each series of a target; `run` as in prometheus.yml."""
OF_DECODERS: Final = frozenset(
    f"starling_reward_{name}"
    for name in ("decoded_samples_total", "decode_seconds_total", "decoders", "decoders_replaced_total")
)
"""Metrics of a reward service that has decoders."""
OF_TEACHERS: Final = "starling_teacher_"
"""Beginning of the names of metrics that only teachers expose."""
OF_PROMETHEUS: Final = {"up": TARGET_LABELS, "ALERTS": frozenset({"alertname", "alertstate", "severity"})}
"""Metrics that Prometheus makes itself."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return find_programs(tmp_path_factory.getbasetemp() / "programs")


@dataclass(frozen=True)
class Services:
    """Addresses of what is running."""

    run: Mapping[str, str]
    """By the names of its processes."""
    reward: str
    node: str
    folder: Path
    """Of the run's attempt."""

    def texts(self) -> list[str]:
        """Return the metrics of all processes of Starling."""
        return [scrape(address) for address in (*self.run.values(), self.reward)]


@pytest.fixture(scope="module")
def services(programs: Mapping[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Start a run, a reward service, and a node exporter."""
    folder = tmp_path_factory.mktemp("services")
    folder.chmod(0o755)  # workers of the reward service may be another user
    node = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        stack.enter_context(
            started(folder, "node", programs["prometheus-node-exporter"], f"--web.listen-address={node}")
        )
        two = RECIPE.replace("num_rollouts = 1", "num_rollouts = 2")
        _, run = start_run(stack, folder, two)
        controller = run["controller"]
        await_all(lambda: 'starling_replica_version{replica="rollout-1"' in scrape(controller))
        process_titled("rollout-1", folder).kill()  # so that one has left
        reward = start_rewards(stack, folder)
        answer = asked(f"http://{reward}/v1/rewards", {"samples": [{"completion": "abc"}], "wait_s": 60})
        assert json.loads(answer)["rewards"] == [3.0], answer
        found = Services(run, reward, node, folder / "runs/metrics/attempt-1")
        await_all(
            lambda: 'starling_reward_samples_total{status="ok"}' in scrape(reward),
            lambda: 'starling_run_alarm{alarm="entropy"} 1' in scrape(controller),
            lambda: "starling_step_mismatch_kl_nats " in scrape(controller),
            lambda: 'status="reward_error"' in scrape(controller),
            lambda: "starling_replicas_left_total{" in scrape(controller),
            lambda: "node_filesystem_avail_bytes{" in scrape(node),
        )
        yield found


def test_services_expose_every_metric_and_label_of_rules_and_dashboard(services: Services) -> None:
    exposed = labels_by_metric(*services.texts(), scrape(services.node))
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    problems = []
    for expression in [*dashboard_expressions(), *(rule["expr"] for rule in rules())]:
        for name, labels in promql.selectors(expression):
            sources = promql.reads(recorded[name], recorded) if name in recorded else {name}
            known = {**exposed, **OF_PROMETHEUS}
            problems += [f"{source} in {expression}" for source in sources - OF_DECODERS if source not in known]
            of_sources = frozenset[str]().union(TARGET_LABELS, *(known.get(source, ()) for source in sources))
            problems += [f"label {label} of {name} in {expression}" for label in labels - of_sources]
        problems += [f"label {label} in {expression}" for label in promql.grouped(expression) - all_labels(exposed)]
    assert problems == []


def all_labels(exposed: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the labels of all metrics."""
    return frozenset[str]().union(TARGET_LABELS, {"alertname", "alertstate"}, *exposed.values())


def test_reference_lists_every_metric_of_the_services(services: Services) -> None:
    found = described(*services.texts())
    assert {name: row for name, row in listed().items() if not name.startswith(OF_TEACHERS)} == found


def listed() -> dict[str, tuple[str, str]]:
    """Return type and text of each metric in the reference."""
    page = (ROOT / "docs/reference/prometheus.md").read_text()
    rows = re.findall(r"^\| `((?:starling|process)_\w+)` \| (\w+) \| [^|]* \| (.*) \|$", page, re.MULTILINE)
    return {name: (kind, text) for name, kind, text in rows}


def described(*texts: str) -> dict[str, tuple[str, str]]:
    """Return type and text of each metric of services."""
    lines = [line.split(maxsplit=3) for text in texts for line in text.splitlines() if line.startswith("# ")]
    kinds = {name: rest for _, what, name, rest in lines if what == "TYPE"}
    return {name: (kinds[name], rest) for _, what, name, rest in lines if what == "HELP"}


def test_reward_service_with_decoders_exposes_their_metrics(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # workers may be another user
    save_decoder(tmp_path / "vae")
    with ExitStack() as stack:
        address = start_rewards(stack, tmp_path, DECODERS)
        await_all(lambda: "starling_reward_decoders 1" in scrape(address))
        found = described(scrape(address))
    assert found.keys() >= OF_DECODERS
    assert {name: listed()[name] for name in found} == found


def test_controller_counts_as_the_lines_do_and_waits_for_the_last_scrape(tmp_path: Path) -> None:
    recipe = RECIPE.replace("num_steps = 1000000", "num_steps = 5")
    last = ""
    with ExitStack() as stack:
        run, addresses = start_run(stack, tmp_path, recipe)
        while text := scrape(addresses["controller"]):
            last = text
            time.sleep(0.5)
        assert run.wait(PATIENCE_S) == 0, (tmp_path / "run.log").read_text()
    found = values(last)
    path = tmp_path / "runs/metrics/attempt-1/metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert found["starling_steps_total"] == len(steps) == 8
    assert found["starling_groups_trained_total"] == 5 * 4
    assert found["starling_step_reward_mean"] == steps[-1]["reward_mean"]
    assert found["starling_step_tokens_total"] == sum(step["num_tokens"] for step in steps)
    assert found["starling_run_staleness_bound_versions"] == 2.0
    assert found["starling_weights_unproven_total"] == 0.0
    for kind in {line["kind"] for line in lines}:
        assert found[f'starling_run_events_total{{kind="{kind}"}}'] == sum(line["kind"] == kind for line in lines)
    for name, key in (("pull_seconds", "pull_s"), ("pause_seconds", "pause_s")):
        measured = [line[key] for line in lines if line["kind"] == "adopted" and line["replica"] == "rollout-0"]
        assert found[f'starling_weights_{name}_count{{replica="rollout-0"}}'] == len(measured)
        assert found[f'starling_weights_{name}_sum{{replica="rollout-0"}}'] == pytest.approx(sum(measured))
    parts = sum(value for name, value in found.items() if name.startswith("starling_step_time_seconds_total"))
    assert parts == pytest.approx(found["starling_step_seconds_total"], rel=1e-3)
    outcomes = {name: value for name, value in found.items() if name.startswith("starling_run_outcome")}
    assert [name for name, value in outcomes.items() if value] == ['starling_run_outcome{outcome="complete"}']
    assert found['starling_run_phase{phase="over"}'] == 1
    assert found["starling_weights_spread_seconds_count"] > 0
    assert found["starling_journal_lag_seconds_count"] > 0
