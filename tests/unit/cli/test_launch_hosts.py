"""Hosts of the launcher `ssh`: which one takes a replica, with which GPUs; and what is refused before a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from starling.cli.launch.hosts import LOST_S, HostSettings, HostUse, choose, visible
from starling.cli.launch.interface import LaunchError, LaunchSite, Placement
from starling.cli.launch.launchers import make_launcher
from starling.cli.recipe.schema import load_recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.processes import ServiceProcesses
from starling.common.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"


def use(name: str, **settings: Any) -> HostUse:
    return HostUse(HostSettings(host=name, **settings))


def placed(hosts: list[HostUse], *names: str, num_gpus: int = 0, **needs: Any) -> list[str]:
    """Place replicas in turn; return their hosts."""
    return [
        choose(hosts, Placement(name, "rollout", (), num_gpus=num_gpus, **needs), 0.0).settings.host for name in names
    ]


def test_replicas_with_gpus_fill_the_hosts_in_order() -> None:
    hosts = [use("a", gpus=4), use("b", gpus=2)]
    assert placed(hosts, "rollout-0", "rollout-1", "rollout-2", num_gpus=2) == ["a", "a", "b"]
    assert [dict(visible(gpus)) for gpus in hosts[0].placed.values()] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    with pytest.raises(LaunchError, match=r"rollout-3 needs 1 GPU, and the most .* has free are 0; add a host"):
        placed(hosts, "rollout-3", num_gpus=1)
    del hosts[0].placed["rollout-0"]
    assert placed(hosts, "rollout-3", num_gpus=2) == ["a"]


def test_replicas_without_gpus_are_spread() -> None:
    hosts = [use("a"), use("b")]
    assert placed(hosts, "reward-0", "reward-1", "reward-2") == ["a", "b", "a"]


def test_replicas_get_hosts_of_their_kind() -> None:
    hosts = [use("a", gpus=8, gpu_kind="l40s"), use("b", gpus=8, gpu_kind="h100", labels={"zone": "x"})]
    assert placed(hosts, "rollout-0", num_gpus=1, gpu_kind="h100") == ["b"]
    assert placed(hosts, "rollout-1", num_gpus=1, node_selector={"zone": "x"}) == ["b"]
    with pytest.raises(LaunchError, match=r"no host of launch\.hosts is of the kind b200, zone = x; add one"):
        placed(hosts, "rollout-2", gpu_kind="b200", node_selector={"zone": "x"})


def test_lost_host_comes_last_for_a_while() -> None:
    hosts = [use("a", gpus=1), use("b", gpus=1)]
    hosts[0].lost_at = 0.0
    placement = Placement("rollout-0", "rollout", (), num_gpus=1)
    assert choose(hosts, placement, LOST_S / 2).settings.host == "b"
    assert choose(hosts, Placement("rollout-1", "rollout", (), num_gpus=1), 1.0).settings.host == "a", "none other fits"
    hosts = [use("a", gpus=1), use("b", gpus=1)]
    hosts[0].lost_at = 0.0
    assert choose(hosts, placement, 2 * LOST_S).settings.host == "a"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], r"launch.launcher = 'ssh' needs hosts; add \[\[launch.hosts\]\]"),
        (["--launch.hosts=[{host = 'far', shared = true}]"], "network.host = '127.0.0.1' cannot be reached from far"),
        (["--launch.hosts=[{host = 'localhost'}]"], "a policy on localhost could not save its states; set shared"),
    ],
)
def test_recipe_that_does_not_suit_is_one_sentence(flags: list[str], problem: str, tmp_path: Path) -> None:
    recipe = load_recipe([RECIPE], ["--launch.launcher=ssh", *flags])
    site = LaunchSite(recipe, Attempt(tmp_path), ServiceProcesses(tmp_path / "logs", 1, lambda name, line: None), print)
    with pytest.raises(ConfigError, match=problem):
        make_launcher("ssh", site)


def test_host_that_would_be_an_option_of_ssh_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch.hosts.0.host = '-oProxyCommand=x'"):
        load_recipe([RECIPE], ["--launch.hosts=[{host = '-oProxyCommand=x'}]"])
