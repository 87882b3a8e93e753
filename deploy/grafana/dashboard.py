"""The Grafana dashboard, written by this script:

    python deploy/grafana/dashboard.py > deploy/grafana/starling.json

A row is a title and its panels; a panel is a title, its PromQL expressions with their legends, and a unit of Grafana.
`$run` is the run that is chosen above, `$interval` the range of rates.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

COLUMNS: Final = 24
"""Width of a dashboard in Grafana's units."""
DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
R: Final = '{run=~"$run"}'
EVENTS: Final = 'starling_run_events_total{run=~"$run", kind=~"left|refused|invalid|failed|set_aside|interrupted"}'
"""What happens to replicas."""
PUBLISH: Final = "starling_weights_publish_seconds"
DISKS: Final = 'node_filesystem_avail_bytes{run=~"$run", fstype!~"tmpfs|overlay|squashfs|ramfs"}'


@dataclass(frozen=True)
class Panel:
    """One panel: a graph over time, or another kind of Grafana's."""

    title: str
    queries: Mapping[str, str]
    """PromQL expressions by their legends."""
    unit: str = "short"
    kind: str = "timeseries"
    text: str = ""
    """Shown beside the title."""
    width: int = 8
    height: int = 7
    stacked: bool = False
    mappings: tuple[dict[str, Any], ...] = ()


UP: Final = (
    {"type": "value", "options": {"0": {"text": "down", "color": "red"}, "1": {"text": "up", "color": "green"}}},
)

