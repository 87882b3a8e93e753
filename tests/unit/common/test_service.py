"""The command line of a service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.ids import Role
from starling.common.service import OWN_FLAGS, NodeArguments, check_model_folder, parse_arguments, process_name
from starling.common.settings import ServiceSettings, iter_settings

ADDRESS = ("--controller", "tcp://h:1")


@pytest.mark.parametrize("name", ["west", "rollout", "policy-0", "rollout-1.5", "rollout-x"])
def test_name_of_a_replica_begins_with_its_role(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--name {name} is not the name of a rollout; write rollout-NUMBER"):
        parse_arguments("rollout", [*ADDRESS, "--name", name], ServiceSettings)
    parsed = parse_arguments("rollout", [*ADDRESS, "--name", "rollout-12"], ServiceSettings)
    assert parsed.name == "rollout-12"


@pytest.mark.parametrize(
    ("role", "argv", "sentence"),
    [
        ("policy", [], "the following arguments are required: --controller; see starling policy --help"),
        ("policy", ["--contoller", "tcp://h:1"], r"unknown flag --contoller; did you mean --controller\?"),
        ("reward", ["--contoller", "tcp://h:1"], r"unknown flag --contoller; did you mean --controller\?"),
        ("reward", [*ADDRESS, "--confg=a.toml"], r"unknown flag --confg; did you mean --config\?"),
    ],
)
def test_mistake_is_one_sentence(role: Role, argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        parse_arguments(role, argv, ServiceSettings)
    assert "\n" not in str(caught.value)


def test_reward_service_needs_no_controller() -> None:
    assert parse_arguments("reward", [], ServiceSettings).controller == ""


def test_settings_are_left_to_the_loader() -> None:
    flags = ["--run.seed", "3", "--network.curve=false", "--seed", "4"]
    parsed = parse_arguments("reward", [*ADDRESS, *flags], ServiceSettings)
    assert parsed.flags == tuple(flags), "also a setting without its section, which the loader reports"


def test_name_of_the_process_is_known_before_the_command_line_is_parsed() -> None:
    assert process_name("reward", []) == "reward-0"
    assert process_name("reward", ["--name"]) == "reward-0"
    assert process_name("reward", ["--name", "reward-3", "--key", "k"]) == "reward-3"
    assert process_name("reward", ["--key", "k", "--name=reward-4"]) == "reward-4"
    assert process_name("policy", ["--node-rank", "2", "--name=policy-1"]) == "policy-1.node-2"
    assert process_name("policy", ["--node-rank=0"]) == "policy-0"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--rdzv h:1", "--nnodes is missing; give the number of nodes, or leave the other flags of nodes out"),
        ("--node-rank 0", "--nnodes is missing"),
        ("--nnodes 0", "--nnodes 0 is no number of nodes; give at least 1"),
        (
            "--nnodes 2 --rdzv h:1",
            "--nnodes 2 has the nodes 0 to 1, and --node-rank is missing; give each",
        ),
        ("--nnodes 4 --node-rank 4 --rdzv h:1", "has the nodes 0 to 3, and --node-rank 4 is not one of them"),
        (
            "--nnodes 2 --node-rank 1",
            "--rdzv is missing; give each node the address at which node 0 listens",
        ),
        ("--nnodes 2 --node-rank 1 --rdzv h:0", "--rdzv h:0 is no address; give each node the address"),
        ("--nnodes 2 --node-rank 1 --rdzv :29400", "--rdzv :29400 is no address"),
        ("--nnodes two", "argument --nnodes: invalid int value: 'two'"),
        ("--nnode 2", r"unknown flag --nnode; did you mean --nnodes\?"),
        ("--nnodes 2 --node-rank 1 --rdzv h:1 --ranks-per-node -1", "--ranks-per-node -1 is no number of ranks"),
    ],
)
def test_wrong_node_is_one_sentence(flags: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_arguments("policy", [*ADDRESS, *flags.split()], ServiceSettings)


def test_policy_knows_its_node() -> None:
    flags = ["--nnodes", "3", "--node-rank", "2", "--rdzv", "h:29400", "--ranks-per-node", "8"]
    parsed = parse_arguments("policy", [*ADDRESS, *flags], ServiceSettings)
    assert parsed.nodes == NodeArguments(2, 3, "h", 29400, 8)
    for alone in ([], ["--nnodes", "1", "--node-rank", "0"]):
        assert parse_arguments("policy", [*ADDRESS, *alone], ServiceSettings).nodes is None


def test_rollout_knows_its_node() -> None:
    flags = ["--nnodes", "2", "--node-rank", "1", "--rdzv", "h:29500"]
    assert parse_arguments("rollout", [*ADDRESS, *flags], ServiceSettings).nodes == NodeArguments(1, 2, "h", 29500, 0)
    assert process_name("rollout", flags) == "rollout-0.node-1"


def test_help_lists_flags_and_settings_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments("reward", ["--help"], ServiceSettings)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"{flag} " in text or f"{flag}\n" in text for flag in OWN_FLAGS)
    sections = [line for line in text.splitlines() if line.startswith("[")]
    assert sections == [f"[{name}]" for name in ServiceSettings.model_fields]
    for setting in iter_settings(ServiceSettings):
        assert f"  --{setting.key.replace('_', '-')} {setting.type} (default {setting.default})" in text
    assert text.rstrip().endswith("--name reward-0 --controller tcp://10.0.0.1:5555")


HUB = "someone/flash-attn"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"attn_implementation": HUB}, "attn_implementation"),
        ({"_attn_implementation": f"{HUB}@v1:forward"}, "_attn_implementation"),
        ({"attn_implementation": {"": "sdpa", "text_config": HUB}}, "attn_implementation"),
        ({"text_config": {"attn_implementation": f"paged|{HUB}"}}, "attn_implementation"),
        ({"parts": [{"experts_implementation": HUB}]}, "experts_implementation"),
    ],
)
def test_model_folder_that_names_a_kernel_of_a_hub_is_refused(
    config: dict[str, object], key: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    with pytest.raises(
        ConfigError, match=rf"config\.json has {key} = .*{HUB}.* a kernel that transformers would downl"
    ):
        check_model_folder(str(tmp_path), weights=False)


@pytest.mark.parametrize(
    "text", ['{"attn_implementation": "sdpa", "path": "a/b"}', "{", "[" * 99_999, '{"attn_implementation": null}']
)
def test_other_configurations_are_left_to_the_loader(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert check_model_folder(str(tmp_path), weights=False) == tmp_path


def test_link_in_a_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model" / "config.json").symlink_to("../config.json")
    with pytest.raises(ConfigError, match=r"config\.json is a link to .*, outside of the model folder: copy the file"):
        check_model_folder(str(tmp_path / "model"), weights=False)


PROGRAM = """
import os, sys
from starling.common.service import serve
from starling.common.settings import ServiceSettings
serve(sys.argv[1], ServiceSettings, None, ["--no-such-flag"])
print(os.environ.get("HF_HUB_OFFLINE"), os.environ["USE_HUB_KERNELS"])
"""


@pytest.mark.parametrize(("role", "expected"), [("policy", "1"), ("rollout", "1"), ("teacher", "1"), ("reward", None)])
def test_processes_that_load_models_leave_the_hub(role: str, expected: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment["USE_HUB_KERNELS"] = "YES"  # what the user has set is left
    command = [sys.executable, "-c", PROGRAM, role]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == [str(expected), "YES"]
