"""Settings that `load_recipe` derives from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from starling.cli.recipe.schema import IMPORTS_S, load_recipe, to_toml
from starling.common.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"


NODES = ["--launch.policy-nodes=2", "--launch.policy-rdzv=h:1", "--policy.parallel.dp-shard=2"]


@pytest.mark.parametrize(
    ("flags", "start_s"),
    [
        ([], 120.0),
        (["--rollout.engine", "vllm"], 600.0 + IMPORTS_S),
        (["--rollout.engine", "vllm", "--rollout.vllm.start-timeout-s", "20"], 120.0),
        (["--rollout.engine", "vllm", "--controller.start-s", "1000"], 1000.0),
        (NODES, 300.0 + IMPORTS_S),
        ([*NODES, "--policy.parallel.join-s", "20"], 120.0),
    ],
)
def test_start_timeout_covers_the_start_of_engines_and_nodes(flags: list[str], start_s: float) -> None:
    assert load_recipe([RECIPE], flags).controller.start_s == start_s


SEVERAL = ("--launch.policy-nodes=2", "--policy.parallel.dp-shard=2", "--launch.num-policies=2")


def test_launcher_of_a_cluster_chooses_where_nodes_meet() -> None:
    with pytest.raises(ConfigError, match=r"launch\.policy_rdzv is missing"):
        load_recipe([RECIPE], SEVERAL)
    launch = load_recipe([RECIPE], ("--launch.launcher=slurm", *SEVERAL)).launch
    assert (launch.policy_nodes, launch.policy_rdzv) == (2, "")
    with pytest.raises(ConfigError, match=r"but the launcher slurm chooses where the nodes of each replica meet"):
        load_recipe([RECIPE], ("--launch.launcher=slurm", "--launch.policy-rdzv=h:1", *SEVERAL))
    for others in (("--launch.launcher=kubernetes",), ("--launch.launcher=slurm", '--launch.slurm.roles=["rollout"]')):
        with pytest.raises(ConfigError, match=r"launch\.policy_rdzv is missing"):
            load_recipe([RECIPE], (*others, *SEVERAL))


def test_controller_bounds_groups_by_what_rollouts_and_teachers_may_send(tmp_path: Path) -> None:
    follows = load_recipe([RECIPE], []).controller
    assert (follows.max_model_len, follows.teacher_top_k) == (0, None)
    flags = ("--rollout.max-model-len", "48", "--rollout.max-media-bytes", "1000", "--teacher.top-k", "5")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    limits = load_recipe([RECIPE], [*flags, "--teacher.path", str(tmp_path)]).plan().group_limits
    assert (limits.longest, limits.media_bytes, limits.teacher_top_k) == (48, 1000, 5)


def test_controller_waits_for_policies_of_other_machines_too() -> None:
    """And policies that start together make steps together."""
    awaited = load_recipe([RECIPE], ["--controller.num_policies=3", "--policy.parallel.elastic=true"])
    assert awaited.plan().num_policies == 3
    launched = load_recipe([RECIPE], ["--launch.num_policies=2"])
    assert (launched.plan().num_policies, launched.policy.parallel.elastic) == (2, True)


@pytest.mark.parametrize("count", ["num_rollouts", "num_rewards"])
@pytest.mark.parametrize("others", [[], ["--controller.start-s", "600"]])
def test_replicas_of_other_machines_are_counted_as_given(
    count: str, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default number too, and whatever else of the section is given."""
    none = [f"--launch.{count}=0", *others]
    assert getattr(load_recipe([RECIPE], [*none, f"--controller.{count}=1"]).plan(), count) == 1
    assert getattr(load_recipe([RECIPE], [*none, f"--controller.{count}=2"]).plan(), count) == 2
    with pytest.raises(ConfigError, match=rf"launch\.{count} = 0, but .* or controller\.{count} to the number"):
        load_recipe([RECIPE], none)
    monkeypatch.setenv(f"STARLING_CONTROLLER__{count.upper()}", "1")
    assert getattr(load_recipe([RECIPE], none).plan(), count) == 1


def test_controller_bounds_scores_by_the_scorers_of_the_recipe() -> None:
    scorers = ", ".join(f'{{ name = "math", label = "{number}" }}' for number in range(100))
    assert load_recipe([RECIPE], ["--reward.scorers", f"[{scorers}]"]).plan().num_scorers == 100


@pytest.mark.parametrize("depth", [70, 400])
def test_recipe_of_any_depth_is_refused_in_a_sentence(depth: int, tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text(f"[data]\noptions = {{ a = {'[' * depth}{']' * depth} }}\n")
    with pytest.raises(ConfigError, match=r"data.options.a has more than 64 tables or lists in each other"):
        load_recipe([RECIPE, deep], [])


def test_recipe_of_any_size_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="has more than 16 MiB"):
        load_recipe([RECIPE, tmp_path / "large.toml"], [])


COLOCATED = ("--rollout.engine", "vllm", "--launch.colocate", "true")


