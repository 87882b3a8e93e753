"""Launchers by name, and the one that starts replicas as processes of this machine."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from starling.cli.launch.interface import Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.kubernetes.manifests import manifests
from starling.cli.launch.launchers import LAUNCHERS, make_launcher
from starling.cli.launch.partly_local import PartlyLocalLauncher
from starling.cli.launch.ray.needs import needs
from starling.cli.launch.slurm import nodes_script
from starling.cli.launch.ssh import SshLauncher
from starling.cli.recipe.schema import load_recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.placements import placement_of
from starling.cli.run.processes import ServiceProcesses
from starling.common.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"
VLLM = ("--rollout.engine=vllm", "--rollout.vllm.tensor_parallel_size=2")
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


def test_nodes_of_a_second_replica_have_no_place_to_meet(tmp_path: Path) -> None:
    site = site_in(tmp_path, "--launch.rollout_nodes=2", "--launch.rollout_rdzv=127.0.0.1:29400", *VLLM)
    assert site.recipe.controller.single_roles == ("rollout",)
    launcher = make_launcher("local", site)
    waits = ("--network.curve=false", "--controller", "tcp://127.0.0.1:9", "--name")
    try:
        launcher.start(Placement("rollout-0", "rollout", (*waits, "rollout-0"), num_nodes=2))
        with pytest.raises(
            ConfigError, match=r"the nodes of rollout-0 meet at launch\.rollout_rdzv, so rollout-1 cannot"
        ):
            launcher.start(Placement("rollout-1", "rollout", (*waits, "rollout-1"), num_nodes=2))
    finally:
        launcher.close()
        site.children.kill()


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "ray"])
def test_launcher_of_a_cluster_places_any_number_of_replicas_with_all_nodes(name: str, tmp_path: Path) -> None:
    recipe = load_recipe([RECIPE], ["--launch.launcher", name, "--launch.rollout_nodes=2", *VLLM])
    assert recipe.controller.single_roles == ()
    attempt = Attempt(tmp_path)
    placed = [placement_of(recipe, attempt, "tcp://10.0.0.1:5555", "rollout", f"rollout-{number}") for number in (0, 1)]
    assert [one.num_nodes for one in placed] == [2, 2]
    scripts = {
        "slurm": lambda one: nodes_script(one, recipe.launch.slurm, tmp_path),
        "kubernetes": lambda one: json.dumps(
            manifests(one, recipe.launch.kubernetes, name=one.name, run="r", files={"config.toml": ""})
        ),
        "ray": lambda one: str(needs(one, recipe.launch.ray)),
    }
    first, second = (scripts[name](one) for one in placed)
    meeting = {"slurm": "RDZV=$(", "kubernetes": "--rdzv=", "ray": "'num_nodes': 2"}[name]
    assert meeting in first
    assert meeting in second
    if name == "kubernetes":  # each meets at its own Service
        assert re.findall(r"--rdzv=\S+?\"", first) != re.findall(r"--rdzv=\S+?\"", second)


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
