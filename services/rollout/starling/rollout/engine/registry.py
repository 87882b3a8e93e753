"""Which engine generates: one of ours by its name, or a class of the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.settings import nearest

if TYPE_CHECKING:
    from starling.rollout.engine.base import Engine, EngineSpec

ENGINES: Final = {"transformers": f"{__name__}:embedded", "vllm": "starling.rollout.engine.vllm.engine:VllmEngine"}
"""What makes each engine of ours; imported only where it is chosen, as each needs libraries of its own."""


def make_engine(spec: EngineSpec) -> Engine:
    """Make the engine that `rollout.engine` names.

    Raises:
        ConfigError: there is none of that name, or it cannot be made of `spec`.
    """
    name = spec.rollout.engine
    if name not in ENGINES and not is_import_path(name):
        like = nearest(name, list(ENGINES))
        hint = f"did you mean {like!r}?" if like else f"choose {', '.join(ENGINES)}, or `module:Class` for your own"
        raise ConfigError(f"rollout.engine = {name!r} is no engine; {hint}")
    engine: Engine = import_object(ENGINES.get(name, name), "Engine")(spec)
    return engine


def embedded(spec: EngineSpec) -> Engine:
    """Make the embedded engine, of transformers.

    Raises:
        ConfigError: the folder cannot be loaded, or its model not be decoded this way.
    """
    from starling.rollout.engine.embedded.engine import TransformersEngine
    from starling.rollout.engine.embedded.model import build_model
    from starling.weightsync.tensors.adapters import base_digest

    settings, lora = spec.rollout, spec.model.lora
    model: Any = build_model(
        spec.path,
        dtype=spec.model.dtype,
        device=spec.model.device,
        weights=settings.load_weights,
        lora=lora,
        quantise=spec.weights.quantise,
        trust_remote_code=spec.model.trust_remote_code,
    )
    return TransformersEngine(
        model,
        eos_token_ids=spec.eos_token_ids,
        max_rows=settings.max_rows,
        max_model_len=spec.max_model_len,
        exclusive=settings.exclusive,
        version=0 if settings.load_weights else -1,
        name=spec.name,
        base=base_digest(model, lora),
        digests=spec.weights.digests,
    )
