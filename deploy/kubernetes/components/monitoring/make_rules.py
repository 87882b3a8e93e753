"""Write rules.yaml, a PrometheusRule with the rules of deploy/prometheus/rules.

python deploy/kubernetes/components/monitoring/make_rules.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
RULES = HERE.parents[2] / "prometheus/rules"
FIRST_LINE = "# Written by make_rules.py from deploy/prometheus/rules.\n"


def prometheus_rule() -> dict[str, Any]:
    """Return the custom resource: the groups of all files, in the order of their names."""
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(path.read_text())["groups"]]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "starling", "labels": {"app.kubernetes.io/part-of": "starling"}},
        "spec": {"groups": groups},
    }


if __name__ == "__main__":
    (HERE / "rules.yaml").write_text(FIRST_LINE + yaml.safe_dump(prometheus_rule(), sort_keys=False, width=1000))
