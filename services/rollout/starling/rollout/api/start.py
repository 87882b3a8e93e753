"""Whether a replica listens, and for whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starling.rollout.api.server import ApiServer
    from starling.rollout.engine.base import EngineSpec
    from starling.rollout.env.registry import LoadedEnvironment
    from starling.rollout.shell.request_queue import EngineQueue


def start_api(
    spec: EngineSpec,
    tokenizer: Any,
    max_model_len: int,
    door: EngineQueue,
    environment: LoadedEnvironment | None,
    *,
    folder: Path,
    version: Callable[[], int],
) -> ApiServer | None:
    """Start the endpoint, where it is enabled or programs of the environment need it; then they are told of it.

    Args:
        spec: what the engine is made of.
        tokenizer: the model's.
        max_model_len: most tokens of one sequence.
        door: the way to the engine.
        environment: that of the episodes, if there is one.
        folder: the run's.
        version: the weight version in use.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    settings, connect = spec.rollout.api, environment.connect if environment is not None else None
    if not settings.enabled and connect is None:
        return None
    # Only now: a replica that does not listen needs no web server.
    from starling.rollout.api.model import served_model
    from starling.rollout.api.server import ApiServer

    served = served_model(spec, tokenizer, max_model_len, version)
    server = ApiServer(door, served, settings, replica=spec.name, folder=folder if settings.enabled else None)
    if connect is not None:
        connect(server)
    return server