def test_colocated_vllm_has_sleep_mode(tmp_path: Path) -> None:
    """The settings of its process have sleep mode besides the recipe's vLLM settings."""
    flags = (*COLOCATED, "--rollout.vllm.engine-args.block-size", "64")
    (tmp_path / "recipe.toml").write_text(to_toml(load_recipe([RECIPE], flags)))
    arguments = load_recipe([tmp_path / "recipe.toml"], []).rollout.vllm.engine_args
    assert arguments == {"block_size": 64, "enable_sleep_mode": True}
    for alone in (COLOCATED[:2], COLOCATED[2:]):
        assert "enable_sleep_mode" not in load_recipe([RECIPE], alone).rollout.vllm.engine_args


@pytest.mark.parametrize("setting", ["policy.transport", "rollout.transport"])
def test_transport_that_cannot_encrypt_is_refused_where_weights_must_be_encrypted(setting: str) -> None:
    flags = ("--network.encrypt-weights", "true", f"--{setting}", "nixl")
    load_recipe([RECIPE], flags)  # within this machine
    refusal = f"{setting} with network.encrypt_weights = true: Transport 'nixl' cannot encrypt weights, and other hosts"
    with pytest.raises(ConfigError, match=refusal):
        load_recipe([RECIPE], (*flags, "--network.host", "10.0.0.1"))
    load_recipe([RECIPE], ("--network.encrypt-weights", "false", f"--{setting}", "nixl", "--network.host", "10.0.0.1"))


WEIGHTS_FROM = ("--policy.weights-from", "s3://bucket/model")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (WEIGHTS_FROM, r"policy.weights_from = 's3://bucket/model' with \[model.scratch\] would not be read"),
        ((*WEIGHTS_FROM, "--policy.init", "random"), "weights_from = .* with init = 'random' would not be read"),
        (("--launch.fan-out", "true"), "launch.fan_out = true, but run.kind = 'rl' has a policy that publishes"),
        (("--rollout.num-slots", "0"), "rollout.num_slots = 0 is for replicas that only follow a run"),
    ],
)
def test_sources_of_weights_that_do_not_suit_the_run_are_refused(flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_recipe([RECIPE], flags)


@pytest.mark.parametrize(("setting", "value"), [("sync-every", "0"), ("sync-every-s", "20")])
def test_publications_amid_groups_are_refused_where_devices_are_shared(setting: str, value: str) -> None:
    flags = ("--rl.max-staleness", "2", f"--rl.{setting}", value)
    load_recipe([RECIPE], flags)
    with pytest.raises(ConfigError, match=rf"rl.{setting.replace('-', '_')} = {value} with launch.colocate = true"):
        load_recipe([RECIPE], (*flags, "--launch.colocate", "true"))


def test_colocated_vllm_without_sleep_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"colocate = true, but rollout.vllm.engine_args.enable_sleep_mode = False"):
        load_recipe([RECIPE], [*COLOCATED, "--rollout.vllm.engine-args", "{enable_sleep_mode = false}"])


CONVERSATIONS = ("--data.format", "", "--data.source", "rows.jsonl")


def test_conversations_need_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    load_recipe([RECIPE], CONVERSATIONS)  # a missing file is reported as such when it is read
    Path("rows.jsonl").touch()
    with pytest.raises(
        ConfigError, match=r"data.source = 'rows.jsonl' gives conversations, .*model.scratch.chat_templ"
    ):
        load_recipe([RECIPE], CONVERSATIONS)
    load_recipe([RECIPE], (*CONVERSATIONS, "--model.scratch.chat-template", "{{ messages[0].content }}"))
    load_recipe([RECIPE], ("--data.format", "", "--data.source", "prompts:make"))  # rows of a function may be texts


@pytest.mark.parametrize(
    ("name", "content", "accepted"),
    [
        ("tokenizer_config.json", "{}", False),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("chat_template.jinja", "{{ messages }}", True),
    ],
)
def test_chat_template_is_found_in_the_model_folder(tmp_path: Path, name: str, content: str, accepted: bool) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""[model]
path = "{tmp_path}"
[data]
source = "{tmp_path}/rows.jsonl"
[[reward.scorers]]
name = "exact_match"
"""
    )
    for file, text in (
        ("config.json", "{}"),
        ("rows.jsonl", ""),
        ("model.safetensors", ""),
        ("tokenizer_config.json", "{}"),
        (name, content),
    ):
        (tmp_path / file).write_text(text)
    if accepted:
        load_recipe([recipe], ())
        return
    with pytest.raises(ConfigError, match=r"no chat template; add a chat_template.jinja to the model folder, or make"):
        load_recipe([recipe], ())
    load_recipe([recipe], ("--data.format", "{question}"))
    with pytest.raises(ConfigError, match=r"or make plain text by data.format \(--plain of infer and evaluate\)"):
        load_recipe([recipe], ("--run.kind", "infer"))
    for source in ("reasoning_gym:spell_backward", "hf:gsm8k"):  # neither is a function that may give plain text
        with pytest.raises(ConfigError, match=rf"data.source = '{source}' gives conversations, .* no chat template"):
            load_recipe([recipe], ("--data.source", source))
