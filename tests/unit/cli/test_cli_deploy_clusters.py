"""`starling deploy slurm` and `lepton`: sizes derived from the recipe, the files, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from starling.cli.deploy.lepton import job_name, place
from starling.cli.deploy.sizes import Machines, Tasks, tasks_of
from starling.cli.main import main
from starling.cli.recipe.schema import load_recipe
from starling.common.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.toml"
VLLM = ("--rollout.engine=vllm",)
POOLS = """
[[rollout.pools]]
count = 2
gpu_kind = "h100"
partition = "fast nodes"
node_selector = {nvme = "true", zone = "a"}
settings = {num_slots = 3}
[[rollout.pools]]
engine = "vllm"
tensor_parallel_size = 4
"""
LEPTON = ("--image", "i:1", "--resource-shape", "gpu.8xh100-80gb", "--node-group", "g")
STORAGE = ("--mount", "/:/shared:node-nfs:lustre")


def pools_recipe(folder: Path) -> Path:
    path = folder / "pools.toml"
    path.write_text(RECIPE.read_text().replace("num_rollouts = 2\n", "") + POOLS)
    return path


def sizes(*flags: str, recipe: Path = RECIPE, **machines: int) -> list[tuple[str, int, int, int, int]]:
    """Return role, first number, replicas, nodes and GPUs of all tasks."""
    found = tasks_of(load_recipe([recipe], flags), Machines(**{"gpus": 8, **machines}))
    return [(one.role, one.first, one.num_replicas, one.nodes, one.gpus) for one in found]


def assigned(prelude: str, assignment: str) -> list[str]:
    """Return the settings that a script gives by a line of it, in the form of `load_recipe`."""
    text = f"settings=()\n{prelude}\n{assignment}\nprintf '%s\\n' \"${{settings[@]}}\""
    words = subprocess.run(["bash", "-euc", text], check=True, capture_output=True, text=True).stdout.splitlines()
    return [f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=True)]


PLACED_BY_SLURM = (
    "--launch.launcher=slurm",
    "--launch.rollout-nodes=2",
    *VLLM,
    "--rollout.vllm.tensor-parallel-size=4",
)
SEVERAL_NODES = (*PLACED_BY_SLURM, "--policy.parallel.dp-shard=16")
REWARD = ("reward", 0, 1, 1, 0)


def test_gpus_and_nodes_follow_from_the_recipe() -> None:
    assert sizes() == [("policy", 0, 1, 1, 1), ("rollout", 0, 2, 1, 1), REWARD]
    assert sizes("--policy.parallel.dp-shard=8", "--policy.parallel.tp=4")[0] == ("policy", 0, 1, 4, 8)
    assert sizes("--policy.parallel.dp-shard=12")[0] == ("policy", 0, 1, 2, 6), "as few nodes as share them equally"
    assert sizes("--policy.parallel.dp-shard=2", policy_nodes=2)[0] == ("policy", 0, 1, 2, 1)
    assert sizes("--launch.num-policies=3")[0] == ("policy", 0, 3, 1, 1)
    tensor = (*VLLM, "--rollout.vllm.tensor-parallel-size=4")
    assert sizes(*tensor)[1] == ("rollout", 0, 2, 1, 4)
    assert sizes(*tensor, gpus=2)[1:3] == [("rollout", 0, 1, 2, 2), ("rollout", 1, 1, 2, 2)]
    assert sizes(*tensor, gpus=0) == [("policy", 0, 1, 1, 0), ("rollout", 0, 2, 1, 0), REWARD]
    nodes = ("--launch.policy-nodes=2", "--launch.policy-rdzv=h:1", "--policy.parallel.dp-shard=4")
    assert sizes(*nodes)[0] == ("policy", 0, 1, 2, 2)


def test_pools_are_groups_of_their_own_with_numbers_that_go_on(tmp_path: Path) -> None:
    assert sizes(recipe=pools_recipe(tmp_path))[1:3] == [("rollout", 0, 2, 1, 1), ("rollout", 2, 1, 1, 4)]


@pytest.mark.parametrize(
    ("flags", "machines", "reason"),
    [
        (("--launch.num-policies=2", "--policy.parallel.dp-shard=16"), {}, "each would need 2 machines of 8 GPUs"),
        (("--policy.parallel.dp-shard=3",), {"policy_nodes": 2}, "--nodes-policy 2 cannot share the 3 ranks"),
        ((), {"rollout_nodes": 2}, "runs on one machine"),
        (VLLM, {"rollout_nodes": 2}, "--nodes-rollout 2 cannot share the 1 vLLM worker of"),
        (("--launch.gpus-per-rollout=9",), {}, "is 9, and a machine has 8 GPUs"),
        (("--launch.colocate=true",), {}, "launch.colocate = true shares the devices of one machine"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(flags: tuple[str, ...], machines: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        sizes(*flags, **machines)


# --- Slurm ---------------------------------------------------------------------------------------------------------


def slurm(capsys: pytest.CaptureFixture[str], *words: str, recipe: Path = RECIPE) -> str:
    assert main(["deploy", "slurm", str(recipe), *words]) == 0
    return capsys.readouterr().out


def test_job_has_a_component_for_each_role_and_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = '["--account=rl", "--comment=it is"]'
    words = ("--time", "1-00:00:00", "--launch.slurm.options", options, "--policy.parallel.dp-shard=16", "--cpus", "4")
    script = slurm(capsys, *words, recipe=pools_recipe(tmp_path))
    common = "--time=1-00:00:00 --account=rl '--comment=it is'"
    assert [line for line in script.splitlines() if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=quickstart",
        "#SBATCH --output=%x-%j.log --open-mode=append",
        "#SBATCH --requeue --signal=B:USR1@300",
        f"#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=4 {common}",
        "#SBATCH hetjob",
        f"#SBATCH --requeue --nodes=2 --ntasks-per-node=1 --cpus-per-task=32 --gpus-per-node=8 {common}",
        "#SBATCH hetjob",
        "#SBATCH --requeue --ntasks=2 --cpus-per-task=4 --gpus-per-task=h100:1 '--partition=fast nodes' "
        f"'--constraint=nvme&a' {common}",
        "#SBATCH hetjob",
        f"#SBATCH --requeue --ntasks=1 --cpus-per-task=16 --gpus-per-task=4 {common}",
    ]
    services = script[script.index("services() {") :].partition("}")[0].splitlines()[1:]
    assert services == [
        "  serve 0 1 reward 0 1",
        "  serve 1 2 policy 0 2",
        "  serve 2 2 rollout 0 1 --rollout.num_slots=3",
        """  serve 3 1 rollout 2 1 '--rollout.engine="vllm"' --rollout.vllm.tensor_parallel_size=4""",
    ]


def test_program_is_one_word_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    script = slurm(capsys, "--launch.slurm.program=/opt/a;id/starling")
    line = next(line for line in script.splitlines() if "PROGRAM=" in line)
    told = subprocess.run(
        ["bash", "-euc", f'RUN=r; {line}\nprintf %s "$PROGRAM"'], check=True, capture_output=True, text=True
    )
    assert told.stdout == "/opt/a;id/starling"


def test_signal_comes_before_the_controller_would_be_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--signal=B:USR1@960" in slurm(capsys, "--controller.stop-s=900")


def test_job_starts_whatever_the_launcher_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    script = slurm(capsys, *SEVERAL_NODES)
    line = next(line for line in script.splitlines() if "--launch.policy-rdzv" in line)
    flags = assigned("policy_nodes=2 where=host:26000", line)
    launch = load_recipe([RECIPE], [*SEVERAL_NODES, *flags]).launch
    assert (launch.launcher, launch.policy_nodes, launch.policy_rdzv) == ("local", 2, "host:26000")


def test_scripts_are_bash_without_open_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "job"
    text = slurm(
        capsys, "--out", str(out), "--image", "docker://nvcr.io#a/b:1", "--mount", "/m:/m", "--interface", "ib0"
    )
    assert f"submit: sbatch {out / 'starling.sbatch'}" in text
    for name in ("starling.sbatch", "join.sbatch"):
        script = (out / name).read_text()
        assert not re.search(r"@[A-Z_]+@", script)
        assert 'IMAGE="${IMAGE:-docker://nvcr.io#a/b:1}" MOUNTS="${MOUNTS:-/m:/m}"' in script
        assert subprocess.run(["bash", "-n", str(out / name)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--rollout.api.key=secret",), "--rollout.api.key has a secret"),
        (("--policy.saving.storage-options", '{secret_key = "x"}'), "--policy.saving.storage-options has a secret"),
        (("--image", "$(reboot)"), "--image '$(reboot)' cannot stand in a script"),
        (("--time", "1 day"), "--time '1 day' cannot stand in a script"),
        (("--cpus", "0"), "--cpus 0 is no number of processors"),
        (("--time", "soon"), "--time soon is no limit that sbatch takes"),
        (("--run.folder", "/r$(reboot)"), "the run's folder would be '/r$(reboot)/quickstart'; choose run.folder"),
        (("--run.folder", '/r"; reboot; "'), "choose run.folder without blanks, quotes and '$'"),
        (("--launch.slurm.options", '["--a=b\\nreboot"]'), "the option '--a=b\\nreboot' of sbatch cannot stand"),
    ],
)
def test_job_of_slurm_is_refused(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "slurm", str(RECIPE), *words]) == 2
    assert reason in capsys.readouterr().err


def test_partition_of_a_pool_that_would_end_its_line_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = pools_recipe(tmp_path)
    recipe.write_text(recipe.read_text().replace("fast nodes", "fast\\nreboot"))
    assert main(["deploy", "slurm", str(recipe)]) == 2
    assert "the option '--partition=fast\\nreboot' of sbatch cannot stand" in capsys.readouterr().err


# --- DGX Cloud Lepton ----------------------------------------------------------------------------------------------


def test_specification_has_the_documented_fields(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        *LEPTON,
        *STORAGE,
        "--env",
        "A=b",
        "--env",
        "STARLING_NETWORK__CONNECT_S=90",
        "--secret",
        "STARLING_ROLLOUT__API__KEY=k",
        "--pull-secret",
        "ngc",
    )
    assert main(["deploy", "lepton", str(RECIPE), *words, "--policy.parallel.dp-shard=16"]) == 0
    spec = json.loads(capsys.readouterr().out)
    command = spec["container"].pop("command")
    assert spec == {
        "resource_shape": "gpu.8xh100-80gb",
        "affinity": {"allowed_dedicated_node_groups": ["g"]},
        "container": {"image": "i:1"},
        "completions": 3,
        "parallelism": 3,
        "intra_job_communication": True,
        "max_failure_retry": 3,
        "max_job_failure_retry": 3,
        "envs": [
            {"name": "A", "value": "b"},
            {"name": "STARLING_NETWORK__CONNECT_S", "value": "90"},
            {"name": "STARLING_ROLLOUT__API__KEY", "value_from": {"secret_name_ref": "k"}},
        ],
        "mounts": [{"path": "/", "from": "node-nfs:lustre", "mount_path": "/shared"}],
        "image_pull_secrets": ["ngc"],
    }
    assert command[:2] == ["/bin/bash", "-c"]
    starts = [line.strip() for line in command[2].splitlines() if line.startswith("    start ")]
    assert starts == [
        "start 0,1,2,3,4,5,6,7 0 0 policy 0 2",
        "start '' 0 0 reward 0 1",
        "start 0,1,2,3,4,5,6,7 1 0 policy 0 2",
        "start 0 0 2 rollout 0 1",
        "start 1 1 2 rollout 0 1",
    ]
    assert "--launch.policy-nodes 2" in command[2]
    assert subprocess.run(["bash", "-nc", command[2]], check=False).returncode == 0


def test_job_of_lepton_starts_whatever_the_launcher_of_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deploy", "lepton", str(RECIPE), *LEPTON, *STORAGE, *SEVERAL_NODES]) == 0
    script = json.loads(capsys.readouterr().out)["container"]["command"][2]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(script.partition("<<'RECIPE'\n")[2].partition("\nRECIPE\n")[0])
    line = next(line for line in script.splitlines() if "--launch.policy-rdzv" in line)
    flags = assigned("host() { echo worker-$1; }", line)
    launch = load_recipe([recipe], flags).launch
    assert (launch.launcher, launch.policy_nodes, launch.policy_rdzv) == ("local", 2, "worker-0:29400")


def test_nodes_of_a_replica_are_on_different_workers() -> None:
    tasks = [Tasks("policy", nodes=2, gpus=2), Tasks("rollout", num_replicas=3, gpus=1), Tasks("rollout", 3, nodes=2)]
    workers = place(tasks, 4)
    placed = [
        [(one.group.role, one.group.first, one.number, one.gpus, one.meets_at) for one in w.tasks] for w in workers
    ]
    assert placed == [
        [("policy", 0, 0, (0, 1), 0), ("rollout", 0, 0, (2,), 0), ("rollout", 0, 1, (3,), 0), ("rollout", 3, 0, (), 0)],
        [("policy", 0, 1, (0, 1), 0), ("rollout", 0, 2, (2,), 1), ("rollout", 3, 1, (), 0)],
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((*LEPTON, *STORAGE, "--rollout.api.key=secret"), "has a secret, and the specification of a job is none"),
        ((*LEPTON, "--mount", "/shared"), "--mount /shared is none"),
        ((*LEPTON, *STORAGE, "--env", "LEPTON_A=b"), "--env LEPTON_A is none"),
        ((*LEPTON, *STORAGE, "--secret", "KEY"), "--secret KEY is none"),
        ((*LEPTON, *STORAGE, "--env", "STARLING_ROLLOUT__API__KEY=x"), "give --secret STARLING_ROLLOUT__API__KEY=NAME"),
        ((*LEPTON, *STORAGE, "--env", "starling_rollout__api__key=x"), "--env starling_rollout__api__key has a secret"),
        (
            (*LEPTON, *STORAGE, "--env", 'STARLING_ROLLOUT__API={"key": "x"}'),
            "--env STARLING_ROLLOUT__API has a secret",
        ),
        ((*LEPTON[:2], "--resource-shape", "h100", *LEPTON[4:], *STORAGE), "--resource-shape h100 is none"),
    ],
)
def test_job_of_lepton_is_refused(words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "lepton", str(RECIPE), *words]) == 2
    assert reason in capsys.readouterr().err


def test_name_of_the_job_is_one_of_lepton() -> None:
    assert job_name("My_Run.v2") == "my-run-v2"
    assert job_name("7b") == "run-7b"
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,35}", job_name("x" * 60))
