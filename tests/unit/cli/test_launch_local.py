"""Launchers by name, and the one that starts replicas as processes of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from starling.cli.launch.interface import Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.launchers import LAUNCHERS, make_launcher
from starling.cli.launch.partly_local import PartlyLocalLauncher
from starling.cli.launch.ssh import SshLauncher
from starling.cli.recipe.schema import load_recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.processes import ServiceProcesses
from starling.common.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"
CLI = Path(__file__).parents[3] / "libs/cli"


def site_in(folder: Path, *flags: str) -> LaunchSite:
    recipe = load_recipe([RECIPE], flags)
    children = ServiceProcesses(folder / "logs", 1, lambda name, line: None)
    return LaunchSite(recipe, Attempt(folder), children, print)


def test_launcher_of_another_name_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"there is no launcher 'locale'; choose one of .*; did you mean 'local'"):
        load_recipe([RECIPE], ["--launch.launcher=locale"])


def test_each_launcher_of_the_table_is_there() -> None:
    for target in LAUNCHERS.values():
        module, _, name = target.partition(":")
        assert f"class {name}" in CLI.joinpath(*module.split(".")).with_suffix(".py").read_text()


def test_local_launcher_reports_each_end_once(tmp_path: Path) -> None:
    site = site_in(tmp_path)
    launcher = make_launcher("local", site)
    placement = Placement("reward-0", "reward", ("--nonsense",))
    try:
        for _ in range(2):  # the second start is that of one that has ended
            launcher.start(placement)
            deadline = time.monotonic() + 120
            ended: list[Ended] = []
            while not ended and time.monotonic() < deadline:
                ended = launcher.poll()
                time.sleep(0.05)
            assert ended == [Ended("reward-0", 2, "exited with code 2")]
            assert launcher.poll() == []
        launcher.stop("reward-0")
        launcher.stop("reward-1")
    finally:
        launcher.close()
        site.children.kill()


def test_local_launcher_stops_and_closes(tmp_path: Path) -> None:
    """A replica whose controller is not there waits for it until it is stopped."""
    site = site_in(tmp_path)
    launcher = make_launcher("local", site)
    try:
        for name in ("reward-0", "reward-1"):
            launcher.start(
                Placement(
                    name, "reward", ("--network.curve=false", "--controller", "tcp://127.0.0.1:9", "--name", name)
                )
            )
        deadline = time.monotonic() + 120
        ended: list[Ended] = []
        while not ended and time.monotonic() < deadline:
            launcher.stop("reward-0")
            ended = launcher.poll()
            time.sleep(0.05)
        assert [one.name for one in ended] == ["reward-0"]
        assert [child.name for child in site.children.running()] == ["reward-1"]
        launcher.close()
        assert not site.children.running()
    finally:
        site.children.kill()


def test_run_waits_for_the_slowest_launcher_in_use(tmp_path: Path) -> None:
    site = site_in(tmp_path, '--launch.hosts=[{ host = "127.0.0.1", shared = true }]')
    ssh = SshLauncher(site)
    launcher, local = PartlyLocalLauncher(site, ssh, ["rollout"]), make_launcher("local", site)
    try:
        launcher.start(Placement("reward-0", "reward", ("--nonsense",)))
        assert launcher.leave_s == local.leave_s < ssh.leave_s
        with pytest.raises(LaunchError, match="rollout-0 needs 1 GPU"):
            launcher.start(Placement("rollout-0", "rollout", (), num_gpus=1))
        assert launcher.leave_s == ssh.leave_s
    finally:
        launcher.close()
        site.children.kill()
