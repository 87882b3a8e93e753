"""Pools of rollouts (`[[rollout.pools]]`): rollouts of different hardware, each pool with its own engine and settings.

A pool takes the settings of [rollout], and replaces some of them. Its rollouts get these as flags, on top of the
configuration that all services of a run share. Rollouts are numbered through the pools: with counts of 2 and 3, the
first pool has rollout-0 and rollout-1. What `starling scale` adds beyond the sum belongs to the last pool.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel, Field

from starling.common.errors import ConfigError
from starling.common.ranges import MAX_PROCESSES
from starling.common.secret_settings import is_secret
from starling.common.setting_fields import section_of
from starling.common.settings import SettingsSection, unknown_key, validate
from starling.rollout.settings import RolloutSettings

SHARED: Final = {
    "environment": "all rollouts play the same environment",
    "load_weights": "it follows from the kind of the run",
    "max_media_bytes": "any rollout may get any prompt",
    "max_model_len": "any rollout may get any prompt",
    "transport": "the controller checks all offers by one transport",
}
"""Settings of [rollout] that no pool may replace, and why."""


class RolloutPool(SettingsSection):
    """Rollouts of one kind of hardware."""

    count: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Replicas."""
    engine: str = ""
    """The engine of these rollouts; empty for `rollout.engine`."""
    tensor_parallel_size: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """Workers that share each layer in vLLM; 0 for `rollout.vllm.tensor_parallel_size`."""
    gpus: int = Field(default=0, ge=0, le=MAX_PROCESSES)
    """GPUs of each replica, as `launch.gpus_per_rollout`; 0 for that number."""
    gpu_kind: str = ""
    """Kind of the GPUs, as the launcher's engine names it; empty for any."""
    partition: str = ""
    """Partition of Slurm, or node pool of Kubernetes; empty for the default."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that the node of each replica must have."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings of [rollout] that these rollouts replace, such as `{num_slots = 64}` or
    `{vllm.kv_cache_dtype = "fp8"}`."""

    def overrides(self) -> dict[str, Any]:
        """Return the settings of [rollout] that differ in this pool, as a tree."""
        tree = dict(self.settings)
        if self.engine:
            tree = merged(tree, {"engine": self.engine})
        if self.tensor_parallel_size:
            tree = merged(tree, {"vllm": {"tensor_parallel_size": self.tensor_parallel_size}})
        return tree

    def flags(self) -> tuple[str, ...]:
        """Return these settings as flags of `starling rollout`."""
        return tuple(
            f"--rollout.{key}={inline_toml(value)}" for key, value in _leaves(RolloutSettings, self.overrides())
        )


class PooledRolloutSettings(RolloutSettings):
    """How replicas generate and adopt weights, and their pools."""

    pools: tuple[RolloutPool, ...] = ()
    """Rollouts of different hardware; `launch.num_rollouts` is then the sum of their counts. See
    `docs/how-to/scale.md`."""


def pool_of(pools: Sequence[RolloutPool], number: int) -> RolloutPool | None:
    """Return the pool of the rollout with this number, from 0; None where there are no pools."""
    for pool in pools:
        if number < pool.count:
            return pool
        number -= pool.count
    return pools[-1] if pools else None


def variants(rollout: PooledRolloutSettings) -> list[tuple[str, RolloutSettings]]:
    """Return the settings of the rollouts of each pool, and the key that names the pool; else of all rollouts.

    Raises ConfigError when a pool has a setting that does not exist, has no such value, or must be that of all pools.
    """
    if not rollout.pools:
        return [("rollout", rollout)]
    base = rollout.model_dump(exclude={"pools"})
    return [
        (f"rollout.pools.{number}", _settings_of(pool, base, f"rollout.pools.{number}"))
        for number, pool in enumerate(rollout.pools)
    ]


def _settings_of(pool: RolloutPool, base: Mapping[str, Any], key: str) -> RolloutSettings:
    for name in SHARED.keys() & pool.settings.keys():
        raise ConfigError(f"{key}.settings has {name}, but {SHARED[name]}; set rollout.{name}")
    overrides = pool.overrides()
    problem = unknown_key(RolloutSettings, overrides, (key, "settings"))
    if problem is not None:
        raise ConfigError(problem)
    for name, _ in _leaves(RolloutSettings, overrides):
        if is_secret(RolloutSettings, name):
            raise ConfigError(f"{key}.settings has {name}, which other users could read as a flag; set rollout.{name}")
    try:
        return validate(RolloutSettings, merged(base, overrides))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `more`; a table in both is merged."""
    result = dict(base)
    for key, value in more.items():
        before = result.get(key)
        result[key] = merged(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return result


def inline_toml(value: Any) -> str:
    """Return a value as TOML on one line, as flags take it."""
    if isinstance(value, Mapping):
        items = ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {inline_toml(item)}" for key, item in value.items())
        return f"{{{items}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(inline_toml, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def _leaves(schema: type[BaseModel], tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings in a tree by their keys; a table that is the value of one setting is one value."""
    for name, value in tree.items():
        section = section_of(schema.model_fields[name]) if name in schema.model_fields else None
        if section is not None and isinstance(value, Mapping):
            yield from _leaves(section, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
