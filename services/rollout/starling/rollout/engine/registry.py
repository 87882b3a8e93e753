"""Registry of generation engines: the built-in ones by name, or a user's own class by import path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.settings import nearest

if TYPE_CHECKING:
    from starling.rollout.engine.base import Engine, EngineSpec

ENGINES: Final = {
    "transformers": "starling.rollout.engine.embedded.engine:transformers_engine",
    "vllm": "starling.rollout.engine.vllm.engine:VllmEngine",
    "diffusion": "starling.rollout.engine.diffusion.build:diffusion_engine",
}
"""Import path of what builds each engine from an `EngineSpec`; imported on use, as each needs its own libraries."""


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is built in or has the form of a user's engine; does not import it."""
    if name in ENGINES or is_import_path(name):
        return
    like = nearest(name, list(ENGINES))
    hint = f"did you mean {like!r}?" if like else f"choose {', '.join(ENGINES)}, or `module:Class` for your own"
    raise ConfigError(f"rollout.engine = {name!r} is not an engine; {hint}")


def make_engine(spec: EngineSpec) -> Engine:
    """Build the engine that `rollout.engine` names.

    Raises:
        ConfigError: there is no engine of that name, or it cannot be built from `spec`.
    """
    name = spec.rollout.engine
    check_name(name)
    engine: Engine = import_object(ENGINES.get(name, name), "Engine")(spec)
    return engine
