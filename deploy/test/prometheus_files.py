"""Files of deploy/prometheus and deploy/grafana, and the programs of Prometheus that check them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

ROOT: Final = Path(__file__).parents[2]
PROMETHEUS: Final = ROOT / "deploy/prometheus"
DASHBOARD: Final = ROOT / "deploy/grafana/starling.json"
RULES: Final = sorted((PROMETHEUS / "rules").glob("*.yml"))
RULE_TESTS: Final = sorted((PROMETHEUS / "tests").glob("*.yml"))
PACKAGES: Final = {
    "prometheus": ("prometheus", "promtool"),
    "prometheus-alertmanager": ("prometheus-alertmanager", "amtool"),
    "prometheus-node-exporter": ("prometheus-node-exporter",),
}
"""Debian packages, and their programs that are used here."""
PATIENCE_S: Final = 240.0
"""Deadline of anything that is waited for, on a busy machine."""
CHECK_S: Final = 900.0
"""Deadline of one program that checks files: a second on a machine that does nothing else."""


def rules() -> list[dict[str, Any]]:
    """Return all rules of all files."""
    files = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """Return the alerts among them."""
    return [rule for rule in rules() if "alert" in rule]


def dashboard_expressions() -> list[str]:
    """Return the expressions of the dashboard, with values for its variables."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [expression.replace("$run", ".*").replace("$interval", "5m") for expression in found]


def find_programs(folder: Path) -> Mapping[str, str]:
    """Return the paths of the programs: of those installed, else of Debian's packages, unpacked into a new `folder`.

    Skips the test where neither is possible.
    """
    names = [name for programs in PACKAGES.values() for name in programs]
    found = {name: path for name in names if (path := shutil.which(name)) is not None}
    missing = [package for package, programs in PACKAGES.items() if not found.keys() >= set(programs)]
    if not missing:
        return found
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        pytest.skip(f"needs {', '.join(missing)}, of Debian or of the same names elsewhere")
    folder.mkdir()
    folder.chmod(0o777)  # apt downloads as another user
    subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True, timeout=300, capture_output=True)
    for file in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", file, folder / "root"], check=True, timeout=120)
    return found | {name: str(folder / "root/usr/bin" / name) for name in names if name not in found}


def checked(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a program and return its output. Fails with the output for an exit code other than 0."""
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=CHECK_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
