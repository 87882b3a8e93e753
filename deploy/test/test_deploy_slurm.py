"""The scripts of `starling deploy slurm` on a real Slurm of four nodes: runs that are joined, lose a node, and end.

The recipe is that of the quickstart, with fewer and smaller steps. Its policy has two ranks on two nodes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from slurm_cluster import SlurmCluster, missing, slurm_cluster, wait_until

from starling.cli.launch.interface import Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.settings import SlurmSettings
from starling.cli.launch.slurm import SlurmLauncher
from starling.cli.main import main
from starling.cli.run.attempt import Attempt

ROOT = Path(__file__).parents[2]
SERVICE = ROOT / "libs/cli/starling/cli/deploy/jobs/service.sh"
RECIPE = ROOT / "recipes" / "quickstart.toml"
NUM_SFT, NUM_PROMPTS = 20, 4
LONG = 100_000
"""Steps of a run that does not come to its end."""
SETTINGS = (
    *("--data.size", "6000", "--sft.num-steps", str(NUM_SFT)),
    *("--rl.prompts-per-step", str(NUM_PROMPTS), "--rl.group-size", "8", "--rl.max-staleness", "2"),
    *("--evaluation.at-start=false", "--evaluation.num-completions", "1"),
    *("--policy.parallel.dp-shard", "2", "--controller.save-every", "20"),
    *("--controller.compact-records", "1000000"),  # the journal keeps all that the checks read
    *("--launch.num-rollouts", "1", "--launch.gpus-per-rollout", "2", "--controller.start-s", "1200"),
)
CLUSTER = ("--gpus-per-node", "4", "--nodes-policy", "2", "--cpus", "1", "--interface", "lo")
"""Flags of `starling deploy slurm` for the cluster: a policy with a GPU on each of two nodes."""
RUN_S = 1500.0
"""Deadline of what a run does, on a busy machine."""
SRUN = """#!/bin/bash
# Note the options of containers, and run the real command without them.
noted=() others=()
for word; do
  case $word in --container-*) noted+=("$word") ;; *) others+=("$word") ;; esac