ROWS: Final[Mapping[str, Sequence[Panel]]] = {
    "Alerts": [
        Panel(
            "Alerts that fire",
            {"{{alertname}}": 'ALERTS{alertname=~"Starling.*", alertstate="firing", run=~"$run|"}'},
            kind="table",
            text="`starling why runs/NAME` is the next command; the description of each alert says more.",
            width=16,
        ),
        Panel("Alarms of the policy", {"{{run}} {{alarm}}": f"starling_run_alarm{R}"}, kind="table"),
    ],
    "Topology and versions": [
        Panel("Controller", {"{{run}}": 'up{job="starling-run", run=~"$run"}'}, kind="stat", width=4, mappings=UP),
        Panel("Phase", {"{{phase}}": f"starling_run_phase{R}"}, kind="stat", width=4),
        Panel(
            "Steps", {"trained": f"starling_run_version{R}", "of": f"starling_run_last_step{R}"}, kind="stat", width=4
        ),
        Panel("Replicas", {"{{role}}": f"count by (run, role) (starling_replica_version{R})"}, kind="stat", width=4),
        Panel(
            "Replicas that were lost per hour",
            {
                "{{role}} {{reason}}": "sum by (role, reason) "
                '(increase(starling_replicas_left_total{run=~"$run", reason!="left"}[1h]))'
            },
        ),
        Panel("Silence of replicas", {"{{replica}}": f"starling_replica_silent_seconds{R}"}, "s"),
        Panel("Work in hand", {"{{replica}}": f"starling_replica_leases{R}"}),
        Panel(
            "Versions of the replicas",
            {"{{replica}}": f"starling_replica_version{R}", "published": f"starling_weights_version{R}"},
            width=16,
        ),
        Panel(
            "Events",
            {"{{kind}}": f"increase({EVENTS}[$interval])"},
        ),
    ],
    "Throughput": [
        Panel("Steps per minute", {"{{run}}": f"60 * rate(starling_steps_total{R}[$interval])"}),
        Panel(
            "Generated tokens",
            {
                "{{replica}}": 'starling_replica_tokens_per_second{run=~"$run", role="rollout"}',
                "sum": f"starling:rollout_tokens_per_second:sum{R}",
            },
            "tokens/s",
        ),
        Panel(
            "Trained tokens",
            {
                "of all time": f"starling:step_tokens:rate5m{R}",
                "of the time of training": f"starling_step_tokens_per_second{R}",
            },
            "tokens/s",
        ),
        Panel("Length of a completion", {"mean": f"starling_step_completion_tokens_mean{R}"}, "tokens"),
        Panel(
            "Model FLOP utilisation",
            {"{{run}}": f"starling_step_mfu_ratio{R}"},
            "percentunit",
            text="Absent where the peak of the device is unknown.",
        ),
        Panel(
            "Truncated completions and padding",
            {"truncated": f"starling_step_truncated_ratio{R}", "padding": f"starling_step_padding_ratio{R}"},
            "percentunit",
        ),
    ],
    "Staleness": [
        Panel(
            "Age of the trained completions",
            {
                "mean": f"starling_step_staleness_mean_versions{R}",
                "max": f"starling_step_staleness_max_versions{R}",
                "bound": f"starling_run_staleness_bound_versions{R}",
            },
            "versions",
        ),
        Panel("Trained tokens by age", {"{{age}}": f"starling_step_staleness_ratio{R}"}, "percentunit", stacked=True),
        Panel("Effective sample size", {"{{run}}": f"starling_step_ess_token_ratio{R}"}, "percentunit"),
    ],
    "Rewards and evaluation": [
        Panel(
            "Reward",
            {
                "trained": f"starling_step_reward_mean{R}",
                "sampled": f"starling_step_sampled_reward_mean{R}",
                "deviation": f"starling_step_reward_std{R}",
            },
        ),
        Panel(
            "Scores",
            {
                "{{scorer}}": f"starling_step_score{R}",
                "{{scorer}} (evaluation)": f"starling_step_eval_score{R}",
                "{{name}} (environment)": f"starling_step_env{R}",
            },
        ),
        Panel("Evaluation", {"reward": f"starling_evaluation_reward_mean{R}"}),
        Panel(
            "Evaluated version",
            {
                "version": f"starling_evaluation_version{R}",
                "evaluations": f"starling_evaluations_total{R}",
                "prompts that failed": f"starling_evaluation_failed_prompts{R}",
            },
            kind="stat",
        ),
        Panel(
            "Completions without advantage, groups filtered",
            {
                "advantage is 0": f"starling_step_zero_advantage_ratio{R}",
                "filtered": f"starling_step_filtered_ratio{R}",
            },
            "percentunit",
        ),
    ],
    "Learning": [
        Panel("Loss", {"{{run}}": f"starling_step_loss{R}"}),
        Panel("Entropy", {"{{run}}": f"starling_step_entropy_nats{R}"}, "nats"),
        Panel(
            "KL divergence",
            {
                "new from old policy": f"starling_step_approx_kl_nats{R}",
                "rollout from trainer": f"starling_step_mismatch_kl_nats{R}",
            },
            "nats",
        ),
        Panel("Gradient norm", {"{{run}}": f"starling_step_grad_norm{R}"}),
        Panel("Learning rate", {"{{run}}": f"starling_step_learning_rate{R}"}, "sci"),
        Panel(
            "Clipped tokens, skipped steps",
            {
                "clipped": f"starling_step_clip_ratio{R}",
                "skipped steps": f"increase(starling_steps_skipped_total{R}[$interval])",
            },
        ),
    ],
    "Time of a step": [
        Panel(
            "Parts",
            {"{{phase}}": f"starling:step_time:ratio_rate30m{R}"},
            "percentunit",
            text="wait_data: the policy starves.",
            width=16,
            stacked=True,
        ),
        Panel("Whole", {"mean": f"starling:step_seconds:mean30m{R}"}, "s"),
    ],
    "Weight synchronisation": [
        Panel(
            "Time to pull a version",
            {"mean": f"starling:weights_pull_seconds:mean30m{R}", "a step": f"starling:step_seconds:mean30m{R}"},
            "s",
        ),
        Panel("Pause of a rollout", {"mean": f"starling:weights_pause_seconds:mean30m{R}"}, "s"),
        Panel(
            "Time to publish",
            {"mean": f"rate({PUBLISH}_sum{R}[$interval]) / rate({PUBLISH}_count{R}[$interval])"},
            "s",
        ),
        Panel("Weights pulled", {"{{replica}}": f"rate(starling_weights_pulled_bytes_total{R}[$interval])"}, "Bps"),
        Panel(
            "Versions behind the policy",
            {
                "{{replica}}": f"starling:weights_lag:versions{R}",
                "{{replica}} pulls": f"starling_replica_pulling_version{R}",
            },
        ),
        Panel(
            "Time until all rollouts hold a version",
            {"{{run}} p90": f"histogram_quantile(0.9, rate(starling_weights_spread_seconds_bucket{R}[$interval]))"},
            "s",
        ),
        Panel("Adoptions without proof", {"{{run}}": f"increase(starling_weights_unproven_total{R}[$interval])"}),
    ],
    "Rollout queue": [
        Panel(
            "Groups by state",
            {"{{state}}": f"starling_run_groups{R}"},
            width=16,
            stacked=True,
            text="waiting: to be generated; generated: to be scored; scored: to be trained.",
        ),
        Panel("Completions in generation", {"{{replica}}": f"starling_replica_rows{R}"}),
        Panel("Groups trained per minute", {"{{run}}": f"60 * rate(starling_groups_trained_total{R}[$interval])"}),
        Panel(
            "Groups that failed per minute",
            {"{{outcome}} {{status}}": f"60 * rate(starling_groups_failed_total{R}[$interval])"},
        ),
        Panel(
            "Messages refused",
            {"messages": f"increase(starling_run_refused_messages_total{R}[$interval])"},
        ),
    ],
    "Rewards: workers of the run": [
        Panel("Scores to come", {"{{replica}}": f"starling_replica_queue_depth{R}"}),
        Panel("Workers that are ready", {"{{replica}}": f"starling_replica_workers_ready{R}"}),
        Panel(
            "Latency of rewards",
            {"{{instance}} {{front_end}} p95": f"starling:reward_latency_seconds:p95_10m{R}"},
            "s",
            text="Of groups, and of requests over HTTP.",
        ),
        Panel("Time of a call of a scorer", {"{{scorer}}": f"starling:reward_scorer_seconds:mean10m{R}"}, "s"),
        Panel("Scorers in quarantine", {"{{replica}}": f"starling_replica_scorers_quarantined{R}"}),
    ],
    "Rewards over HTTP": [
        Panel("Service", {"{{instance}}": 'up{job="starling-reward", run=~"$run"}'}, kind="stat", width=4, mappings=UP),
        Panel("Store", {"{{instance}}": f"starling_reward_store_available{R}"}, kind="stat", width=4, mappings=UP),
        Panel(
            "Samples answered",
            {"{{status}}": f"sum by (instance, status) (rate(starling_reward_samples_total{R}[$interval]))"},
            "ops",
        ),
        Panel(
            "Mean latency of a sample",
            {"{{instance}}": f"starling:reward_latency_seconds:mean5m{R}"},
            "s",
            text="By Little's law: samples in the service over samples per second.",
        ),
        Panel(
            "Failures",
            {
                "{{instance}}": f"starling:reward_failures:ratio_rate5m{R}",
                "{{instance}}: quarantined scorers": f"starling_reward_scorers_quarantined{R}",
            },
            "percentunit",
        ),
        Panel(
            "Queue",
            {
                "{{instance}} samples": f"starling_reward_pending_samples{R}",
                "{{instance}} scores": f"starling_reward_pending_scores{R}",
                "{{instance}} requests held": f"starling_reward_requests{R}",
            },
        ),
        Panel(
            "Workers",
            {
                "{{instance}} ready": f"starling_reward_workers{R}",
                "{{instance}} replaced": f"increase(starling_reward_workers_replaced_total{R}[$interval])",
            },
        ),
        Panel("Memory of requests", {"{{instance}}": f"starling_reward_held_bytes{R}"}, "bytes"),
        Panel(
            "Decoders of latents",
            {
                "{{instance}} ready": f"starling_reward_decoders{R}",
                "{{instance}} replaced": f"increase(starling_reward_decoders_replaced_total{R}[$interval])",
            },
        ),
        Panel("Time to decode a sample", {"{{instance}}": f"starling:reward_decode_seconds:mean5m{R}"}, "s"),
    ],
    "Journal and disks": [
        Panel(
            "Time until a record is durable",
            {
                "{{run}} p90": f"histogram_quantile(0.9, rate(starling_journal_lag_seconds_bucket{R}[$interval]))",
                "{{run}} now": f"starling_journal_waiting_seconds{R}",
            },
            "s",
        ),
        Panel(
            "Size of the journal",
            {"{{run}}": f"starling_run_journal_bytes{R}"},
            "bytes",
            text="It shrinks only by VACUUM, and reuses its space.",
        ),
        Panel(
            "Free space",
            {"{{instance}} {{mountpoint}}": f"{DISKS} / node_filesystem_size_bytes"},
            "percentunit",
            width=16,
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    return {
        "uid": "starling",
        "title": "Starling",
        "tags": ["starling"],
        "schemaVersion": 38,
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [*_variables()]},
        "panels": [*_panels()],
    }


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    query = {"query": 'label_values(up{job=~"starling-.*"}, run)', "refId": "run"}
    every = {"includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}}
    yield {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": DATASOURCE,
        "query": query,
        "refresh": 2,
        "sort": 1,
        **every,
    }
    steps = ("1m", "5m", "15m", "1h")
    options = [{"text": text, "value": text, "selected": text == "5m"} for text in steps]
    chosen = {"current": {"text": "5m", "value": "5m"}, "options": options}
    yield {"name": "interval", "label": "Range", "type": "interval", "query": ",".join(steps), **chosen}


def _panels() -> Iterator[dict[str, Any]]:
    """Yield rows and panels, from left to right and from top to bottom."""
    number = y = 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, y, COLUMNS, 1),
        }
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            number += 1
            yield {"id": number, "gridPos": _place(x, y, panel.width, panel.height), **_panel(panel)}
            x += panel.width
        y += panels[-1].height


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
        | ({"instant": True, "format": "table"} if panel.kind == "table" else {})
        for index, (legend, expression) in enumerate(panel.queries.items())
    ]
    style = {"fillOpacity": 60, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 5}
    custom = {"custom": style} if panel.kind == "timeseries" else {}
    shown = {"Phase": {"textMode": "name"}} if panel.kind == "stat" else {}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "mappings": list(panel.mappings), **custom}, "overrides": []},
        "options": shown.get(panel.title, {}),
    }


def main() -> None:
    """Write the dashboard."""
    json.dump(dashboard(), sys.stdout, indent=1, ensure_ascii=False)
    print()


if __name__ == "__main__":
    main()
