"""The pods of deploy/kubernetes/overlays/cpu in containers, laid out as by a kubelet: a run from start to end.

This shows that commands, variables, keys, volumes, users and privileges of the manifests fit the services. There is no
cluster: see kubelet.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker_host
import kubernetes_manifests as manifests
import pytest
from docker_host import DockerHost
from kubelet import Node, RunningPod
from kubernetes_manifests import KUBERNETES, Manifest, Pod

DEADLINE_S = 1200.0
NUM_STEPS = 1520
"""Of the recipe below."""
SHORTER = {
    "num_steps = 220": "num_steps = 20",
    "num_steps = 600": "num_steps = 1500",
    "at_start = true": "at_start = false",
}
"""A recipe that outlasts the drain of the controller, also where steps are fast, in place of that of the quickstart."""


@pytest.fixture(scope="module")
def host() -> Iterator[DockerHost]:
    """Return a Docker daemon."""
    if reason := docker_host.missing():
        pytest.skip(reason)
    kept = os.environ.get("DEPLOY_TEST_FOLDER")
    folder = Path(kept or tempfile.mkdtemp(prefix="starling-kubernetes-", dir="/var/tmp"))
    folder.mkdir(parents=True, exist_ok=True)
    with docker_host.docker_host(folder) as started:
        yield started
    if not kept:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def node(host: DockerHost, tmp_path: Path) -> Iterator[Node]:
    """Return a node with the overlay for CPUs, its recipe shortened, and new keys."""
    folder = tmp_path
    objects = manifests.build(KUBERNETES / "overlays/cpu") + manifests.build_secrets(folder)
    shorten(objects)
    (folder / "volumes").mkdir()
    folder.chmod(0o755)
    running = Node(host, folder / "volumes", objects)
    try:
        yield running
    finally:
        running.close()


def shorten(objects: list[Manifest]) -> None:
    """Make the recipe in the ConfigMap a short one."""
    maps = manifests.of_kind(objects, "ConfigMap")
    [config] = [one for one in maps if one["metadata"]["name"].startswith("run-config")]
    for before, after in SHORTER.items():
        assert before in config["data"]["config.toml"]
        config["data"]["config.toml"] = config["data"]["config.toml"].replace(before, after)


def wait_for(what: str, is_done: Callable[[], Any], *watched: Callable[[], str]) -> None:
    """Wait until something is so. Fails with what is watched at the deadline."""
    until = time.monotonic() + DEADLINE_S
    while not is_done():
        if time.monotonic() > until:
            raise AssertionError(f"{what}: not within {DEADLINE_S:g} s\n" + "\n".join(one()[-4000:] for one in watched))
        time.sleep(0.5)


class Run:
    """A run on the node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pods = {pod.role: pod for pod in manifests.pods(node.objects)}
        self.running: dict[str, RunningPod] = {}
        self.folder = node.folder / "claim-run-controller-0"

    def start(self, role: str, index: int = 0) -> RunningPod:
        """Start a pod."""
        self.running[f"{role}-{index}"] = started = self.node.start(self.pods[role], index)
        return started

    def stop(self, name: str) -> int:
        """Delete a pod. Returns its exit code."""
        running = self.running.pop(name)
        return self.node.stop(running, self.pods[running.role].spec["terminationGracePeriodSeconds"])

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of a kind of metrics.jsonl."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def steps(self) -> int:
        """Return the number of the newest step."""
        return max((line["step"] for line in self.lines("step")), default=0)

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {name}\n{self.node.logs(one)[-3000:]}" for name, one in self.running.items())

    def wait(self, what: str, is_done: Callable[[], Any]) -> None:
        """Wait until something is so."""
        wait_for(what, is_done, self.logs)


def is_ready(node: Node, running: RunningPod, pod: Pod) -> bool:
    """Carry out the readiness probe of a pod."""
    probe = pod.spec["containers"][0]["readinessProbe"]
    if "exec" in probe:
        return node.execute(running, *probe["exec"]["command"]) == 0
    if "tcpSocket" in probe:
        return node.is_open(running, 5555)
    ports = {port["name"]: port["containerPort"] for port in pod.spec["containers"][0]["ports"]}
    return node.http(running, ports[probe["httpGet"]["port"]], probe["httpGet"]["path"]) == 200


@pytest.mark.timeout(3600)
def test_a_run_starts_scales_drains_and_ends(node: Node) -> None:
    run = Run(node)
    for role in ("policy", "reward", "rollout"):  # before the controller, as a cluster may do it
        run.start(role)
    controller = run.start("controller")
    run.start("rollout", 1)
    run.wait("all pods ready", lambda: all(is_ready(node, one, run.pods[one.role]) for one in run.running.values()))
    run.wait("steps", lambda: run.steps() >= 5)

    # Keys are in memory only, and the folder of the run is one that operators can read.
    assert not list((run.folder / "keys").glob("*"))
    assert (run.folder / "config.toml").exists()
    assert node.execute(controller, "sh", "-c", "touch /etc/x") != 0
    sandbox = [line for line in node.logs(run.running["reward-0"]).splitlines() if '"sandbox' in line]
    assert any('"landlock"' in line for line in sandbox), sandbox
    print("sandbox of the reward service:", sandbox[0])

    # Scale up and down.
    run.start("rollout", 2)
    run.wait("rollout-2 has joined", lambda: any(line["replica"] == "rollout-2" for line in run.lines("joined")))
    assert run.stop("rollout-1") == 0
    run.wait("rollout-1 has left", lambda: any(line["replica"] == "rollout-1" for line in run.lines("left")))

    # A node is drained: the controller stops the run, and resumes it elsewhere; the policy saves its state, too.
    steps = run.steps()
    assert steps < NUM_STEPS, "the run is too short for this test"
    assert run.stop("controller-0") == 0
    print(f"drained at step {steps}, stopped after step {run.steps()}")
    run.start("controller")
    steps = run.steps()
    run.wait("steps after the drain", lambda: run.steps() >= steps + 3)
    assert run.stop("policy-0") == 0
    run.start("policy")

    run.wait("the end", lambda: run.lines("step") and "finished" in node.logs(run.running["controller-0"]))
    finished = [line for line in node.logs(run.running["controller-0"]).splitlines() if '"finished"' in line]
    assert '"ok": true' in finished[0], finished
    assert "complete" in finished[0], finished
    assert [line["step"] for line in run.lines("step")] == list(range(1, NUM_STEPS + 1))
    states = node.folder / "claim-run-policy-0"
    assert list(states.glob(f"checkpoints/step-{NUM_STEPS}/model.safetensors"))


def test_a_wrong_key_is_one_sentence(node: Node) -> None:
    run = Run(node)
    other = manifests.find(node.objects, "Secret", "reward-keys")["data"]
    other["reward-0.json"] = other["reward-1.json"]
    reward = run.start("reward")
    run.wait("its restart", lambda: node.restarts(reward) > 0)
    assert re.search(r"the key file \S+ was made for reward-1, not for reward-0", node.logs(reward))
