"""Translation of the `rewards.toml` of Cosmos-RL's reward service into the settings of this one.

    host = "0.0.0.0"                          [reward.http]
    port = 8080                               enabled = true, host, port
    [[reward_args]]                           [[reward.scorers]]
    reward_type = "hpsv3"                     name = "hpsv3"
    venv_python = "/root/hpsv3/bin/python"    python = "/root/hpsv3/bin/python"
    model_path = "/models/hpsv3"              options = { model_path = "..." }, needs = { paths = ["..."] }
    device = "cuda:1"                         device = "cuda:1", options = { device = "cuda" }
    [decode_args]                             [reward.decoder]
    model_path = "/models/wan2.1/vae"         folders = ["/models/wan2.1/vae"]

A key that says nothing here, as where to put temporary files, is logged and left out; one whose loss would change
scores is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import structlog

from starling.common.errors import ConfigError
from starling.common.settings import Tree, nearest, shown

log = structlog.get_logger(__name__)

_OWN_KEYS: Final = ("reward_args", "decode_args", "redis_host", "redis_port", "no_latent_decoder")
"""By which one of them is told from a recipe."""
_SERVICE: Final[dict[str, type]] = {
    "host": str,
    "port": int,
    "redis_host": str,
    "redis_port": int,
    "no_latent_decoder": bool,
    "reward_args": list,
    "decode_args": dict,
}
_REWARD: Final[dict[str, type]] = {
    "reward_type": str,
    "enable": bool,
    "venv_python": str,
    "setup_script": str,
    "model_path": str,
    "download_path": str,
    "dtype": str,
    "device": str,
    "endpoint_url": str,
    "endpoint_api_key": str,
    "work_dir": str,
    "tmp_dir": str,
}
_OPTIONS: Final = ("model_path", "download_path", "dtype", "device", "endpoint_url", "endpoint_api_key")
"""Keys of `[[reward_args]]` that are options of a scorer, by the same names."""
_DECODE: Final[dict[str, type]] = {
    "model_path": str,
    "dtype": str,
    "device": str,
    "chunk_duration": int,
    "temporal_window": int,
    "load_mean_std": bool,
    "wan2pt2_model_path": str,
    "wan2pt2_credential_path": str,
}
_SECRETS: Final = ("endpoint_api_key",)
_SECRET_WORDS: Final = ("key", "token", "secret", "password")
"""In the names of keys whose values no error shows."""
_WITHOUT_EFFECT: Final = {
    "setup_script": "nothing is installed when the service starts",
    "work_dir": "scorers write no files",
    "tmp_dir": "scorers write no files",
}
_KEYS: Final = {"dance_grpo": "overall_reward", "cosmos_reason1": "no_score", "gen_eval": "gen_eval_reward"}
"""Which score counts in rewards of `/v1/rewards`, of types with several; clients of Cosmos-RL get them all."""
_LOCAL: Final = ("", "localhost", "127.0.0.1", "::1")
_NUM_WORKERS: Final = 1
"""Of each scorer, for it alone, as there."""
_TIMEOUT_S: Final = 120.0
_START_TIMEOUT_S: Final = 900.0
"""Models of several GB are read."""


def translate(tree: Tree, origin: str) -> Tree:
    """Return a configuration file in the form of a recipe; one that is no file of Cosmos-RL is returned as it is.

    Args:
        tree: the file's contents.
        origin: the file, for errors.

    Raises:
        ConfigError: it has an unknown key, a value of another type, or something that this service cannot do.
    """
    if "reward" in tree or not set(_OWN_KEYS) & set(tree):
        return tree
    try:
        return _translated(tree)
    except ConfigError as error:
        raise ConfigError(f"{error} (in {origin}, which is a configuration of Cosmos-RL)") from None


def _translated(tree: Tree) -> Tree:
    _check(tree, _SERVICE, "")
    http: Tree = {"enabled": True, **{key: tree[key] for key in ("host", "port") if key in tree}, **_store(tree)}
    reward: Tree = {
        "timeout_s": _TIMEOUT_S,
        "start_timeout_s": _START_TIMEOUT_S,
        "scorers": _scorers(tree.get("reward_args", [])),
        "http": http,
        **_decoder(tree),
    }
    return {"reward": reward}


def _scorers(rewards: list[Any]) -> list[Tree]:
    """Return the scorers of the rewards that are enabled. Raises ConfigError if there are none."""
    found = []
    for number, reward in enumerate(rewards):
        where = f"reward_args.{number}"
        if not isinstance(reward, dict):
            raise ConfigError(f"{where} = {shown(reward)} is no table; write [[reward_args]] above each")
        _check(reward, _REWARD, f"{where}.")
        if "reward_type" not in reward:
            raise ConfigError(f"{where}.reward_type is missing; name a scorer")
        if reward.get("enable", True):
            found.append(_scorer(reward, where))
    if not found:
        raise ConfigError("no [[reward_args]] is enabled, so there is nothing to score with; set enable = true in one")
    return found


def _scorer(reward: Mapping[str, Any], where: str) -> Tree:
    for key, why in _WITHOUT_EFFECT.items():
        if reward.get(key):
            log.warning("cosmos_setting_ignored", key=f"{where}.{key}", reason=why)
    options = {key: reward[key] for key in _OPTIONS if reward.get(key)}
    name, needs = reward["reward_type"], _needs(options)
    scorer: Tree = {"name": name, "num_workers": _NUM_WORKERS, "needs": needs}
    if name in _KEYS:
        scorer["key"] = _KEYS[name]
    device = options.get("device", "cuda")
    if device == "cpu" or ":" in device:
        scorer["device"] = device
        options["device"] = device.partition(":")[0]  # of several, it sees this one only
    elif "endpoint_url" not in options:
        needs["devices"] = ["gpu"]
    if python := _python(reward.get("venv_python", ""), where):
        scorer["python"] = python
    return {**scorer, "options": options}


def _needs(options: Mapping[str, str]) -> Tree:
    """Return what a scorer may reach besides a device."""
    needs: Tree = {}
    if paths := [
        options[key] for key in ("model_path", "download_path") if options.get(key, "").startswith(("/", "~"))
    ]:
        needs["paths"] = paths
    if "endpoint_url" in options:
        needs["network"] = True
    return needs


def _python(given: str, where: str) -> str:
    """Return the interpreter of a scorer's own environment; empty for that of the service."""
    if given in ("", "python", "python3"):
        return ""
    if "/" not in given:
        raise ConfigError(f"{where}.venv_python = {shown(given)}: give the path of an interpreter, or `python`")
    return given


