"""Configuration files of Cosmos-RL's reward service: what becomes of each key, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from starling.common.errors import ConfigError
from starling.common.settings import ServiceSettings, load
from starling.reward.cosmos_settings import translate
from starling.reward.score.decode.settings import DecoderSettings
from starling.reward.settings import RewardSettings

WHOLE = """
host = "0.0.0.0"
port = 9090
redis_host = "localhost"
redis_port = 6379

[[reward_args]]
reward_type = "{scorer}"
venv_python = "python"
model_path = "/models/judge"
download_path = "/models"
dtype = "float16"
enable = true

[[reward_args]]
reward_type = "ocr"
venv_python = "/root/ocr/bin/python"
device = "cpu"
enable = false
"""
OWN = """
class Judge:
    keys = ("overall_reward", "vq_reward")

    def __init__(self, model_path, download_path, dtype="float32", device="cpu"):
        pass

    def score(self, batch):
        return {key: [1.0] * len(batch) for key in self.keys}
"""


class Settings(ServiceSettings):
    reward: RewardSettings


def translated(text: str) -> dict[str, Any]:
    found = translate(tomllib.loads(text), "rewards.toml")["reward"]
    assert isinstance(found, dict)
    return found


def reward(**values: Any) -> dict[str, Any]:
    return {"reward_args": [{"reward_type": "hpsv3", **values}]}


def test_each_key_has_its_place_in_a_recipe() -> None:
    found = translated(WHOLE.format(scorer="dance_grpo"))
    assert found["http"] == {"enabled": True, "host": "0.0.0.0", "port": 9090}
    (scorer,) = found["scorers"]
    assert scorer == {
        "name": "dance_grpo",
        "num_workers": 1,
        "key": "overall_reward",
        "options": {"model_path": "/models/judge", "download_path": "/models", "dtype": "float16"},
        "needs": {"paths": ["/models/judge", "/models"], "devices": ["gpu"]},
    }


def test_file_is_read_like_a_recipe_below_flags(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(OWN)
    file = tmp_path / "rewards.toml"
    file.write_text(WHOLE.format(scorer=f"{tmp_path}/judge.py:Judge"))
    flags = ["--reward.http.port", "9191"]
    settings = load(Settings, [file], flags, translate=translate).reward
    assert (settings.http.enabled, settings.http.host, settings.http.port) == (True, "0.0.0.0", 9191)
    assert [scorer.options["dtype"] for scorer in settings.scorers] == ["float16"]
    assert settings.scorers[0].needs.devices == ("gpu",)


def test_endpoint_needs_the_network_and_no_device() -> None:
    found = translate(reward(endpoint_url="http://judge:8000/v1", endpoint_api_key="key"), "")["reward"]["scorers"][0]
    assert found["needs"] == {"network": True}
    assert found["options"] == {"endpoint_url": "http://judge:8000/v1", "endpoint_api_key": "key"}


@pytest.mark.parametrize("tree", [{}, {"reward": {"num_workers": 1}}, {"host": "::1"}, {"reward": {}, "redis_port": 1}])
def test_recipe_stays_as_it_is(tree: dict[str, Any]) -> None:
    assert translate(tree, "") == tree


@pytest.mark.parametrize(
    ("values", "device", "seen", "devices"),
    [
        ({}, None, None, ["gpu"]),
        ({"device": "cuda"}, None, "cuda", ["gpu"]),
        ({"device": "cuda:3"}, "cuda:3", "cuda", None),
        ({"device": "cpu"}, "cpu", "cpu", None),
    ],
)
def test_device_is_granted_to_the_worker(
    values: dict[str, str], device: str | None, seen: str | None, devices: list[str] | None
) -> None:
    (scorer,) = translate(reward(**values), "")["reward"]["scorers"]
    found = scorer.get("device"), scorer["options"].get("device"), scorer["needs"].get("devices")
    assert found == (device, seen, devices)


@pytest.mark.parametrize(
    ("redis", "store"),
    [
        ({"redis_host": "localhost", "redis_port": 6379}, {}),
        ({"redis_host": "10.0.0.5", "redis_port": 0}, {}),
        ({"redis_host": "10.0.0.5"}, {"store": "redis", "redis_url": "redis://10.0.0.5:6379/0"}),
        ({"redis_host": "fd00::5", "redis_port": 7000}, {"store": "redis", "redis_url": "redis://[fd00::5]:7000/0"}),
    ],
)
def test_redis_elsewhere_is_the_store(redis: dict[str, Any], store: dict[str, str]) -> None:
    assert translate({**reward(), **redis}, "")["reward"]["http"] == {"enabled": True, **store}


def test_environment_of_a_reward_type_is_that_of_its_worker() -> None:
    (scorer,) = translate(reward(venv_python="/root/hpsv3/bin/python"), "")["reward"]["scorers"]
    assert scorer["python"] == "/root/hpsv3/bin/python"


def test_keys_without_effect_are_logged() -> None:
    with capture_logs() as logs:
        translate(reward(setup_script="hpsv3.sh", work_dir="", tmp_dir="/tmp"), "")
    assert {entry["event"] for entry in logs} == {"cosmos_setting_ignored"}
    keys = [entry["key"].removeprefix("reward_args.0.") for entry in logs]
    assert keys == ["setup_script", "tmp_dir"]


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"reward_args": []}, r"no \[\[reward_args\]\] is enabled"),
        (reward(enable=False), r"no \[\[reward_args\]\] is enabled"),
        (reward(dtyp="float16"), "unknown setting reward_args.0.dtyp = 'float16'; did you mean reward_args.0.dtype"),
        (reward(zzzzzzz=1), "unknown setting reward_args.0.zzzzzzz = 1; known: reward_type, enable"),
        (reward(device=3), "reward_args.0.device = 3 must be of type text"),
        (reward(venv_python="python3.8"), "reward_args.0.venv_python = 'python3.8': give the path"),
        (reward(enable="yes"), "reward_args.0.enable = 'yes' must be of type true or false"),
        ({**reward(), "port": True}, "port = True must be of type integer"),
        ({**reward(), "prot": 8080}, "unknown setting prot = 8080; did you mean port"),
        ({**reward(), "decode_args": {"model_pth": "x"}}, "unknown setting decode_args.model_pth"),
        ({**reward(), "decode_args": {"model_path": "x.pth"}}, "'x.pth': give a local folder of a VAE"),
        ({**reward(), "decode_args": {"model_path": "https://a.b/Wan2.1_VAE.pth"}}, "give a local folder of a VAE"),
        ({**reward(), "decode_args": {"model_path": "/vae", "load_mean_std": True}}, "load_mean_std = true: mean and"),
        ({"reward_args": ["hpsv3"]}, "reward_args.0 = 'hpsv3' is no table"),
        ({"reward_args": [{"enable": True}]}, "reward_args.0.reward_type is missing"),
        ({"reward_args": {}}, "reward_args = {} must be of type list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        translate(tree, "rewards.toml")
    assert str(caught.value).endswith("(in rewards.toml, which is a configuration of Cosmos-RL)")


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (reward(endpoint_api_kye="sk-1"), "unknown setting reward_args.0.endpoint_api_kye; did you mean"),
        (reward(endpoint_apikey="sk-1"), "unknown setting reward_args.0.endpoint_apikey; did you mean"),
        (reward(endpoint_api_key=["sk-1"]), "reward_args.0.endpoint_api_key must be of type text"),
        ({**reward(), "token": "sk-1"}, "unknown setting token; "),
        ({"reward_args": {"endpoint_api_key": "sk-1"}}, r"reward_args = \{...\} must be of type list"),
        ({**reward(), "decode_args": [{"a": "sk-1"}]}, r"decode_args = \[...\] must be of type table"),
    ],
)
def test_secret_is_in_no_error(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        translate(tree, "rewards.toml")
    assert "sk-1" not in str(caught.value)


def test_command_says_which_package_a_reward_type_needs(tmp_path: Path) -> None:
    file = tmp_path / "rewards.toml"
    file.write_text(WHOLE.format(scorer="hpsv3"))
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(file), "--dir", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.returncode == 2
    assert "Scorer 'hpsv3' needs hpsv3, which is not installed here: pip install hpsv3" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_vaes_of_decode_args_are_those_of_the_decoder() -> None:
    decode = {"model_path": "/models/wan2.1/vae", "wan2pt2_model_path": "/models/wan2.2/vae", "dtype": "bfloat16"}
    more = {"chunk_duration": 81, "temporal_window": 16, "load_mean_std": False, "device": "cuda"}
    found = translate({**reward(), "decode_args": {**decode, **more}}, "rewards.toml")
    settings = DecoderSettings.model_validate(found["reward"]["decoder"])
    assert [str(folder) for folder in settings.folders] == ["/models/wan2.1/vae", "/models/wan2.2/vae"]
    assert (settings.dtype, settings.device, settings.latents) == ("bfloat16", "cuda:0", "normalised")
    without = translate({**reward(), "no_latent_decoder": True, "decode_args": decode}, "rewards.toml")
    assert "decoder" not in without["reward"]
