"""The units of systemd: their syntax, their hardening, and a reward service in a machine that was booted by systemd."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from systemd_machine import PATIENCE_S, PROGRAM, ROOT, Machine, machine

from starling.cli.deploy.systemd import Service, install, unit_text

FOLDER = ROOT / "libs/cli/starling/cli/deploy/units"
UNITS = sorted(FOLDER.glob("*.service"))
MAX_EXPOSURE = 3.0
NAMES = {"controller": "controller", "policy": "policy@", "rollout": "rollout@", "reward": "reward"}


@pytest.fixture(autouse=True)
def has_systemd() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")


@pytest.mark.parametrize("role", NAMES)
def test_installed_unit_is_verified_without_a_word(role: str, tmp_path: Path) -> None:
    controller = "tcp://10.0.0.1:5555" if role in ("policy", "rollout") else ""
    install(Service(role, "", controller, -1, Path("/etc/starling/recipe.toml"), Path("/usr/bin/true")), tmp_path)
    for name in (f"starling-{NAMES[role]}.service", "starling.target"):
        unit = tmp_path / "etc/systemd/system" / name
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_unit_is_hardened(unit: Path) -> None:
    output = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    found = re.search(r"exposure level for .*: ([\d.]+)", output)
    assert found is not None, output
    assert float(found[1]) <= MAX_EXPOSURE, output


def test_units_are_those_of_the_package() -> None:
    for path in FOLDER.iterdir():
        assert path.read_text() == unit_text(path.name)
    assert {path.name for path in UNITS} == {f"starling-{name}.service" for name in NAMES.values()}


def test_wheel_contains_the_units(tmp_path: Path) -> None:
    """As `uv build` makes it, in an environment of its own."""
    source = shutil.copytree(ROOT / "libs/cli", tmp_path / "cli")
    command = [Path(sys.executable).with_name("uv"), "build", "--wheel", "--out-dir", tmp_path]
    subprocess.run(command, cwd=source, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"starling/cli/deploy/units/{path.name}" for path in FOLDER.iterdir()} <= set(names)
    assert tomllib.loads((source / "pyproject.toml").read_text())["project"]["name"] == "starling-cli"


RECIPE = """
[[reward.scorers]]
name = "/etc/starling/mine.py:reward"

[reward.http]
enabled = true
port = 8700
"""
SCORER = """
def reward(completion, reference, prompt_text, metadata):
    return float(completion == reference)
"""
REQUEST = '{"samples": [{"completion": "a", "reference": "a"}, {"completion": "a", "reference": "b"}], "wait_s": 60}'


def eventually(is_true: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not (found := is_true()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def rewards(booted: Machine) -> str:
    header = "content-type: application/json"
    return booted.run("curl", "-s", "-H", header, "-d", REQUEST, "http://127.0.0.1:8700/v1/rewards", check=False)


def test_reward_service_on_a_machine(tmp_path: Path) -> None:
    """It scores in sandboxes, is restarted when it hangs or is killed, stops, and is not restarted after 2."""
    unit = "starling-reward.service"
    with machine(tmp_path) as booted:
        said = booted.run(str(PROGRAM), "deploy", "systemd", "--role", "reward", "--program", str(PROGRAM))
        assert f"systemctl enable --now {unit} starling.target" in said
        booted.write("/etc/starling/recipe.toml", RECIPE)
        booted.write("/etc/starling/mine.py", SCORER)
        # A shorter period than that of the unit, which is verified above: the same mechanism, seen sooner.
        booted.write(f"/etc/systemd/system/{unit}.d/test.conf", "[Service]\nWatchdogSec=10\n")
        booted.run("sh", "-c", "systemd-sysusers && systemctl daemon-reload")
        booted.run("systemctl", "enable", "--now", unit, "starling.target")
        assert booted.value(unit, "ActiveState") == "active"
        assert "serves http://127.0.0.1:8700" in booted.value(unit, "StatusText")
        assert '"rewards":[1.0,0.0]' in rewards(booted)
        assert booted.run("stat", "-c", "%U %a", "/var/lib/starling-reward").strip() == "starling-reward 700"
        assert "mechanism=namespaces" in booted.log(unit), "the hardening leaves sandboxes their namespaces"
        assert "mechanism=landlock" not in booted.log(unit)

        first = booted.value(unit, "MainPID")
        booted.run("kill", "-STOP", first)
        assert eventually(lambda: booted.value(unit, "NRestarts") == "1"), booted.log(unit)
        assert "Watchdog timeout" in booted.log(unit)
        assert eventually(lambda: booted.value(unit, "ActiveState") == "active")
        assert booted.value(unit, "MainPID") != first
        assert '"rewards":[1.0,0.0]' in rewards(booted)

        booted.run("kill", "-KILL", booted.value(unit, "MainPID"))
        assert eventually(lambda: booted.value(unit, "NRestarts") == "2"), booted.log(unit)
        assert eventually(lambda: booted.value(unit, "ActiveState") == "active")

        booted.run("systemctl", "stop", "starling.target")
        assert eventually(lambda: booted.value(unit, "ActiveState") == "inactive"), booted.log(unit)
        assert booted.value(unit, "Result") == "success"
        booted.write("/etc/starling/recipe.toml", RECIPE.replace("port", "prot"))
        booted.run("systemctl", "start", unit, check=False)
        assert booted.value(unit, "ActiveState") == "failed", "a wrong setting does not improve"
        assert booted.value(unit, "NRestarts") == "0"
        assert "prot" in booted.log(unit)
