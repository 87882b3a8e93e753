"""Start of the HTTP server, if it is enabled or the environment needs it. Imports the web server only then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starling.rollout.api.server import ApiServer
    from starling.rollout.engine.base import EngineSpec
    from starling.rollout.engine.queue import EngineQueue
    from starling.rollout.env.registry import LoadedEnvironment


def start_api(
    spec: EngineSpec,
    tokenizer: Any,
    max_model_len: int,
    engine_queue: EngineQueue,
    environment: LoadedEnvironment | None,
    *,
    folder: Path,
    version: Callable[[], int],
) -> ApiServer | None:
    """Start the HTTP server where it is enabled or the environment's programs need it, and connect those.

    Args:
        spec: specification of the engine.
        tokenizer: the model's.
        max_model_len: limit on the tokens of one sequence.
        engine_queue: the request queue of the engine.
        environment: the environment of the episodes, if any.
        folder: the run's folder.
        version: returns the weight version in use.

    Raises:
        ConfigError: the address cannot be bound.
    """
    settings, connect = spec.rollout.api, environment.connect if environment is not None else None
    if not settings.enabled and connect is None:
        return None
    # Imported here, so that a replica without a server does not load the web server's packages.
    from starling.rollout.api.model import served_model
    from starling.rollout.api.server import ApiServer

    served = served_model(spec, tokenizer, max_model_len, version)
    server = ApiServer(engine_queue, served, settings, replica=spec.name, folder=folder if settings.enabled else None)
    if connect is not None:
        connect(server)
    return server