done
echo "${noted[*]}" >>"$NOTED"
PATH=${PATH#*:} exec srun "${others[@]}"
"""

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "-"), pytest.mark.timeout(5400)]


def write_job(folder: Path, recipe: Path, *words: str) -> Path:
    """Write the scripts of a run to `folder`. Returns that of the job."""
    assert main(["deploy", "slurm", str(recipe), "--out", str(folder), *words]) == 0
    return folder / "starling.sbatch"


def submit(
    cluster: SlurmCluster,
    folder: Path,
    script: Path,
    *,
    options: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> str:
    """Submit a script from `folder`. Returns the number of its job."""
    command = ["sbatch", "--parsable", f"--chdir={folder}", *options, str(script)]
    return cluster.command(*command, environment=dict(environment or {}))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start the cluster for all tests."""
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started
    assert not started.processes(), "processes of the cluster are left"


class SlurmRun:
    """A run that was submitted as a job."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *settings: str, options: tuple[str, ...] = ()) -> None:
        """Submit it from `folder`, with `settings` besides those of all, and `options` for sbatch."""
        self.cluster, self.where = cluster, folder
        script = write_job(folder / "job", RECIPE, *CLUSTER, *SETTINGS, *settings)
        self.job = submit(cluster, folder, script, options=options)
        self.folder = folder / "runs" / "quickstart" / f"attempt-{self.job}"

    def join(self) -> str:
        """Submit a job with a rollout that joins. Returns its number."""
        script = self.where / "job" / "join.sbatch"
        return submit(self.cluster, self.where, script, environment={"RUN": str(self.folder)})

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl of these kinds."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = (json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [line for line in lines if line["kind"] in kinds]

    @property
    def num_steps(self) -> int:
        """The newest step."""
        return max((line["step"] for line in self.lines("step")), default=0)

    @property
    def trained(self) -> Counter[str]:
        """How often each prompt was trained."""
        return Counter(prompt for line in self.lines("trained") for prompt in line["prompts"])

    @property
    def state(self) -> str:
        """The state of the job."""
        return self.cluster.job(self.job)["JobState"]

    @property
    def num_requeues(self) -> int:
        """How often the job was requeued."""
        return int(self.cluster.job(self.job)["Restarts"])

    def log(self, name: str) -> str:
        """Return the log of a service."""
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def starling(self, *words: str) -> str:
        """Return what an operator's command prints, also when the controller is too busy to answer in time."""
        command = [sys.executable, "-m", "starling.cli.main", *words, str(self.folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        return done.stdout + done.stderr

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = RUN_S) -> None:
        """Wait until `condition()` is true; the logs are shown if it takes too long, or the job has failed."""

        def holds() -> bool:
            assert self.state not in ("FAILED", "TIMEOUT"), f"the job is {self.state}"
            return bool(condition())

        begun = time.monotonic()
        try:
            wait_until(holds, what, timeout_s)
        except AssertionError:
            print(self.all_logs())
            raise
        print(f"job {self.job}: {what}: after {time.monotonic() - begun:.0f} s, at step {self.num_steps}", flush=True)

    def wait_for_steps(self, num: int, what: str) -> None:
        """Wait for `num` more steps, and at least a step of reinforcement learning."""
        made = self.num_steps
        self.wait(lambda: self.num_steps >= max(made, NUM_SFT) + num, what)

    def all_logs(self) -> str:
        """Return the ends of all logs."""
        paths = [*self.where.glob("*.log"), *sorted(self.folder.glob("logs/*.log"))]
        return "\n".join(f"--- {path}\n{path.read_text()[-3000:]}" for path in paths)


def journal_violations(run: SlurmRun) -> list[str]:
    """Return which guarantees of a complete run its journal violates, one sentence each."""
    from starling.controller.shell.journal.journal import read_journal

    # The checks of the chaos runs, whose folder is no package.
    path = ROOT / "tests" / "system" / "chaos" / "guarantees.py"
    spec = importlib.util.spec_from_file_location("guarantees", path)
    assert spec is not None
    assert spec.loader is not None
    guarantees = sys.modules["guarantees"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guarantees)
    records = (entry.record for entry in read_journal(run.folder / "journal.sqlite"))
    return list(guarantees.violations(guarantees.read_history(records, NUM_SFT), complete=True))


def test_run_that_is_joined_and_loses_a_node_trains_each_prompt_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    num_rl = 1200
    run = SlurmRun(cluster, tmp_path, "--rl.num-steps", str(num_rl))
    run.wait_for_steps(10, "the first steps")
    assert re.search(r"rollout on n\d, GPUs: \d,\d$", run.log("rollout-0"), re.MULTILINE)
    assert re.search(r"policy on n\d, GPUs: \d$", run.log("policy-0.node-1"), re.MULTILINE)

    joining = run.join()
    name = f"rollout-{int(joining) * 1000 + 1000}"
    run.wait(lambda: any(line["replica"] == name for line in run.lines("adopted")), "a joined rollout has the weights")
    run.wait(lambda: re.search(rf"{name} on .*generate", run.starling("status")), "it has work")
    print(run.starling("status"))
    cluster.command("scancel", joining)
    run.wait(lambda: any(line["replica"] == name for line in run.lines("left")), "it has left")
    run.wait_for_steps(5, "steps without it")

    cluster.services()["policy-0.node-1"].kill()
    run.wait(lambda: "starts again" in run.log("policy-0.node-0"), "the loss of a process of the policy")
    run.wait_for_steps(10, "steps with the one that its task has started again")

    cluster.lose_node(cluster.job(f"{run.job}+1")["BatchHost"])
    run.wait(lambda: run.num_requeues == 1, "the loss of a node, after which Slurm requeues the job")
    cluster.start_node(next(node for node in ("n1", "n2", "n3", "n4") if node not in cluster.daemons))
    run.wait_for_steps(10, "steps of the requeued job")
    run.wait(lambda: run.state == "COMPLETED", "the end of the run")

    assert [line["step"] for line in run.lines("step")] == list(range(1, NUM_SFT + num_rl + 1))
    assert set(run.trained.values()) == {1}, "a prompt was trained twice"
    assert len(run.trained) == num_rl * NUM_PROMPTS
    assert journal_violations(run) == []
    assert run.lines("checkpoint")
    assert run.log("controller").count("taken_up") == 1
    print(run.starling("replay"))


def test_run_out_of_time_writes_a_checkpoint_and_goes_on_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    run = SlurmRun(cluster, tmp_path, "--rl.num-steps", str(LONG), options=("--signal=B:USR1@60",))
    run.wait_for_steps(5, "the first steps")
    hours, minutes, _ = cluster.job(run.job)["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 3
    cluster.command("scontrol", "update", f"JobId={run.job}+0", f"TimeLimit={limit}")
    run.wait(lambda: run.num_requeues == 1, f"Slurm's signal before the limit of {limit} minutes, and the requeue")
    cluster.command("scontrol", "update", f"JobId={run.job}+0", "TimeLimit=UNLIMITED")
    assert "stopped by SIGUSR2" in run.log("controller")
    made, [checkpoint] = run.num_steps, run.lines("checkpoint")
    assert checkpoint["step"] == made
    assert (run.folder / f"checkpoints/step-{made}/model.safetensors").exists()
    assert (run.folder / f"states/version-{made}").is_dir()
    run.wait_for_steps(5, "steps of the requeued job")
    assert f"state={run.folder}/states/version-{made} version={made}" in run.log("policy-0.node-0")
    assert set(run.trained.values()) == {1}, "a prompt was trained twice"

    cluster.command("scancel", run.job)
    run.wait(lambda: run.state == "CANCELLED" and not cluster.services(), "the end of all services after scancel", 60.0)
    saved = [int(path.name.removeprefix("version-")) for path in run.folder.glob("states/version-*")]
    assert max(saved) >= run.num_steps, "the policy has saved its state"


def test_wrong_recipe_fails_the_job_and_container_options_reach_each_step(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """pyxis, whose options these are, is not in Debian: an `srun` before the real one notes them."""
    commands, noted, recipe = tmp_path / "bin", tmp_path / "noted", tmp_path / "lost.toml"
    commands.mkdir()
    (commands / "srun").write_text(SRUN)
    (commands / "srun").chmod(0o755)
    environment = {"PATH": f"{commands}:{cluster.environment['PATH']}", "NOTED": str(noted)}
    recipe.write_text(RECIPE.read_text())
    containers = ("--image", "starling.sqsh", "--mount", "/models:/models", "--mount", "/data:/data")
    script = write_job(tmp_path / "job", recipe, *CLUSTER, *SETTINGS, *containers)
    recipe.unlink()
    job = submit(cluster, tmp_path, script, environment=environment)
    wait_until(lambda: cluster.job(job)["JobState"] == "FAILED", "the end of the job", RUN_S)
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert "lost.toml" in (tmp_path / f"quickstart-{job}.log").read_text()
    run = tmp_path / "runs" / "quickstart" / f"attempt-{job}"
    options = f"--container-image=starling.sqsh --container-workdir={tmp_path}"
    options += f" --container-mounts={run}:{run},{tmp_path}:{tmp_path},/models:/models,/data:/data"
    assert noted.read_text().splitlines() == [options] * 2, "the address of the policy, and the prepared run"


PROGRAM = """#!/bin/sh
# In place of `starling`: writes its arguments and its GPUs to a file, and runs until SIGTERM.
echo "$* on ${CUDA_VISIBLE_DEVICES:-none}"
case $* in *rollout-3*) exit 2 ;; esac
trap 'echo stopped; exit 0' TERM
while :; do sleep 0.2; done
"""


def ends_of(launcher: SlurmLauncher, num: int) -> dict[str, Ended]:
    """Return the next `num` ends of replicas, by name."""
    found: dict[str, Ended] = {}

    def has_found() -> bool:
        found.update({one.name: one for one in launcher.poll()})
        return len(found) >= num

    wait_until(has_found, f"{num} ends; there are {found}", 300.0)
    return found


def test_launcher_places_jobs_and_reports_their_ends(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    program = tmp_path / "program"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    attempt = Attempt.create_at(tmp_path / "run")
    attempt.logs.mkdir()
    settings = SlurmSettings(program=str(program), options=("--cpus-per-task=1",))
    recipe = SimpleNamespace(launch=SimpleNamespace(slurm=settings))
    said: list[str] = []
    launcher = SlurmLauncher(cast(LaunchSite, SimpleNamespace(recipe=recipe, attempt=attempt, say=said.append)))

    def placement(number: int, num_gpus: int = 0) -> Placement:
        name = f"rollout-{number}"
        return Placement(name=name, role="rollout", arguments=(), num_gpus=num_gpus, controller="tcp://127.0.0.1:5555")

    def log(number: int) -> str:
        path = attempt.logs / f"rollout-{number}.log"
        return path.read_text() if path.exists() else ""

    try:
        launcher.start(placement(0, num_gpus=2))
        launcher.start(placement(1))
        wait_until(lambda: not launcher.poll() and log(0) and log(1), "the start of both", 300.0)
        assert re.search(
            rf"join tcp://\S+ --role rollout --key {attempt.key('rollout-0')} .*--gpus 2 on \d,\d$", log(0), re.M
        )
        jobs = dict(word.split() for word in cluster.command("squeue", "-h", "-o%j %i").splitlines())
        cluster.command("scancel", jobs["starling-rollout-0"])
        assert ends_of(launcher, 1) == {
            "rollout-0": Ended("rollout-0", None, f"was cancelled in Slurm (job {jobs['starling-rollout-0']})")
        }
        launcher.start(placement(0))
        launcher.start(placement(3))
        assert ends_of(launcher, 1)["rollout-3"].code == 2
        launcher.stop("rollout-1")
        assert ends_of(launcher, 1)["rollout-1"].name == "rollout-1"
        assert "stopped" in log(1)
        with pytest.raises(LaunchError, match=r"Slurm does not accept the job of rollout-4: .*artition"):
            launcher.start(replace(placement(4), partition="none"))
    finally:
        launcher.close()
    wait_until(lambda: not cluster.command("squeue", "-h"), "the end of all jobs", 60.0)


POOLS = """[[rollout.pools]]
count = 3
gpu_kind = "h100"
partition = "fast nodes"
node_selector = {nvme = "true", zone = "a"}
settings = {num_slots = 3}
"""
SHELLCHECKED: dict[str, tuple[str, ...]] = {
    "a policy on two nodes, in containers": (*CLUSTER, *SETTINGS, "--image", "a.sqsh", "--mount", "/m:/m"),
    "a run on CPUs": ("--gpus-per-node", "0", "--data.source", "reasoning_gym:it's"),
    "options of the recipe": ("--time", "1-00:00:00", "--launch.slurm.options", '["--comment=it is", "--account=rl"]'),
    "pools": (),
}


@pytest.mark.parametrize("case", SHELLCHECKED)
def test_shellcheck_finds_nothing_in_the_scripts(case: str, tmp_path: Path) -> None:
    recipe = tmp_path / "it's a recipe.toml"
    recipe.write_text(RECIPE.read_text())
    if case == "pools":
        recipe.write_text(RECIPE.read_text().replace("num_rollouts = 2", "") + POOLS)
    script = write_job(tmp_path / "job", recipe, *SHELLCHECKED[case])
    names = (script, script.with_name("join.sbatch"), SERVICE)
    done = subprocess.run(["shellcheck", *map(str, names)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
