"""The launcher `ray` on a real Ray of two nodes: a run that is scaled, loses a process and a node, and leaves nothing.

The nodes are this machine, at two loopback addresses; Ray has an environment of its own, and the services have that of
the tests (`launch.ray.python`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_cluster import NICENESS, NODES, ROOT, RayCluster, ray_cluster

RECIPE = ROOT / "tests" / "system" / "recipes" / "tiny.toml"
LONG = 100_000
"""Steps of a run that does not come to its end."""
WAIT_S = 900.0
"""Deadline of what a run does, on a busy machine."""
POOLS = """
[[rollout.pools]]
node_selector = {site = "a"}

[[rollout.pools]]
node_selector = {site = "b"}
"""

pytestmark = pytest.mark.timeout(5400)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Start the cluster for all tests."""
    with ray_cluster() as started:
        yield started


class RayRun:
    """A run whose replicas are placed by Ray."""

    def __init__(
        self, cluster: RayCluster, folder: Path, *settings: str, pools: str = "", num_steps: int = LONG
    ) -> None:
        """Start it in `folder`."""
        self.folder, self.log = folder / "runs" / "tiny" / "attempt-1", folder / "log"
        words = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
        rows = [json.dumps({"question": word, "answer": word[::-1]}) for word in words]
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        recipe = RECIPE.read_text().replace("num_rollouts = 1\n", "" if pools else "num_rollouts = 1\n")
        (folder / "recipe.toml").write_text(recipe + pools)
        launch = {"launcher": "ray", "ray.address": cluster.address, "ray.python": sys.executable, "ray.shared": "true"}
        command = [str(cluster.python), "-m", "starling.cli.main", "run", "recipe.toml"]
        command += [f"--launch.{key}={value}" for key, value in launch.items()]
        command += [f"--rl.num-steps={num_steps}", *settings]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=cluster.run_environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def metrics(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl of these kinds."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in (json.loads(text) for text in lines if text.endswith("\n")) if line["kind"] in kinds]

    @property
    def num_steps(self) -> int:
        """Steps that were trained."""
        return len(self.metrics("trained"))

    def num_adopted(self, name: str) -> int:
        """How often a rollout has adopted weights."""
        return sum(line["replica"] == name for line in self.metrics("adopted"))

    def num_joined(self, name: str) -> int:
        """How often a replica has joined."""
        return sum(line["replica"] == name for line in self.metrics("joined"))

    def said(self, text: str) -> int:
        """How often the run has said `text`."""
        return self.log.read_text().count(text)

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition()` is true, and print how long that took."""
        begun = time.monotonic()
        while not condition():
            assert self.process.poll() is None, f"the run has ended before {what}\n{self.log.read_text()[-6000:]}"
            assert time.monotonic() < begun + WAIT_S, f"no {what}\n{self.log.read_text()[-6000:]}"
            time.sleep(0.5)
        print(f"{what}: after {time.monotonic() - begun:.0f} s, at step {self.num_steps}", flush=True)

    def wait_for_steps(self, num: int, what: str) -> None:
        """Wait for `num` more steps."""
        made = self.num_steps
        self.wait(lambda: self.num_steps >= made + num, what)

    def starling(self, *words: str) -> str:
        """Run an operator's command, and return what it prints."""
        command = [sys.executable, "-m", "starling.cli.main", words[0], str(self.folder), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self) -> int:
        """Interrupt it as Ctrl-C does, and return its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """Kill it with what it has started here."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def wait_for_no_services(cluster: RayCluster, *names: str) -> None:
    """Wait until no agent and no service is left on these nodes."""
    deadline = time.monotonic() + WAIT_S
    while found := [one for name in names for one in cluster.services(name)]:
        assert time.monotonic() < deadline, f"processes are left: {found}"
        time.sleep(0.5)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the living processes whose command line names `folder`."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def folders_of_agents() -> set[Path]:
    """Return the temporary folders of the agents on this machine."""
    found = Path(tempfile.gettempdir()).glob("starling-*-*-*")
    return {path for path in found if path.joinpath("config.toml").exists()}


def places_of_keys(cluster: RayCluster, run: RayRun) -> list[str]:
    """Return where a secret of a replica's key can be read: files of Ray, command lines, environments."""
    secrets = [json.loads(run.folder.joinpath("keys", "rollout-0.json").read_text())["secret"].encode()]
    files = [path for path in cluster.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    found = [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]
    for process in psutil.process_iter():
        for kind in ("cmdline", "environ"):
            with suppress(OSError):
                text = Path(f"/proc/{process.pid}/{kind}").read_bytes()
                found += [f"{kind} of {process.pid}"] if any(secret in text for secret in secrets) else []
    return found


def test_run_on_two_nodes_is_scaled_and_loses_a_process_and_a_node(cluster: RayCluster, tmp_path: Path) -> None:
    run = RayRun(cluster, tmp_path, "--launch.ray.labels={policy={site='a'}, reward={site='a'}}", pools=POOLS)
    try:
        run.wait_for_steps(3, "the first steps")
        run.wait(lambda: run.num_adopted("rollout-0") and run.num_adopted("rollout-1"), "weights on both nodes")
        assert all(cluster.agents(name) for name in NODES), "each node has replicas"
        assert all(run.said(f"niceness of processes on {node} by {NICENESS}") == 1 for node in NODES.values())
        assert places_of_keys(cluster, run) == []

        print(run.starling("scale", "rollout", "3"))
        run.wait(lambda: run.num_adopted("rollout-2"), "a third rollout has the weights")
        print(run.starling("scale", "rollout", "2"))
        run.wait(lambda: run.said("rollout-2 was drained"), "it is drained")

        cluster.service("a", "rollout-0").kill()
        run.wait(lambda: run.said("rollout-0 was killed by SIGKILL on 127.0.0.2"), "the death of a process")
        adopted = run.num_adopted("rollout-0")
        run.wait(lambda: run.num_adopted("rollout-0") > adopted, "weights on its successor")

        cluster.lose_raylet("b")
        run.wait(lambda: run.said("rollout-1 was lost on 127.0.0.3"), "the loss of a node")
        run.wait_for_steps(5, "steps without it")
        run.wait(lambda: run.said("rollout-1 waits in Ray for a node with"), "a rollout that waits for a node")
        wait_for_no_services(cluster, "b")
        cluster.end("b")
        cluster.start_node("b")
        adopted = run.num_adopted("rollout-1")
        run.wait(lambda: run.num_adopted("rollout-1") > adopted, "weights on the node that is back")

        assert run.end() == 0, run.log.read_text()[-6000:]
    finally:
        run.kill()
    trained = Counter(prompt for line in run.metrics("trained") for prompt in line["prompts"])
    assert set(trained.values()) == {1}, "a prompt was trained twice"
    print(run.log.read_text()[-6000:])
    wait_for_no_services(cluster, *NODES)
    assert processes_of(tmp_path) == []
    assert cluster.free_cpus() == 16.0, "Ray has all that it had"


def test_policy_on_both_nodes_trains(cluster: RayCluster, tmp_path: Path) -> None:
    settings = ("--launch.policy-nodes=2", "--policy.parallel.dp-shard=2")
    run = RayRun(cluster, tmp_path, *settings, num_steps=6)
    try:
        assert run.process.wait(WAIT_S) == 0, run.log.read_text()[-6000:]
    finally:
        run.kill()
    assert re.search(r"policy-0 is placed on (127.0.0.2, 127.0.0.3|127.0.0.3, 127.0.0.2)$", run.log.read_text(), re.M)
    assert (run.folder / "logs" / "policy-0.node-1.log").read_text()
    wait_for_no_services(cluster, *NODES)


def test_actor_that_answers_nothing_is_lost(cluster: RayCluster, tmp_path: Path) -> None:
    """As behind a partition: Ray believes that its node lives."""
    run = RayRun(cluster, tmp_path, "--launch.ray.labels={rollout={site='b'}}")
    try:
        run.wait(lambda: run.num_adopted("rollout-0"), "weights on the rollout")
        _agent, _shell, worker, *_ = cluster.service("b", "rollout-0").parents()
        assert "ProcessActor" in "".join(worker.cmdline())
        worker.suspend()
        run.wait(lambda: run.said("(its actor answered nothing for 60 s)"), "the loss of its actor")
        run.wait(lambda: run.said("rollout-0 is placed on 127.0.0.3") == 2, "another actor")
        run.wait(lambda: run.num_joined("rollout-0") == 2, "its successor has joined")
        adopted = run.num_adopted("rollout-0")
        run.wait(lambda: run.num_adopted("rollout-0") > adopted, "weights on its successor")
        assert run.end() == 0, run.log.read_text()[-6000:]
    finally:
        run.kill()
    wait_for_no_services(cluster, *NODES)


def test_killed_supervisor_leaves_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    before = folders_of_agents()
    run = RayRun(cluster, tmp_path)
    try:
        run.wait_for_steps(1, "the first step")
        assert len(folders_of_agents() - before) == 3, "each replica has one with its key"
    finally:
        run.process.kill()
        run.process.wait(60)
    wait_for_no_services(cluster, *NODES)
    deadline = time.monotonic() + WAIT_S
    while left := [*processes_of(tmp_path), *(folders_of_agents() - before)]:
        assert time.monotonic() < deadline, f"something is left: {left}"
        time.sleep(0.5)


def test_address_without_a_cluster_is_one_sentence(cluster: RayCluster, tmp_path: Path) -> None:
    run = RayRun(cluster, tmp_path, "--launch.ray.address=127.0.0.4:1")
    try:
        assert run.process.wait(WAIT_S) == 1
    finally:
        run.kill()
    sentence = "starling: there is no cluster of Ray at launch.ray.address = '127.0.0.4:1' (Connection refused)"
    assert run.log.read_text() == f"{sentence}; start one, or set the address\n"
