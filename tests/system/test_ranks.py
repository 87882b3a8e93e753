"""A policy of four ranks in a run: weights that every rollout attests, states, and the death of any rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from system_runs import (
    attempt,
    checkpoints,
    make_varied_model,
    make_workdir,
    metrics,
    num_steps,
    run,
    run_concurrently,
    starling_command,
    trained,
)

pytestmark = pytest.mark.system

MESH = {"parallel": {"tp": 2, "dp_shard": 2}}
NUM_SFT = 3
MIXTURE = {
    "scratch": {
        "model_type": "qwen3_moe",
        "alphabet": "abcdefghijklmnopqrstuvwxyz>",
        "config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "tie_word_embeddings": True,
        },
    }
}
RUN_S = 300.0
"""Deadline of a run, on a busy machine with fewer processors than the policy has ranks."""


def mesh_run(folder: Path) -> None:
    """Reinforcement learning by four ranks, as by a single process."""
    with run(make_workdir(folder, launch={"num_rollouts": 2}, policy=MESH)) as command:
        assert command.wait(RUN_S) == 0, command.transcript()
    assert_whole(folder, 6)
    adopted = metrics(folder, "adopted")
    assert {line["replica"] for line in adopted} == {"rollout-0", "rollout-1"}
    assert all(line["attested"] for line in adopted)


def single_run(folder: Path) -> None:
    with run(make_workdir(folder, launch={"num_rollouts": 2})) as command:
        assert command.wait(RUN_S) == 0, command.transcript()


def assert_whole(folder: Path, num_rl: int) -> None:
    """Assert that every prompt was trained once, and that every step was made once."""
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, NUM_SFT + num_rl + 1))
    assert len(trained(folder)) == num_rl * 4
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder) == [f"step-{NUM_SFT + num_rl}"]


def test_run_with_a_policy_of_four_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    """Its supervised steps, which have no samples, have the same losses; its checkpoint is a whole model."""
    scenarios = (partial(mesh_run, tmp_path / "mesh"), partial(single_run, tmp_path / "single"))
    run_concurrently(*scenarios, max_workers=2)
    expected, found = (metrics(tmp_path / name, "step")[:NUM_SFT] for name in ("single", "mesh"))
    for one, other in zip(expected, found, strict=True):
        for key in ("loss", "grad_norm", "num_tokens"):
            assert other[key] == pytest.approx(one[key], rel=1e-3)
        assert other["update_norm"] == pytest.approx(one["update_norm"], rel=0.05)  # of other samples


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ({"model": MIXTURE}, {"pp": 2}),
        ({}, {"cp": 2}),
        ({"model": MIXTURE}, {"dp_shard": 2, "ep": 2}),
        ({"model": MIXTURE}, {"pp": 2, "schedule": "zbv", "dp_shard": 2, "ep": 2}),
    ],
    ids=["pp", "cp", "ep", "pp, dp_shard and ep"],
)
def test_rollouts_attest_the_weights_of_every_axis(
    model: dict[str, Any], parallel: dict[str, Any], tmp_path: Path
) -> None:
    with run(make_workdir(tmp_path, policy={"parallel": parallel}, **model)) as command:
        assert command.wait(RUN_S) == 0, command.transcript()
    assert_whole(tmp_path, 6)
    adopted = metrics(tmp_path, "adopted")
    assert adopted
    assert all(line["attested"] for line in adopted)


@pytest.mark.campaign
@pytest.mark.parametrize("merged", [False, True])
def test_rollouts_attest_the_adapters_of_ranks(merged: bool, tmp_path: Path) -> None:
    """They load the base weights themselves; the checkpoint is what peft loads, or a whole model."""
    base = make_varied_model(tmp_path / "base")
    workdir, lora = make_workdir(tmp_path, policy=MESH, model={}), ("--model.lora.rank", "4")
    flags = (*lora, "--model.lora.merged", str(merged).lower(), "--policy.init", "pretrained")
    with run(workdir, "--model.path", str(base), *flags) as command:
        assert command.wait(RUN_S) == 0, command.transcript()
    assert num_steps(tmp_path) == NUM_SFT + 6
    adopted = metrics(tmp_path, "adopted")
    assert adopted
    assert all(line["attested"] for line in adopted)
    checkpoint = attempt(tmp_path) / "checkpoints" / f"step-{NUM_SFT + 6}"
    saved = "model.safetensors" if merged else "adapter_model.safetensors"
    assert [path.name for path in checkpoint.glob("*.safetensors")] == [saved]


@pytest.mark.campaign
def test_run_goes_on_when_any_rank_is_killed(tmp_path: Path) -> None:
    """In steps, and while states are written: the replica starts again as a whole, and no step is lost."""
    changes = {"controller": {"save_every": 4, "save_rest_s": 0.0}, "launch": {"num_rollouts": 1, "max_restarts": 9}}
    num_rl = 50
    with run(make_workdir(tmp_path, policy=MESH, rl={"num_steps": num_rl}, **changes)) as command:
        command.wait_until(lambda: trained(tmp_path), "a step of reinforcement")
        for number, rank in enumerate((2, 1, 3), start=1):
            made, policy = num_steps(tmp_path), command.process_titled("policy-0").pid
            command.process_titled(f"policy-0.rank-{rank}").kill()
            command.wait_for_output(f"restarting it in {2.0**number / 4:g} s ({number} of 9 times)")
            command.wait_until(
                lambda made=made: num_steps(tmp_path) >= made + 5, f"steps after the death of rank {rank}"
            )
            assert command.process_titled("policy-0").pid != policy
        assert command.wait(RUN_S) == 0, command.transcript()
    assert_whole(tmp_path, num_rl)
    log = (attempt(tmp_path) / "logs" / "policy-0.log").read_text()
    for rank in (1, 2, 3):
        assert f"starling policy-0: rank {rank} was killed by SIGKILL, and the replica starts again" in log


@pytest.mark.campaign
def test_run_is_resumed_with_another_mesh(tmp_path: Path) -> None:
    with run(make_workdir(tmp_path, policy=MESH, rl={"num_steps": 30})) as command:
        command.wait_until(lambda: trained(tmp_path), "a step of reinforcement")
        command.interrupt()
        assert command.wait(RUN_S) == 0, command.transcript()
    made = num_steps(tmp_path)
    for name in ("recipe.toml", "config.toml"):
        path = attempt(tmp_path) / name
        text = path.read_text()
        assert text.count("tp = 2") == text.count("dp_shard = 2") == 1
        path.write_text(text.replace("dp_shard = 2", "dp_shard = 1"))
    with starling_command(tmp_path, "run", "--resume", "runs/tiny/attempt-1", name="resumed") as command:
        command.wait_until(lambda: num_steps(tmp_path) > made, "a step with another mesh")
        assert len([one for one in command.processes() if "policy-0.rank" in "".join(one.cmdline())]) == 1
        assert command.wait(RUN_S) == 0, command.transcript()
    assert [line["step"] for line in metrics(tmp_path, "step")] == list(range(1, NUM_SFT + 31))
    assert f"version={made}" in (attempt(tmp_path) / "logs" / "policy-0.log").read_text()
