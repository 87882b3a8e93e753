"""The launcher `ray` without Ray: what a replica asks for, its end in words, an actor's process, and the sentences."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from starling.cli.launch.interface import Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.ray.actor import KEPT_LINES, ProcessActor
from starling.cli.launch.ray.ends import exited, lost
from starling.cli.launch.ray.launcher import RayLauncher, check_listens
from starling.cli.launch.ray.needs import needs, node_flags, shown
from starling.cli.launch.settings import RaySettings

PLACEMENT = Placement(
    name="rollout-3",
    role="rollout",
    arguments=(),
    num_gpus=2,
    gpu_kind="H100",
    partition="fast",
    node_selector={"zone": "a"},
    controller="tcp://10.0.0.1:5555",
)
PLAIN = Placement(name="reward-0", role="reward", arguments=())
WAIT_S = 120.0


def test_placement_group_has_the_resources_and_labels_of_its_replica() -> None:
    settings = RaySettings(
        cpus=4,
        resources={"rollout": {"memory": 2e9}, "policy": {"nvme": 1}},
        labels={"rollout": {"zone": "z", "net": "ib"}},
    )
    assert needs(PLACEMENT, settings) == {
        "bundle": {"CPU": 4, "GPU": 2, "memory": 2e9},
        "num_nodes": 1,
        "strategy": "STRICT_PACK",
        "labels": {
            "zone": "a",
            "net": "ib",
            "ray.io/accelerator-type": "H100",
            "ray.io/node-group": "fast",
        },
    }
    assert needs(PLAIN, RaySettings())["bundle"] == {"CPU": 1}
    assert needs(PLAIN, RaySettings())["labels"] == {}
    assert needs(PLAIN, RaySettings(cpus=0))["bundle"], "Ray refuses an empty bundle"


def test_replica_of_several_nodes_is_spread_and_meets_at_the_first() -> None:
    policy = Placement(name="policy-0", role="policy", arguments=(), num_gpus=8, num_nodes=2)
    wanted = needs(policy, RaySettings())
    assert (wanted["num_nodes"], wanted["strategy"]) == (2, "STRICT_SPREAD")
    assert node_flags(policy) == [
        ["--nnodes", "2", "--node-rank", "0", "--rdzv", "{meeting}"],
        ["--nnodes", "2", "--node-rank", "1", "--rdzv", "{meeting}"],
    ]
    assert node_flags(PLAIN) == [[]]


def test_needs_are_shown_in_words() -> None:
    policy = Placement(name="policy-0", role="policy", arguments=(), num_gpus=8, num_nodes=2)
    assert shown(needs(policy, RaySettings())) == "2 nodes, each with CPU 1, GPU 8"
    settings = RaySettings(cpus=0.5, labels={"reward": {"zone": "a"}})
    assert shown(needs(PLAIN, settings)) == "a node with CPU 0.5 and the label zone=a"


@pytest.mark.parametrize(
    ("code", "last_line", "expected"),
    [
        (0, "bye", Ended("r", 0, "exited with code 0 on n1")),
        (2, "a: b is wrong", Ended("r", 2, "exited with code 2 on n1 (a: b is wrong)")),
        (1, "", Ended("r", 1, "exited with code 1 on n1")),
        (137, "x", Ended("r", -9, "was killed by SIGKILL on n1")),
        (128 + 99, "", Ended("r", -99, "was killed by signal 99 on n1")),
        (
            127,
            "sh: py: not found",
            Ended("r", 2, "could not be started on n1 (sh: py: not found); set launch.ray.python"),
        ),
    ],
)
def test_exit_code_of_an_agent_is_the_end_of_its_replica(code: int, last_line: str, expected: Ended) -> None:
    assert exited("r", code, "n1", last_line) == expected


def test_lost_replica_has_no_code() -> None:
    assert lost("r", "n1", "its node left Ray") == Ended("r", None, "was lost on n1 (its node left Ray)")
    assert lost("r", "", "x").reason == "was lost (x)"


def test_address_of_ray_may_not_start_a_cluster() -> None:
    with pytest.raises(ValidationError, match="'local' would start a Ray of its own"):
        RaySettings(address="local")


def site(tmp_path: Path, **launch: Any) -> LaunchSite:
    settings = {"ray": RaySettings(), "colocate": False, **launch}
    return cast(LaunchSite, SimpleNamespace(recipe=SimpleNamespace(launch=SimpleNamespace(**settings))))


def test_launcher_without_ray_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"Ray is not installed here; install starling-cli\[ray\]$"):
        RayLauncher(site(tmp_path))


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_address_at_which_nothing_listens_is_one_sentence(form: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = form.format(listener.getsockname()[1])
        check_listens(address)
    with pytest.raises(
        LaunchError, match=rf"no cluster of Ray at launch.ray.address = '{address}' \(Connection refused"
    ):
        check_listens(address)
    with pytest.raises(LaunchError, match="no cluster of Ray"):
        check_listens("127.0.0.1:99999")
    check_listens("auto")


# --- an actor's process, without Ray ---------------------------------------------------------------------------------


def ended(actor: ProcessActor) -> tuple[int, list[str], int]:
    """Return the end of the actor's process: its code, all its lines, and how many were left out."""
    lines, left_out, deadline = [], 0, time.monotonic() + WAIT_S
    while True:
        found = actor.poll()
        lines += found["lines"]
        left_out += found["left_out"]
        if found["code"] is not None:
            return found["code"], lines, left_out
        assert time.monotonic() < deadline, lines
        time.sleep(0.1)