def _store(tree: Tree) -> Tree:
    """Return the settings of the store: of a Redis server elsewhere. The one that Cosmos-RL starts is not needed."""
    host, port = tree.get("redis_host", ""), tree.get("redis_port", 6379)
    if host in _LOCAL or port <= 0:
        return {}
    return {"store": "redis", "redis_url": f"redis://[{host}]:{port}/0" if ":" in host else f"redis://{host}:{port}/0"}


def _decoder(tree: Tree) -> Tree:
    """Return the settings of the decoder. Raises ConfigError for what would change pixels and is not done here."""
    decode: Tree = tree.get("decode_args", {})
    _check(decode, _DECODE, "decode_args.")
    if not decode or tree.get("no_latent_decoder", False):
        return {}
    if decode.get("load_mean_std", False):
        raise ConfigError(
            "decode_args.load_mean_std = true: mean and standard deviation are those of the VAE's configuration here; "
            "set it to false, and write them into the config.json of the VAE's folder"
        )
    folders = [decode[key] for key in ("model_path", "wan2pt2_model_path") if decode.get(key)]
    for folder in folders:
        if "://" in folder or folder.endswith((".pth", ".pt", ".safetensors")):
            raise ConfigError(
                f"decode_args has {shown(folder)}: give a local folder of a VAE in the form of diffusers, as `vae` of "
                "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
            )
    for key in ("chunk_duration", "temporal_window", "wan2pt2_credential_path"):
        if key in decode:
            log.warning("cosmos_setting_ignored", key=f"decode_args.{key}", reason="the VAE's folder says all")
    device = decode.get("device", "cuda")
    found: Tree = {"folders": folders, "device": "cuda:0" if device == "cuda" else device}
    return {"decoder": {**found, **({"dtype": decode["dtype"]} if "dtype" in decode else {})}}


def _check(table: Mapping[str, Any], known: Mapping[str, type], prefix: str) -> None:
    """Raise ConfigError for a key that is not known, or has a value of another type."""
    for key, value in table.items():
        if key not in known:
            like = nearest(key, list(known))
            hint = f"did you mean {prefix}{like}?" if like else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown setting {prefix}{_named(key, value, like)}; {hint}")
        kind = known[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{prefix}{_named(key, value, key)} must be of type {_NAMES[kind]}")


def _named(key: str, value: Any, like: str | None) -> str:
    """Return a key with its value, as an error names them; without that of a secret, or of what may be one."""
    if like in _SECRETS or any(word in key.lower() for word in _SECRET_WORDS):
        return key
    if value and isinstance(value, dict | list):  # there may be one within
        return f"{key} = {'{...}' if isinstance(value, dict) else '[...]'}"
    return f"{key} = {shown(value)}"


_NAMES: Final[dict[type, str]] = {str: "text", int: "integer", bool: "true or false", list: "list", dict: "table"}
