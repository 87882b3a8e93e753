"""Recipes of runs on pairs and with teachers: their replicas and checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

from starling.cli.recipe.arithmetic import describe_arithmetic
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.screen import PlainScreen
from starling.common.errors import ConfigError
from starling.common.wire.telemetry import RunSnapshot

SCRATCH = {
    "model_type": "qwen3",
    "alphabet": "ab>",
    "max_length": 16,
    "chat_template": "{{ messages[0].content }}>",
    "config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
}


def recipe(kind: str, **sections: Any) -> Recipe:
    tree = {"run": {"kind": kind}, "model": {"scratch": SCRATCH}, "data": {"source": "rows.jsonl"}, **sections}
    return Recipe.model_validate(tree)


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_preference_run_needs_no_rollouts_and_no_rewards(kind: str) -> None:
    run = recipe(kind, preference={"num_steps": 6, "examples_per_step": 4}, launch={"num_rollouts": 0})
    first, *_, last = describe_arithmetic(run)
    assert first == f"{kind}: 6 steps x 4 pairs = 24 pairs"
    assert last.startswith("model: ")


def test_plain_screen_prints_steps_of_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen(recipe("dpo", preference={"num_steps": 10}))
    for version in range(5):
        metrics = {"loss": 0.5} if version else {}
        screen.show(
            RunSnapshot(
                phase="dpo", version=version, last_step=10, num_supervised_steps=10, elapsed_s=1.0, waiting_for="",
                step=metrics,
            )
        )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1 of 10", "step 3 of 10"]
    assert all("loss 0.5" in line for line in lines)


# --- teachers ------------------------------------------------------------------------------------------------------

SCORERS = {"scorers": [{"name": "exact_match"}]}


def test_run_with_a_teacher_starts_one_and_needs_no_scorers() -> None:
    alone = recipe("rl", teacher={"path": "big", "top_k": 4})
    assert alone.replicas == {"policy": 1, "rollout": 1, "reward": 0, "teacher": 1}
    assert (
        "teachers: 1; each completion is scored by one: the 4 most likely tokens at each position"
        in describe_arithmetic(alone)
    )
    both = recipe("rl", teacher={"path": "big"}, reward=SCORERS, launch={"num_teachers": 2, "num_rewards": 3})
    assert both.replicas == {"policy": 1, "rollout": 1, "reward": 3, "teacher": 2}
    assert recipe("rl", reward=SCORERS).replicas["teacher"] == 0


def test_controller_waits_for_the_launched_replicas(tmp_path: Path) -> None:
    teacher = tmp_path / "big"
    teacher.mkdir()
    (teacher / "config.json").write_text("{}")
    (teacher / "model.safetensors").write_bytes(b"")
    tree = {"model": {"scratch": SCRATCH}, "data": {"source": "rows.jsonl"}, "teacher": {"path": str(teacher)}}
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(tree))
    for flags in ([], ["--controller.start-s", "600"]):  # the rest of the section is not given by one of its settings
        plan = load_recipe([tmp_path / "recipe.toml"], flags).plan()
        assert (plan.num_rollouts, plan.num_rewards, plan.num_teachers) == (1, 0, 1)
    (teacher / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"the model folder .*big has a config.json and no weights; add model"):
        load_recipe([tmp_path / "recipe.toml"], [])


@pytest.mark.parametrize(
    ("kind", "sections", "complaint"),
    [
        ("rl", {}, r"nothing scores them; add \[\[reward.scorers\]\], or a \[teacher\]"),
        ("rl", {"teacher": {}}, "teacher.path is missing"),
        ("rl", {"teacher": {"path": "big"}, "launch": {"num_teachers": 0}}, "launch.num_teachers = 0, but"),
        ("rl", {"teacher": {"path": "big"}, "rl": {"dynamic_sampling": True}}, "compares rewards, and nothing scores"),
        (
            "rl",
            {"teacher": {"path": "big"}, "evaluation": {"at_end": True}, "data": {"source": "a", "held_out": 1}},
            r"\[evaluation\] is on, and nothing scores in this run",
        ),
        ("dpo", {"teacher": {"path": "big"}, "preference": {"num_steps": 1}}, "run.kind = 'dpo' has no such steps"),
    ],
)
def test_teacher_without_a_use_is_refused(kind: str, sections: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        recipe(kind, **sections)


@pytest.mark.parametrize(
    ("launch", "complaint"),
    [
        ({}, "launch.policy_nodes = 2, and launch.policy_rdzv is missing; give host:port of this machine"),
        ({"policy_rdzv": "h:x"}, "launch.policy_rdzv 'h:x' is no address"),
        ({"policy_rdzv": "h:65536"}, "'h:65536' is no address; give host:port .* with a port from 1 to 65535"),
        ({"policy_rdzv": "h:0"}, "'h:0' is no address"),
        ({"policy_rdzv": "h:1", "policy_nodes": 1}, "launch.policy_rdzv = 'h:1' is not used with launch.policy_nodes"),
        (
            {"policy_rdzv": "h:1", "num_policies": 2},
            "launch.policy_nodes = 2 is for one policy, and launch.num_policies",
        ),
    ],
)
def test_nodes_of_a_replica_need_an_address_of_their_own(launch: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        recipe("rl", teacher={"path": "big"}, launch={"policy_nodes": 2, **launch})

    def of_rollout(text: str) -> str:
        return text.replace("policy", "rollout").replace("policies", "rollouts")

    changed = {of_rollout(name): value for name, value in launch.items()}
    with pytest.raises(ValidationError, match=of_rollout(complaint)):
        recipe("rl", teacher={"path": "big"}, launch={"rollout_nodes": 2, **changed})


def test_number_of_rollouts_whose_nodes_meet_at_one_address_follows_no_rule() -> None:
    launch = {"rollout_nodes": 2, "rollout_rdzv": "h:1"}
    complaint = r"controller.autoscale.max = 4, but launch.rollout_nodes = 2 is for one rollout; remove"
    with pytest.raises(ValidationError, match=complaint):
        recipe("rl", teacher={"path": "big"}, controller={"autoscale": {"max": 4}}, launch=launch)


def test_launcher_ray_finds_the_address_of_a_replicas_nodes_itself() -> None:
    nodes = {"policy_nodes": 2, "rollout_nodes": 2, "num_rollouts": 3}
    ranks = {"parallel": {"dp_shard": 2}}
    recipe("rl", teacher={"path": "big"}, policy=ranks, launch={"launcher": "ray", **nodes})
    with pytest.raises(ValidationError, match=r"launch.rollout_rdzv = 'h:1', but the launcher ray chooses where"):
        recipe("rl", teacher={"path": "big"}, policy=ranks, launch={"launcher": "ray", **nodes, "rollout_rdzv": "h:1"})
    local = {"launcher": "ray", **nodes, "ray": {"roles": ["rollout"]}}
    with pytest.raises(ValidationError, match=r"launch.policy_nodes = 2, and launch.policy_rdzv is missing"):
        recipe("rl", teacher={"path": "big"}, policy=ranks, launch=local)


def test_nodes_of_a_policy_divide_its_ranks() -> None:
    complaint = "launch.policy_nodes = 2 does not divide the 1 rank of policy.parallel; set sizes whose product is a"
    with pytest.raises(ValidationError, match=complaint):
        recipe("rl", teacher={"path": "big"}, launch={"policy_nodes": 2, "policy_rdzv": "h:1"})


@pytest.mark.parametrize(
    ("sizes", "nodes", "right"),
    [({}, {}, 1), ({"dp_shard": 2, "tp": 2}, {}, 4), ({"dp_shard": 4}, {"policy_nodes": 2, "policy_rdzv": "h:1"}, 2)],
)
def test_policy_has_a_gpu_for_each_of_its_ranks(sizes: dict[str, int], nodes: dict[str, Any], right: int) -> None:
    def with_gpus(num: int) -> None:
        launch = {"gpus_per_policy": num, "num_policies": 1 if nodes else 2, **nodes}
        recipe("rl", teacher={"path": "big"}, launch=launch, policy={"parallel": sizes})

    with_gpus(right)
    for wrong in {1, 2, 3, 4, 8} - {right}:
        with pytest.raises(
            ValidationError,
            match=f"launch.gpus_per_policy = {wrong}, and a policy has {right} ranks? on this machine.*set it to "
            f"{right}, or sizes of policy.parallel.*product is {wrong * nodes.get('policy_nodes', 1)}",
        ):
            with_gpus(wrong)
