"""The reference page of the metrics, written from their families: ``python -m starling.cli.metrics_reference``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starling.common.observe.endpoint import FAMILIES as SERVICE_FAMILIES
from starling.common.observe.metrics import Family, table
from starling.controller.shell.metrics.families import FAMILIES as RUN_FAMILIES
from starling.policy.shell.metrics import FAMILIES as POLICY_FAMILIES
from starling.reward.http.metrics import REQUEST_FAMILIES
from starling.reward.score.metrics import FAMILIES as WORKER_FAMILIES
from starling.rollout.shell.metrics import FAMILIES as ROLLOUT_FAMILIES
from starling.rollout.shell.metrics import TEACHER_FAMILIES

PATH: Final = Path("docs/reference/prometheus.md")
INTRODUCTION: Final = """\
# Metrics for Prometheus

Written by `python -m starling.cli.metrics_reference`. Which process has metrics in the text format of Prometheus, and
where; [how to collect them](../how-to/deploy/monitoring.md), with alerts and a dashboard, is another page.

| process | endpoint |
|---|---|
| controller, policy, rollout, teacher, reward | `GET /metrics` at `observe.http`, by `observe.token_file` |
| reward with `reward.http.enabled` | also that of [its HTTP front end](../how-to/reward-service.md), with its token |
| vLLM in a rollout | none; figures of its scheduler are the rollout's, from `starling_rollout_kv_cache_ratio` on |

A *summary* has a sum and a count: `rate(x_sum[30m]) / rate(x_count[30m])` is the mean. Counters begin anew with each
process. Of each metric at most 512 series are served.
"""
SECTIONS: Final[Sequence[tuple[str, str, Sequence[Family]]]] = (
    (
        "Every service",
        "At the endpoint `observe.http` of each process, also of the further nodes of a replica.",
        SERVICE_FAMILIES,
    ),
    (
        "Run",
        "Of the controller: what its state, its journal and the [lines of\n"
        "metrics.jsonl](log-events.md#lines-of-metricsjsonl) say. `starling_step_*` gauges are [metrics of the last\n"
        "step](metrics.md); one that the step did not measure has no value.",
        RUN_FAMILIES,
    ),
    ("Policy", "", POLICY_FAMILIES),
    ("Rollout", "", ROLLOUT_FAMILIES),
    ("Teacher", "", TEACHER_FAMILIES),
    (
        "Reward service",
        "At both of its endpoints. Those of decoders have values with `[reward.decoder]` only.",
        WORKER_FAMILIES,
    ),
    ("Requests of HTTP clients", "At its HTTP front end.", REQUEST_FAMILIES),
)


def reference() -> str:
    """Return the page as Markdown."""
    parts = [INTRODUCTION]
    for title, text, families in SECTIONS:
        parts += [f"\n## {title}\n\n", f"{text}\n\n" if text else "", table(families), "\n"]
    return "".join(parts)


if __name__ == "__main__":
    PATH.write_text(reference())
