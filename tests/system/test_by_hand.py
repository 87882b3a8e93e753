"""Services started one by one, and replicas with wrong keys or runs, which are rejected without harm to the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from system_runs import Command, make_workdir, rollouts_on_other_hosts, starling_command

from starling.cli.recipe.schema import Recipe
from starling.common.settings import iter_settings
from starling.policy.shell.loading import PolicyProcess
from starling.reward.shell.main import RewardProcess
from starling.rollout.settings import RolloutProcess

pytestmark = pytest.mark.system

REPLICAS = ("policy-0", "rollout-0", "rollout-1", "reward-0", "reward-1")


def run_to_the_end(folder: Path, *arguments: str) -> str:
    """Run a short command, and return its output."""
    with starling_command(folder, *arguments) as command:
        assert command.wait() == 0, command.transcript()
    return command.output


def make_run_folder(folder: Path) -> Path:
    """Create what every service needs: a model folder, keys, and a recipe that names the model."""
    run_to_the_end(make_workdir(folder), "scratch", "tiny.toml", "model")
    run_to_the_end(folder, "keys", "make", "run/keys", *REPLICAS)
    run_to_the_end(folder, "keys", "make", "others/keys", "rollout-1", "reward-1")
    make_workdir(folder, run={"id": "by-hand"}, model={}, network={"connect_s": 15.0}, rl={"num_steps": 8})
    text = (folder / "tiny.toml").read_text()
    (folder / "tiny.toml").write_text(text.replace("[model]", '[model]\npath = "model"'))
    return folder


def test_services_started_by_hand_train_and_refuse_unknown_keys(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path, network={"connect_s": 15.0}, rl={"num_steps": 8})
    run_to_the_end(folder, "prepare", "tiny.toml", "--dir", "run", "--rollouts", "2", "--rewards", "2")
    run_to_the_end(folder, "keys", "make", "others/keys", "rollout-1", "reward-1")
    config = ["--config", "run/config.toml", "--dir", "run"]
    run_id = tomllib.loads((folder / "run/config.toml").read_text())["run"]["id"]
    own_key = json.loads((folder / "run/keys/rollout-1.json").read_text())
    stranger_file = folder / "others/keys/rollout-1.json"
    stranger_file.write_text(
        json.dumps({**json.loads(stranger_file.read_text()), "controller_public": own_key["controller_public"]})
    )
    with ExitStack() as stack:
        controller = stack.enter_context(starling_command(folder, "controller", *config, name="controller", fresh=True))
        controller.wait_until((folder / "run/controller.json").exists, "its address")
        address = json.loads((folder / "run/controller.json").read_text())["address"]

        def start(role: str, *more: str, name: str) -> Command:
            arguments = [role, *config, "--controller", address, *more]
            return stack.enter_context(starling_command(folder, *arguments, name=name, fresh=True))

        # All are started before the policy, so that they connect while the run is in progress.
        other_replica = start("reward", "--name", "reward-1", "--key", "run/keys/reward-0.json", name="key of another")
        wrong_run = start("reward", "--name", "reward-1", "--run.id", "yesterday", name="wrong run")
        unknown_key = start("rollout", "--name", "rollout-1", "--key", str(stranger_file), name="wrong key")
        other_run = start("reward", "--name", "reward-1", "--key", "others/keys/reward-1.json", name="key of a run")
        unknown_key.wait()
        services = [start(role, name=f"{role}-0") for role in ("reward", "rollout", "policy")]
        assert controller.wait() == 0, controller.transcript()
        assert [service.wait() for service in services] == [0, 0, 0], [service.transcript() for service in services]
    assert other_replica.process.returncode == 2
    assert "key file run/keys/reward-0.json was made for reward-0, not for reward-1" in other_replica.errors
    assert unknown_key.process.returncode == 1
    assert f"the controller at {address} refuses the key of rollout-1; use the key file that was" in unknown_key.errors
    assert wrong_run.process.returncode == 1
    assert f"the controller refuses reward-1: this is run {run_id}, not yesterday" in wrong_run.errors
    assert other_run.process.returncode == 1
    assert "cannot be reached by reward-1" in other_run.errors
    assert "that the key file was made for this run" in other_run.errors
    assert "refused an unknown key" in controller.errors
    assert "Traceback" not in "".join(command.errors for command in (other_replica, unknown_key, wrong_run, other_run))
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 12))
    assert {line["replica"] for line in lines if line["kind"] == "joined"} == {"policy-0", "rollout-0", "reward-0"}
    assert (folder / "run/checkpoints/step-11/model.safetensors").exists()


@pytest.mark.campaign
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process another name of the host")
def test_rollouts_on_other_hosts_read_each_second_version_from_each_other(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path)
    config = ["--config", "tiny.toml", "--policy.init", "random", "--dir", "run", "--controller.num-rollouts", "3"]
    config += ["--controller.relay-from-mb", "0", "--rl.sync-every", "2", "--rl.max-staleness", "1"]
    config += ["--sft.num-steps", "0", "--rl.prompts-per-step", "16", "--evaluation.every", "0"]
    run_to_the_end(folder, "keys", "make", "run/keys", "rollout-2")
    with ExitStack() as stack:
        controller = stack.enter_context(starling_command(folder, "controller", *config, name="controller", fresh=True))
        controller.wait_until((folder / "run/controller.json").exists, "its address")
        address = json.loads((folder / "run/controller.json").read_text())["address"]
        services = [
            stack.enter_context(
                starling_command(folder, role, *config, "--controller", address, name=f"{role}-0", fresh=True)
            )
            for role in ("reward", "policy")
        ]
        stack.enter_context(rollouts_on_other_hosts(folder, 3, *config, "--controller", address))
        assert controller.wait() == 0, controller.transcript()
        assert [service.wait() for service in services] == [0, 0], [service.transcript() for service in services]
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert {line["host"] for line in lines if line["kind"] == "joined"} >= {"host-0", "host-1", "host-2"}
    assert [line["version"] for line in lines if line["kind"] == "published"] == [0, 2, 4, 6, 8]
    adopted = [line for line in lines if line["kind"] == "adopted"]
    assert all(line["attested"] for line in adopted)
    for version in (2, 4, 6):
        sources = [line["source"] for line in adopted if line["version"] == version]
        assert sources.count("policy-0") <= 1, "the policy sends a version once"
    assert any(line["source"].startswith("rollout-") for line in adopted)


def test_settings_and_help_show_every_setting() -> None:
    """`starling settings` lists all settings, and `--help` of a service those of the service."""
    done = subprocess.run(
        [sys.executable, "-m", "starling.cli.main", "settings"], capture_output=True, text=True, timeout=60, check=True
    )
    for setting in iter_settings(Recipe):
        assert f"{setting.key}  {setting.type}  " in done.stdout, f"starling settings does not show {setting.key}"
    schemas = {"rollout": RolloutProcess, "policy": PolicyProcess, "reward": RewardProcess}
    with ThreadPoolExecutor(2) as threads:
        texts = dict(zip(schemas, threads.map(help_of, schemas), strict=True))
    for command, schema in schemas.items():
        for key, *_ in iter_settings(schema):
            shown = key.rpartition("[].")[2] if "[]." in key else f"--{key.replace('_', '-')}"
            assert f"{shown} " in texts[command], f"{command} --help does not show {key}"


def help_of(command: str) -> str:
    """Return what `starling COMMAND --help` prints."""
    arguments = [sys.executable, "-m", "starling.cli.main", command, "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True).stdout


LIST_HEAVY_IMPORTS = """
import sys
from starling.reward.shell.main import main
code = main(["--config", "tiny.toml", "--controller", "tcp://127.0.0.1:9"])
heavy = sorted({"torch", "transformers", "numpy", "matplotlib"} & set(sys.modules))
print(code, heavy)
"""


def test_reward_service_imports_no_torch(tmp_path: Path) -> None:
    """The service initialises completely, and fails only because nothing listens at the controller's address."""
    make_workdir(tmp_path, network={"connect_s": 0.3, "curve": False})
    done = subprocess.run(
        [sys.executable, "-c", LIST_HEAVY_IMPORTS], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
    )
    assert "ready" in done.stderr
    assert done.stdout == "1 []\n"


def test_dry_run_prints_arithmetic_and_starts_nothing(tmp_path: Path) -> None:
    output = run_to_the_end(make_workdir(tmp_path), "run", "tiny.toml", "--dry-run", "--rl.max-staleness", "2")
    for line in (
        "# supervised: 3 steps x 4 examples = 12 examples",
        "# a step: 4 prompts x 4 completions = 16 sequences, at most 96 sampled tokens",
        "# staleness: at most 2, so (2 + 1) x 4 = 12 groups exist at a time",
        "# the run: 6 steps x 4 prompts = 24 groups",
        "parameters x 4 bytes = ",
    ):
        assert line in output, output
    assert "max_staleness = 2" in output
    assert not (tmp_path / "runs").exists()