def interpreter(folder: Path, text: str) -> str:
    """Return a program in place of an interpreter, whose arguments are ``-m starling.cli.launch.agent``."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def order(*arguments: str) -> str:
    return json.dumps(
        {"name": "rollout-0", "role": "rollout", "arguments": list(arguments), "environment": {}, "files": {}}
    )


def test_actor_fills_in_the_places_of_an_order_and_gives_the_output(tmp_path: Path) -> None:
    program = (
        "import json, sys\nprint(*sys.argv[1:])\nprint(*json.loads(sys.stdin.readline())['arguments'])\nsys.exit(3)"
    )
    actor = ProcessActor()
    actor._address = "10.0.0.7"  # as `prepare` has found it
    actor.start(order("--network.host={address}", "--rdzv", "{meeting}"), interpreter(tmp_path, program), "10.0.0.6:7")
    assert ended(actor) == (3, ["-m starling.cli.launch.agent", "--network.host=10.0.0.7 --rdzv 10.0.0.6:7"], 0)


def test_actor_keeps_the_newest_lines(tmp_path: Path) -> None:
    num = KEPT_LINES + 500
    actor = ProcessActor()
    actor.start(order(), interpreter(tmp_path, f"for i in range({num}): print(i)"), "")
    assert actor._process is not None
    actor._process.wait(WAIT_S)
    code, lines, left_out = ended(actor)
    assert (code, len(lines), left_out, lines[-1]) == (0, KEPT_LINES, 500, str(num - 1))


def test_interpreter_that_is_not_there_is_an_exit_code() -> None:
    actor = ProcessActor()
    actor.start(order(), "/does/not/exist", "")
    code, lines, _ = ended(actor)
    assert code == 127
    assert "/does/not/exist" in lines[-1]


HOLDER = """
import sys
from starling.cli.launch.ray.actor import ProcessActor
actor = ProcessActor()
actor.start(sys.argv[1], sys.argv[2], "")
print(actor._process.pid, flush=True)
input()
"""
AGENT = """
import os, sys
sys.stdin.readline()
print("started", flush=True)
with open(sys.argv[0] + ".begun", "w") as file: file.write(str(os.getpid()))
sys.stdin.read()
open(sys.argv[0] + ".cleaned", "w").close()
"""


def test_agent_outlives_an_actor_that_is_killed_with_its_children_and_cleans_up(tmp_path: Path) -> None:
    """Ray kills a worker and its children with SIGKILL."""
    program = interpreter(tmp_path, AGENT)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, order(), program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        shell = int(holder.stdout.readline())
        wait_for(Path(f"{program}.begun"))
        os.kill(shell, signal.SIGKILL)
    finally:
        holder.kill()
        holder.wait(WAIT_S)
    wait_for(Path(f"{program}.cleaned"))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.1)
