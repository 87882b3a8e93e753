"""`starling run --launcher slurm` on a real Slurm of four nodes: a whole run whose policy and rollouts are jobs.

The policy has a rank on each of two nodes. One rollout's job is cancelled, and a node of the policy is set down.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster, missing, slurm_cluster, wait_until

from starling.cli.run.attempt import Attempt

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
NUM_SFT, NUM_RL, NUM_PROMPTS = 10, 400, 2
RUN_S = 1500.0
"""Deadline of what the run does, on a busy machine."""
FLAGS = (
    *("--launcher", "slurm", "--launch.slurm.roles", '["policy", "rollout"]', "--launch.screen", "plain"),
    *(
        "--launch.slurm.options",
        '["--cpus-per-task=1"]',
        "--launch.num-rollouts",
        "2",
        "--launch.gpus-per-rollout",
        "1",
    ),
    *("--launch.policy-nodes", "2", "--launch.gpus-per-policy", "1", "--policy.parallel.dp-shard", "2"),
    *("--data.size", "6000", "--sft.num-steps", str(NUM_SFT), "--rl.num-steps", str(NUM_RL)),
    *("--rl.prompts-per-step", str(NUM_PROMPTS), "--rl.group-size", "4", "--controller.start-s", "1200"),
    *("--evaluation.at-start=false", "--evaluation.at-end=false", "--controller.save-every", "10"),
)

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "-"), pytest.mark.timeout(5400)]


class LaunchedRun:
    """`starling run` as a process, and what it has written."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        """Start it in `folder`."""
        self.cluster, self.output = cluster, folder / "output"
        environment = {**cluster.environment, "INTERFACE": "lo", "OMP_NUM_THREADS": "1"}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "starling.cli.main", "run", str(RECIPE), *FLAGS],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.attempt = Attempt(folder / "runs" / "quickstart" / "attempt-1")

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl of a kind."""
        path = self.attempt.metrics
        text = path.read_text() if path.exists() else ""
        found = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [line for line in found if line["kind"] == kind]

    @property
    def num_steps(self) -> int:
        """The newest step."""
        return max((line["step"] for line in self.lines("step")), default=0)

    def jobs(self) -> dict[str, str]:
        """Return the numbers of the jobs that Slurm has not ended, by the replica's name."""
        lines = self.cluster.command("squeue", "-h", "-o%j %i").splitlines()
        return dict(line.removeprefix("starling-").split() for line in lines)

    def text(self) -> str:
        """Return what it has printed."""
        return self.output.read_text()

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition()` is true; the output is shown if it takes too long, or the run has ended."""

        def holds() -> bool:
            is_true = bool(condition())
            assert is_true or self.process.poll() is None, f"the run has ended: {what}"
            return is_true

        begun = time.monotonic()
        try:
            wait_until(holds, what, RUN_S)
        except AssertionError:
            logs = sorted(self.attempt.logs.glob("*.log")) if self.attempt.logs.exists() else []
            print(self.text(), *(f"--- {path}\n{path.read_text()[-3000:]}" for path in logs), sep="\n")
            raise
        print(f"{what}: after {time.monotonic() - begun:.0f} s, at step {self.num_steps}", flush=True)

    def wait_for_steps(self, num: int, what: str) -> None:
        """Wait for `num` more steps."""
        made = self.num_steps
        self.wait(lambda: self.num_steps >= made + num, what)


@contextmanager
def launched(cluster: SlurmCluster, folder: Path) -> Iterator[LaunchedRun]:
    """Start a run, and kill its supervisor if the test has failed."""
    run = LaunchedRun(cluster, folder)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(300)


def test_replicas_are_jobs_that_come_back(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster, launched(cluster, tmp_path) as run:
        run.wait_for_steps(NUM_SFT + 5, "the first steps")
        first = run.jobs()
        print(cluster.command("squeue", "-o%i %j %T %N %b"))
        assert first.keys() == {"policy-0", "rollout-0", "rollout-1"}
        for index in (0, 1):
            log = (run.attempt.logs / f"policy-0.node-{index}.log").read_text()
            assert re.search(r"policy on n\d, GPUs: \d$", log, re.MULTILINE)

        cluster.command("scancel", first["rollout-1"])
        run.wait(
            lambda: run.jobs().get("rollout-1", first["rollout-1"]) != first["rollout-1"], "another job of rollout-1"
        )
        assert f"rollout-1 was cancelled in Slurm (job {first['rollout-1']}); restarting it" in run.text()
        left = re.compile(r" left .*reason='it left: stopped by SIGTERM' replica=rollout-1 ")
        run.wait(lambda: left.search(run.text()), "it has got Slurm's signal, and has left")
        adopted = len([line for line in run.lines("adopted") if line["replica"] == "rollout-1"])
        run.wait(
            lambda: len([line for line in run.lines("adopted") if line["replica"] == "rollout-1"]) > adopted,
            "it has pulled weights again",
        )

        node = cluster.job(first["policy-0"])["BatchHost"]
        # Drained, too, since a node that is down returns to service when its daemon registers.
        for state in ("DRAIN", "DOWN"):
            cluster.command("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")
        run.wait(lambda: "policy-0 was lost with its node" in run.text(), f"{node} is down, and the policy lost")
        print(cluster.command("sinfo", "-N", "-o%N %T"))
        run.wait(lambda: run.jobs().get("policy-0", first["policy-0"]) != first["policy-0"], "another job of policy-0")
        run.wait_for_steps(5, "steps of the policy on other nodes")
        print(cluster.command("squeue", "-o%i %j %T %N %b"))
        nodes = cluster.command("squeue", "-h", "-o%N").split()
        assert node not in cluster.command("scontrol", "show", "hostnames", ",".join(nodes)).split()
        run.wait(lambda: run.process.poll() is not None, "the end of the run")
        print(run.text())
        assert run.process.returncode == 0
        wait_until(lambda: not run.jobs(), "the end of all jobs", 120.0)
        assert [line["step"] for line in run.lines("step")] == list(range(1, NUM_SFT + NUM_RL + 1))
        trained = Counter(prompt for line in run.lines("trained") for prompt in line["prompts"])
        assert set(trained.values()) == {1}, "a prompt was trained twice"
        assert len(trained) == NUM_RL * NUM_PROMPTS
